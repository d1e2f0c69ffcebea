"""Every kind of play, by its word: whatever fails, the job ends as an undisturbed one. `test_simulation.py` has more.

`python -m rallypoint.testing.simulation --policy WORD --seed N` plays one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.local import Drift, InnerStates, OwnParameters
from rallypoint.testing.simulation.operating.pauses import PAUSE
from rallypoint.testing.simulation.operating.resuming import RESUME, WAYS, Resuming
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import parse_policy, replay_line, word_for
from rallypoint.testing.simulation.replicas.contents import SCALING, scale_of
from rallypoint.testing.simulation.replicas.inner import DelayedReplicas, Inner
from rallypoint.testing.simulation.run import simulate
from rallypoint.testing.simulation.store import SimulatedStore

# What is played around another kind: of seed n the n-th of these.
IN_TURN = {
    "paused": ("sync", "sync", "sync", "async", "stopped", "decided"),
    "resumed": ("sync", "quorum:2", "ssp:1", "async", "fragments:2", "all-reduce", "codec-state", "inner:3", "delay:1",
                "tables", "stopped", "scaled", "decided", "carrying", "store"),
    "stopped": ("sync", "sync", "sync", "all-reduce"),
    "uneven": ("sync", "sync", "sync", "paused", "stopped", "decided", "audited", "codec-state", "tables", "all-reduce",
               "async", "fragments:2"),
}  # fmt: skip
BESIDE = (
    "averaged", "averaged:async", "averaged:fragments:2", "late", "averaged:late", "recorded", "streamed", "malformed",
    "malformed:ssp:1", "malformed:tables", "malformed:all-reduce", "malformed:streamed",
)  # fmt: skip
QUICK: dict[str, Sequence[int]] = {
    **dict.fromkeys(("audited", "late", "recorded", "streamed", "malformed", "codec-state:quorum:2"), range(6)),
    "audited:wrong": (0, 3, 1134), "carrying:all-reduce": range(3, 11), "decided": (0, 3, 6, 9),
    "evaluating": (0, 3, 6, 9, 11, 14), "inner-fragments:3": range(18), "paused": (0, 3, 6, 9), "resumed": (0, 12),
    "stopped": (1, 5, 8, *range(10, 20)), "store": range(12), "tables:async": range(6), "uneven": (0, 1, 2, 8, 11),
}  # fmt: skip
SLOW: dict[str, Sequence[int]] = {
    **dict.fromkeys(BESIDE, (*range(6), *range(1000, 1100))),
    **dict.fromkeys(("codec-state:ssp:1", "codec-state:async", "codec-state:fragments:2"), range(6)),
    **dict.fromkeys(("tables:quorum:2", "tables:ssp:1"), range(6)),
    **dict.fromkeys(("store:async", "store:ssp:1"), (*range(6), *range(100, 125))), "store": range(100, 125),
    **dict.fromkeys(("codec-state", "delay:1", "delay:2", "inner:3", "inner-fresh:2"), range(18)),
    "audited": range(3000, 3010), "audited:wrong": (1, 2, 4, 1108, 2099, *range(3000, 3010)), "carrying": range(3, 11),
    "decided": (*range(12), 165, *range(1000, 1030)), "evaluating": (*range(16), *range(1000, 1040)),
    "paused": (*range(10), *range(1000, 1050)), "resumed": (*range(16), *range(1000, 1064)), "scaled": range(6, 13),
    "stopped": (*range(10), *range(1000, 1100)), "tables": range(12), "uneven": (*range(28), *range(1000, 1150)),
}  # fmt: skip


def _in_parts(plays: Mapping[str, Sequence[int]], at_most: int) -> list[tuple[str, Sequence[int]]]:
    return [(kind, all_[at : at + at_most]) for kind, all_ in plays.items() for at in range(0, len(all_), at_most)]


def _word(kind: str, seed: int) -> str:
    kinds = IN_TURN.get(kind, ("sync",))
    return f"{kind}:{kinds[seed % len(kinds)]}".removesuffix(":sync")


def _played(kind: str, seeds: Sequence[int]) -> list[Plan]:
    return [make_plan(seed, parse_policy(_word(kind, seed))) for seed in seeds]


@pytest.mark.parametrize(("kind", "seeds"), _in_parts(QUICK, 6))
def test_whatever_fails_a_play_ends_as_an_undisturbed_one(kind: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        simulate(seed, parse_policy(_word(kind, seed)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds"), _in_parts(SLOW, 25))
def test_many_plays_end_as_undisturbed_ones(kind: str, seeds: Sequence[int]) -> None:
    test_whatever_fails_a_play_ends_as_an_undisturbed_one(kind, seeds)


@pytest.mark.parametrize(("seed", "word"), [
    (70046, "delay:1"),  # an aggregator that was given up sent what it held on its old links when it went on
    (368683100, "sync"),  # a worker began to use an aggregator to which two versions of a shard had not come
    (369071010, "sync"),  # a worker that was given up and joined again went on with a replica of another one by then
    (369699017, "inner-fragments:2"),  # an aggregator came back to a job that all workers had left at its beginning
    (368666202, "fold:3"),  # a new coordinator had not heard that servers had applied the last round
    (398387816, "inner-fragments:2"),  # the server that had applied the last round left, and its coordinator died
    (400100506, "inner-fragments:2"),  # a snapshot of the version before the one that buffers were restored at
    (833107095, "sync"),  # after a roll-back a third server counted as caught up that was none any more
    (884002396, "decided"),  # a coordinator died after it had journalled a figure, and before it could show it
    (875642006, "decided"),  # the same
    (700017, "fold:3"),  # a snapshot's clocks counted a contribution that came before the shard was copied
    (910000043, "store"),  # a worker whose script had failed stayed, when the coordinator was away as it said so
    (771653099, "sync"),  # what a worker held was told to a coordinator that knew of no version before a hand-over
    (259262665, "async"),  # a server died between its answer and the contribution that had asked for it
    (259519144, "ssp:1"),  # two coordinators in turn died before the job had begun
    (333689123, "all-reduce"),  # all fell silent at once before a step was computed, and a server had left before
    (9151, "all-reduce"),  # version 0 was lost before a step was computed, and could not be stored
    (335139026, "async"),  # another worker had finished the replica before a worker's own step of it was over
    (341150031, "quorum:2"),  # a link was lost while the first version was being installed
    (297242018, "sync"),  # a server slept through a roll-back, and was sent what nobody sees any more
    (3332, "stopped:all-reduce"),  # a stop that the journal had no room for is known from the snapshot
    (3255, "stopped"),  # a server that may go after one loss stays when another is lost at the same moment
    # A worker whose links all break goes ahead, and keeps what its other replicas of the round need.
    (600000591, "delay:1"), (600000693, "delay:1"), (600000981, "delay:1"),
    # A shard goes away and comes back in views that a worker misses in a long pause: all is sent again.
    pytest.param(600000613, "delay:1", marks=pytest.mark.slow),
    (359152051, "tables:quorum:2"),  # nobody is told to leave while the only other worker sleeps and was told before
    (5016, "quorum:2"),  # the main thread was told to go when a view gave its worker replicas
    (137, "codec-state:ssp:1"),  # who computes a replica just reassigned does not keep its codec states
    # A view takes the replica that a leaving worker is about to compute: it gives its codec states all the same.
    (334281247, "codec-state"), (334281655, "codec-state"), (334281979, "codec-state"),
    (334281942, "codec-state"),  # who was given up uses no state that lacks what others have contributed since
    # A snapshot for which a worker has no copy of a codec state any more is given up: it was stored without.
    (1469, "resumed:codec-state"), (121, "codec-state"),
])  # fmt: skip
def test_a_seed_that_found_a_defect_ends_well(seed: int, word: str) -> None:
    simulate(seed, parse_policy(word))


# ---- what is in the plans: else the tests above would be as well if nothing happened ----


@pytest.mark.parametrize(("kind", "seeds"), [
    ("carrying", range(3, 11)), ("carrying:all-reduce", range(3, 11)), ("inner-fresh:2", range(18)),
    ("inner-fragments:3", range(18)), ("scaled", range(6, 13)), ("store", range(12)), ("tables", range(12)),
])  # fmt: skip
def test_something_fails_in_them(kind: str, seeds: Sequence[int]) -> None:
    assert any(plan.faults for plan in _played(kind, seeds))


@pytest.mark.parametrize("word", ["codec-state", "delay:1", "delay:2", "inner:3", "inner-fragments:3"])
def test_some_of_the_plans_promise_the_bytes_and_in_others_states_may_be_lost(word: str) -> None:
    """The bytes: where nothing fails; with a delay also while links break and members are slow; with codec states also
    where workers leave as told. In the others the job ends, and a round that is computed again comes to the same (I2).
    """
    plans = _played(word, range(18))
    assert {plan.job.loses_states for plan in plans} == {True, False}
    assert word.startswith("inner") or any(plan.faults for plan in plans if not plan.job.loses_states)


def test_jobs_are_of_all_sorts() -> None:
    for carrying in ("carrying", "carrying:all-reduce"):
        assert any(plan.job.replicas > 1 for plan in _played(carrying, range(3, 11)))
    assert any(plan.job.tables for plan in _played("store", range(12)))
    assert not any(plan.job.loses_states for plan in _played("inner-fresh:2", range(18)))
    evaluating = _played("evaluating", range(8))
    assert {plan.terms.backup_tasks for plan in evaluating} == {True, False}
    assert any(plan.aggregators for plan in evaluating)
    stops = [plan.job.stop for plan in _played("stopped", range(0, 80, 4))]
    assert {stop.leaves for stop in stops if stop is not None} == {True, False}


def test_decided_jobs_have_all_rules() -> None:
    jobs = [plan.job for plan in _played("decided", range(16))]
    assert {bool(job.rules.stops) for job in jobs} == {True, False}
    assert {job.rules.best is None for job in jobs} == {True, False}
    assert any(job.end < job.steps for job in jobs), "some jobs end early"
    assert any(job.trajectory and job.undisturbed_decisions.decided.reductions for job in jobs)


@pytest.mark.slow
def test_steps_are_skipped_and_loss_scales_grow() -> None:
    last = [scale_of(plan.job.undisturbed()[-1]) for plan in _played("scaled", range(6, 13))]
    assert min(last) < SCALING.init_scale < max(last)


@pytest.mark.slow
def test_some_roll_back_in_a_pause_which_stays() -> None:
    """It would be as well if the coordinator refused each pause, or forgot it."""
    results = [simulate(seed, parse_policy("paused")) for seed in range(4)]
    assert sum(bool(result.outcome.paused) for result in results) >= 3
    assert max(len({generation for generation, _ in result.outcome.paused}) for result in results) > 1


@pytest.mark.slow
def test_shards_do_move_in_the_middle_of_uneven_jobs() -> None:
    """It would be as well if the coordinator believed nothing."""
    results = [simulate(seed, parse_policy("uneven")) for seed in range(8)]
    moves = [sum("shards move" in said for said in result.outcome.said) for result in results]
    assert sum(moves) >= 8
    assert max(moves) >= 2


def test_jobs_are_resumed_in_each_way_and_coordinators_die_before_the_first_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher says --resume once; a person's command says it each time, on the job's journal, with a new one, or for
    another job, which only reads the first one's snapshots."""
    begun, gathering = Counter[str](), Counter[bool]()
    begins, recovers = Resuming._begin, ClusterMachine._recover

    def begin(self: Resuming, way: str, store: SimulatedStore, command: str) -> None:
        begun[way] += store.newest()[1] > 0
        begins(self, way, store, command)

    def recover(self: ClusterMachine, state: ClusterState) -> None:
        recovers(self, state)
        gathering[self.view is None and state.origin is not None and self.resume is None] += 1

    monkeypatch.setattr(Resuming, "_begin", begin)
    monkeypatch.setattr(ClusterMachine, "_recover", recover)
    for seed in (2, 4, 6, 9):
        simulate(seed, parse_policy("resumed"))
    assert set(begun) == set(WAYS)
    assert sum(begun.values()) >= 4, f"they begin with version 0, most of them: {begun}"
    assert gathering[True] >= 2, "too few coordinators die before the first view"


@pytest.mark.slow
def test_replicas_go_ahead_and_compute_the_round_before_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter[str]()

    def counted(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any) -> Any:
            result = method(*args)
            counts[name] += result is not False
            return result

        monkeypatch.setattr(owner, name, call)

    counted(DelayedReplicas, "goes_ahead")
    counted(OwnParameters, "resume")
    counted(Drift, "step_back")
    for seed in range(18):
        simulate(seed, parse_policy("delay:2"))
    assert counts["goes_ahead"] > 100
    assert counts["resume"] > 100
    assert counts["step_back"] > 0


def test_a_replica_that_goes_ahead_leaves_the_states_of_those_that_are_a_round_behind() -> None:
    states = InnerStates(True, Inner, ahead=True)
    for replica in (0, 1):
        states.begin(0, replica, ViewNumber(1, 1))
        states.made(replica)
    states.begin(1, 0, ViewNumber(1, 1))
    states.made(0)
    behind = states.kept[1]
    states.begin(2, 0, ViewNumber(1, 1))
    assert states.begin(1, 1, ViewNumber(1, 1)) is behind


def test_each_replica_contributes_to_its_own_state_and_to_no_other() -> None:
    (plan,) = _played("carrying", [3])
    carried = [shard.index for shard in plan.job.layout.shards if shard.replica is not None]
    assert [list(plan.job.contributing(index)) for index in carried] == [[r] for r in range(plan.job.replicas)]


# ---- words ----

WORDS = (
    "sync", "async", "all-reduce", "ssp:1", "ssp:3", "quorum:2", "fold:3", "fragments:2", "codec-state",
    "codec-state:quorum:2", "codec-state:ssp:1", "codec-state:async", "codec-state:fragments:2", "inner:3",
    "inner-fresh:2", "inner-fragments:3", "delay:1", "delay:2", "tables", "tables:quorum:2", "tables:ssp:1",
    "tables:async", "poisoned", "poisoned:async", "poisoned:quorum:2", "scaled", "audited", "audited:wrong", "decided",
    "evaluating", "stopped", "stopped:all-reduce", "store", "store:async", "store:ssp:1", "carrying",
    "carrying:all-reduce", "uneven", "uneven:paused", "uneven:paused:decided", "uneven:averaged", *BESIDE,
)  # fmt: skip
AROUND = {
    PAUSE: ("paused", "paused:quorum:2", "paused:async", "paused:decided", "paused:stopped", "paused:fragments:2",
            "paused:recorded"),
    RESUME: ("resumed", *(f"resumed:{kind}" for kind in IN_TURN["resumed"][1:]), "resumed:streamed"),
}  # fmt: skip
NO_WORDS = (
    "", "async:2", "codec-state:", "codec-state:all-reduce", "codec-state:codec-state", "codec-state:delay:1",
    "codec-state:inner:2", "delay", "delay:", "delay:0", "fold:0", "fragments:1", "inner", "inner-fragments:1",
    "inner-fresh:", "inner:0", "quorum:0", "ssp", "ssp:", "ssp:-1", "sync:1", "tables:", "tables:all-reduce",
    "tables:fragments:2", "tables:tables", "paused:", "paused:paused", "what", "malformed:store", "malformed:paused",
    "recorded:async", "streamed:", "tables:late", "carrying:ssp:1", "store:quorum:2", "store:all-reduce",
    "paused:store", "resumed:resumed", "resumed:paused", "paused:resumed", "uneven:resumed",
)  # fmt: skip


@pytest.mark.parametrize("word", [*WORDS, *AROUND[PAUSE], *AROUND[RESUME]])
def test_a_word_is_read_written_again_and_is_in_the_line_that_replays(word: str) -> None:
    policy = parse_policy(word)
    assert word_for(policy) == word
    option = "" if word == "sync" else f"--policy {word} "
    assert replay_line(3, policy) == f"python -m rallypoint.testing.simulation {option}--seed 3"
    plan = make_plan(3, policy)
    assert plan.played == policy
    assert {fault.kind for fault in plan.faults} >= {kind for kind, words in AROUND.items() if word in words}


def test_each_word_is_something_else() -> None:
    words = (*WORDS, *AROUND[PAUSE], *AROUND[RESUME])
    assert len({repr(parse_policy(word)) for word in words}) == len(words)


@pytest.mark.parametrize("word", NO_WORDS)
def test_what_is_no_word_is_refused_and_the_words_are_listed(word: str) -> None:
    with pytest.raises(ValueError, match=r"no policy.*use sync, quorum:K, ssp:S, async or fold:N"):
        parse_policy(word)
