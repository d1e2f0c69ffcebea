"""The server's machine: shards under the view in force, fills in the background, decisions taken together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from rallypoint.core.policy import Async, Policy, Sync
from rallypoint.core.shard import effects as fx
from rallypoint.core.shard.clip import Measure, Rule, StepVerdict, Tell
from rallypoint.core.shard.effects import Abandon, Apply, BackupCaughtUp, CaptureShard, Fill, Finish, Prove, Publish
from rallypoint.core.shard.events import Acked, Compared, Contribute, Initialise, Loaded, Replicated
from rallypoint.core.shard.machine import Proofs, ShardMachine
from rallypoint.core.shard.server import (
    FILLS_AT_ONCE,
    Disown,
    Effect,
    On,
    Own,
    Restore,
    ServerMachine,
    ServerPlan,
    TellDisproved,
    TellNotFinite,
)
from rallypoint.core.shard.shell import Answer, ServerShell
from rallypoint.core.view import Incoming, Member, View, ViewNumber

FIRST = ViewNumber(1, 1)


def applied(step: int, scale: float | None) -> Apply:
    return Apply(step + 1, step, scale, step)


def _plan(
    shards: int, *, decides: bool = False, buffers: frozenset[int] = frozenset(), skip: bool = False,
    policy: Policy | None = None,
) -> ServerPlan:  # fmt: skip
    parameters = frozenset(range(shards)) - buffers
    waiting = frozenset(range(shards)) if skip else parameters
    return ServerPlan(
        policy or Sync(), [1] * shards, parameters, waiting if decides else frozenset(),
        Rule(1.0 if decides else None, skip),
    )


def _view(
    count: int, primary: Mapping[int, str], backup: Mapping[int, str] | None = None, *, generation: int = 1,
    origin: str = "", incarnations: Mapping[str, int] | None = None, paired: Mapping[int, int] | None = None,
) -> View:  # fmt: skip
    """Primaries and backups met in view `generation`, unless `paired` says otherwise."""
    born = {"s0": 1, "s1": 2, "s2": 3} if incarnations is None else incarnations
    return View(
        number=ViewNumber(1, count), generation=ViewNumber(1, generation), workers=(), assignments=(), origin=origin,
        servers=tuple(Member(id, "h", f"{id}:1", incarnation) for id, incarnation in born.items()),
        primary=dict(primary), backup=dict(backup or {}),
        paired={shard: ViewNumber(1, (paired or {}).get(shard, generation)) for shard in backup or {}},
    )  # fmt: skip


@dataclass(eq=False)
class _Line:
    """A worker's or a server's connection."""

    number: int = 1


def _on(effects: list[Effect], kind: type) -> list[tuple[int, Any]]:
    return [(e.shard, e.effect) for e in effects if isinstance(e, On) and isinstance(e.effect, kind)]


def _server(plan: ServerPlan, view: View, *linked: str, initialised: bool = True) -> ServerMachine:
    """s0 under its first view, with links to others, its primaries at version 0."""
    server = ServerMachine("s0", plan)
    server.adopt(view)
    for other in linked:
        server.peer_linked(other)
    if initialised:
        for index in view.shards_of("s0"):
            server.handle(index, Initialise(1000 + index))
    return server


# ---- snapshots ----


def test_buffers_that_are_one_version_ahead_are_captured_at_the_version_before() -> None:
    server = _server(_plan(3, buffers=frozenset({2})), _view(1, {0: "s0", 1: "s0", 2: "s0"}))
    server.handle(2, Contribute(0, 0, 5, 1.0))
    assert server.machine(2).version == 1  # type: ignore[union-attr]
    assert _on(server.capture(0), CaptureShard) == [(0, CaptureShard(0)), (1, CaptureShard(0)), (2, CaptureShard(0))]
    server.handle(0, Contribute(0, 0, 6, 1.0))
    assert _on(server.capture(0), CaptureShard)[0] == (0, CaptureShard(1, missed=True)), (
        "parameters have an optimizer's state"
    )


def test_buffers_that_come_from_a_snapshot_have_no_version_before_it() -> None:
    server = _server(_plan(2, buffers=frozenset({1})), _view(1, {0: "s0", 1: "s0"}), initialised=False)
    server.handle(0, Loaded(3))
    server.handle(1, Loaded(4))
    assert _on(server.capture(3), CaptureShard) == [(0, CaptureShard(3)), (1, CaptureShard(4, missed=True))]


# ---- views ----


def test_the_first_view_says_what_is_held_here() -> None:
    server = ServerMachine("s0", _plan(4))
    effects = server.adopt(_view(1, {0: "s0", 1: "s1", 2: "s0", 3: "s2"}, {1: "s0", 0: "s1"}))
    assert [effect for effect in effects if isinstance(effect, Own)] == [Own(0), Own(1), Own(2)]
    assert server.held == [0, 1, 2]
    assert [server.is_primary(index) for index in range(4)] == [True, False, True, False]
    assert server.machine(3) is None
    assert server.incarnation == 1


def test_an_older_view_and_the_same_one_again_change_nothing() -> None:
    server = _server(_plan(2), _view(2, {0: "s0", 1: "s0"}))
    assert server.adopt(_view(1, {0: "s1", 1: "s1"})) == []
    assert server.adopt(_view(2, {0: "s1", 1: "s1"})) == []
    assert server.held == [0, 1]


def test_shards_that_went_elsewhere_are_let_go_and_new_ones_are_made_room_for() -> None:
    server = _server(_plan(3), _view(1, {0: "s0", 1: "s0", 2: "s1"}))
    effects = server.adopt(_view(2, {0: "s1", 1: "s0", 2: "s0"}))
    assert [effect for effect in effects if isinstance(effect, (Own, Disown))] == [Disown(0), Own(2)]
    assert server.machine(1).version == 0  # type: ignore[union-attr]
    assert server.held == [1, 2]


def test_after_a_roll_back_everything_is_let_go_and_read_from_the_snapshot() -> None:
    server = _server(_plan(3), _view(1, {0: "s0", 1: "s0", 2: "s1"}))
    effects = server.adopt(_view(4, {0: "s0", 1: "s1", 2: "s0"}, {1: "s0"}, generation=4, origin="step-7"))
    assert effects[:2] == [Disown(0), Disown(1)]
    assert effects[-1] == Restore((0, 2), "step-7")
    assert server.held == [0, 1, 2]
    assert all(server.machine(index).version == -1 for index in server.held)  # type: ignore[union-attr]
    assert _on(server.handle(0, Loaded(7)), Publish) == [(0, Publish(7))]


def test_a_server_that_was_given_up_and_came_back_holds_nothing_of_what_it_held() -> None:
    server = _server(_plan(2), _view(1, {0: "s0", 1: "s1"}, {1: "s0"}))
    server.handle(1, Loaded(5))
    effects = server.adopt(_view(3, {0: "s1", 1: "s1"}, {0: "s0", 1: "s0"}, incarnations={"s0": 9, "s1": 2}))
    assert [effect for effect in effects if isinstance(effect, (Own, Disown))] == [Disown(0), Disown(1), Own(0), Own(1)]
    assert not any(isinstance(effect, Restore) for effect in effects)  # the others go on: it will be filled
    assert server.incarnation == 9
    assert all(server.machine(index).version == -1 for index in (0, 1))  # type: ignore[union-attr]


def test_a_server_that_the_view_does_not_name_holds_nothing() -> None:
    server = _server(_plan(1), _view(1, {0: "s0"}))
    assert server.adopt(_view(2, {0: "s1"}, incarnations={"s1": 2})) == [Disown(0)]
    assert (server.incarnation, server.held) == (-1, [])


def test_updates_count_only_from_the_primary_of_the_view_in_force() -> None:
    server = ServerMachine("s0", _plan(3))
    assert not server.takes_from(0, "s1")
    server.adopt(_view(1, {0: "s1", 1: "s0", 2: "s2"}, {0: "s0"}))
    assert server.takes_from(0, "s1")
    assert not server.takes_from(0, "s2")  # a primary that was replaced (I10)
    assert not server.takes_from(1, "s0")
    assert not server.takes_from(2, "s2")  # another is its backup
    server.adopt(_view(2, {0: "s0", 1: "s0", 2: "s2"}))
    assert not server.takes_from(0, "s1")


# ---- backups ----


def test_backups_are_filled_a_few_at_a_time_once_they_are_linked_and_there_is_something_to_send() -> None:
    shards = FILLS_AT_ONCE + 2
    view = _view(1, dict.fromkeys(range(shards), "s0"), dict.fromkeys(range(shards), "s1"))
    server = _server(_plan(shards), view)
    effects = server.peer_linked("s1")
    assert _on(effects, Fill) == [(index, Fill(0)) for index in range(FILLS_AT_ONCE)]
    assert server.peer_linked("s1") == []
    effects = server.handle(0, Acked(0))
    assert _on(effects, BackupCaughtUp) == [(0, BackupCaughtUp())]
    assert _on(effects, Fill) == [(FILLS_AT_ONCE, Fill(0))]
    assert server.caught_up == {0: FIRST}


def test_a_backup_that_is_linked_before_there_is_anything_to_send_is_filled_with_the_first_version() -> None:
    server = _server(_plan(1), _view(1, {0: "s0"}, {0: "s1"}), "s1", initialised=False)
    assert server.handle(0, Initialise(1)) == [On(0, fx.InstallFirst(1)), On(0, Publish(0)), On(0, Fill(0))]
    restored = _server(_plan(1), _view(1, {0: "s0"}, {0: "s1"}, origin="step-3"), "s1", initialised=False)
    assert restored.handle(0, Loaded(3)) == [On(0, Publish(3)), On(0, Fill(3))]


def test_a_backup_whose_link_was_lost_is_filled_again_and_still_counts() -> None:
    view = _view(3, {0: "s0", 1: "s0"}, {0: "s1", 1: "s2"}, paired={1: 3})
    server = _server(_plan(2), view, "s1", "s2")
    for index in (0, 1):
        server.handle(index, Acked(0))
    server.peer_lost("s1")
    assert server.caught_up == {0: FIRST, 1: ViewNumber(1, 3)}
    assert _on(server.handle(0, Contribute(0, 0, 1.0, 1)), Publish) == []
    assert _on(server.peer_linked("s1"), Fill) == [(0, Fill(1))]
    assert _on(server.handle(0, Acked(1)), Publish) == [(0, Publish(1))]


def test_a_fill_that_was_under_way_on_a_lost_link_makes_room_for_others() -> None:
    primary = dict.fromkeys(range(4), "s0")
    server = _server(_plan(4), _view(1, primary, {0: "s1", 1: "s1", 2: "s2", 3: "s2"}), "s1", "s2")
    assert _on(server.peer_lost("s1"), Fill) == [(2, Fill(0)), (3, Fill(0))]


def test_an_update_that_is_acknowledged_fills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it look whether there is anything to fill: with replication that would be n looks at every update."""
    server = _server(_plan(2), _view(1, dict.fromkeys(range(2), "s0"), dict.fromkeys(range(2), "s1")), "s1")
    for index in (0, 1):
        server.handle(index, Acked(0))
    monkeypatch.setattr(ServerMachine, "held", property(lambda self: pytest.fail("it looked at all shards")))
    server.handle(0, Contribute(0, 0, 1.0, 1))
    assert _on(server.handle(0, Acked(1)), Publish) == [(0, Publish(1))]


@pytest.mark.parametrize("again", [{"s0": 1, "s1": 8, "s2": 3}, {"s0": 1, "s2": 3}], ids=["born again", "another"])
def test_another_backup_process_starts_from_nothing(again: dict[str, int]) -> None:
    server = _server(_plan(1), _view(1, {0: "s0"}, {0: "s1"}), "s1", "s2")
    server.handle(0, Acked(0))
    assert server.caught_up == {0: FIRST}
    backup = "s1" if "s1" in again else "s2"
    effects = server.adopt(_view(2, {0: "s0"}, {0: backup}, incarnations=again, paired={0: 2}))
    assert server.caught_up == {}
    if backup == "s1":
        assert _on(effects, Fill) == []  # the new process is not linked yet
        effects = server.peer_linked("s1")
    assert _on(effects, Fill) == [(0, Fill(0))]
    server.handle(0, Acked(0))
    assert server.caught_up == {0: ViewNumber(1, 2)}


def test_a_backup_that_stays_through_a_view_stays_caught_up() -> None:
    server = _server(_plan(2), _view(1, {0: "s0", 1: "s1"}, {0: "s1"}), "s1")
    server.handle(0, Acked(0))
    assert _on(server.adopt(_view(2, {0: "s0", 1: "s2"}, {0: "s1"})), Fill) == []
    assert server.caught_up == {0: FIRST}


def test_a_primary_that_missed_the_view_in_which_they_parted_has_no_false_caught_up_backup() -> None:
    """Backup s1 in view 1, s2 in view 2, s1 again in view 3: it has let go of what it held, and we know of 1 and 3."""
    server = _server(_plan(2), _view(1, {0: "s0", 1: "s0"}, {0: "s1", 1: "s1"}), "s1")
    for index in (0, 1):
        server.handle(index, Acked(0))
    assert server.caught_up == {0: FIRST, 1: FIRST}
    effects = server.adopt(_view(3, {0: "s0", 1: "s0"}, {0: "s1", 1: "s1"}, paired={0: 3}))
    assert server.caught_up == {1: FIRST}  # these two stayed together
    assert _on(effects, Fill) == [(0, Fill(0))]
    assert _on(server.handle(0, Contribute(0, 0, 1.0, 1)), Publish) == [(0, Publish(1))]  # it waits for nobody
    assert server.caught_up == {1: FIRST}
    assert _on(server.handle(0, Acked(0)), BackupCaughtUp) == []  # what has been published since is not there yet
    assert _on(server.handle(0, Acked(1)), BackupCaughtUp) == [(0, BackupCaughtUp())]
    assert server.caught_up == {0: ViewNumber(1, 3), 1: FIRST}


def test_when_a_shard_has_no_backup_any_more_its_fill_makes_room_for_others() -> None:
    primary = dict.fromkeys(range(3), "s0")
    server = _server(_plan(3), _view(1, primary, dict.fromkeys(primary, "s1")), "s1")
    effects = server.adopt(_view(2, primary, {2: "s1"}))
    assert _on(effects, Fill) == [(2, Fill(0))]


def test_a_promoted_backup_publishes_and_fills_its_own_backup() -> None:
    server = _server(_plan(1), _view(1, {0: "s1"}, {0: "s0"}), "s1", "s2")
    server.handle(0, Loaded(4))
    assert _on(server.handle(0, Replicated(4, False, 1)), Apply) == [(0, applied(4, 1.0))]
    effects = server.adopt(_view(2, {0: "s0"}, {0: "s2"}, incarnations={"s0": 1, "s2": 3}))
    assert effects == [On(0, Abandon()), On(0, Publish(5)), On(0, Fill(5))]


def test_a_demoted_primary_gives_up_its_version_and_is_filled_by_the_new_one() -> None:
    server = _server(_plan(1), _view(1, {0: "s0"}, {0: "s1"}), "s1")
    server.handle(0, Acked(0))
    assert server.adopt(_view(2, {0: "s1"}, {0: "s0"})) == [On(0, Abandon())]
    assert server.machine(0).version == -1  # type: ignore[union-attr]
    assert server.caught_up == {}
    assert server.takes_from(0, "s1")


# ---- decisions ----


def _step(server: ServerMachine, index: int, step: int, norm: float) -> list[Effect]:
    """The shard's only contribution comes, and is measured."""
    effects = server.handle(index, Contribute(step, 0, 1.0, 100 + step))
    for shard, effect in _on(effects, Finish):
        if effect.measure:
            effects += server.measured(effect.step, Measure(shard, (norm,)))
    return effects


def _finish(server: ServerMachine, effects: list[Effect]) -> list[Effect]:
    (verdict,) = [effect for effect in effects if isinstance(effect, StepVerdict)]
    return server.decided(verdict)


def test_all_servers_scale_by_the_norm_of_all_shards() -> None:
    plan, view = _plan(3, decides=True), _view(1, {0: "s0", 1: "s1", 2: "s0"})
    server = _server(plan, view, "s1")
    assert not any(isinstance(effect, Tell) for effect in _step(server, 0, 0, 2.0))
    told = [effect for effect in _step(server, 2, 0, 1.0) if isinstance(effect, Tell)]
    assert told == [Tell(0, (Measure(0, (2.0,)), Measure(2, (1.0,))))]
    effects = _finish(server, server.told(0, [Measure(1, (2.0,))]))
    scale = 1.0 / (3.0 + 1e-6)
    assert _on(effects, Apply) == [(0, applied(0, scale)), (2, applied(0, scale))]
    assert _on(effects, Publish) == [(0, Publish(1)), (2, Publish(1))]


def test_without_decisions_nothing_is_measured_and_nothing_told() -> None:
    server = _server(_plan(1), _view(1, {0: "s0"}))
    effects = server.handle(0, Contribute(0, 0, 1.0, 1))
    finished = Finish(0, 1.0, False, (), 1)
    assert effects == [On(0, fx.Take(1, 1.0)), On(0, finished), On(0, applied(0, 1.0)), On(0, Publish(1))]
    assert server.measured(0, Measure(0, (1.0,))) == []
    assert server.told(0, [Measure(0, (1.0,))]) == []
    assert server.peer_linked("s1") == []


def test_buffers_do_not_wait_for_clipping_and_wait_to_be_skipped() -> None:
    for skip in (False, True):
        plan = _plan(2, decides=True, buffers=frozenset({1}), skip=skip)
        server = _server(plan, _view(1, {0: "s0", 1: "s0"}))
        assert bool(_on(_step(server, 1, 0, 0.0), Apply)) != skip
        effects = _finish(server, _step(server, 0, 0, float("inf")))
        nothing, zero = [(0, applied(0, None)), (1, applied(0, None))], [(0, applied(0, 0.0))]
        assert _on(effects, Apply) == (nothing if skip else zero)


@pytest.mark.parametrize("word", [0, 7])
def test_a_server_refuses_a_sum_that_is_not_finite_by_itself_and_says_so_again(word: int) -> None:
    plan = ServerPlan(Sync(), [1, 1], frozenset({0, 1}), frozenset(), Rule(stops=True), rounds=9)
    server = _server(plan, _view(1, {0: "s0", 1: "s0"}))
    assert _on(_step(server, 0, 0, 1.0), Apply) == [(0, applied(0, 1.0))]
    server.handle(1, Contribute(0, 0, 1.0, 7))
    (report,) = server.measured(0, Measure(1, (0.0,), at=word))
    assert isinstance(report, TellNotFinite)
    assert (report.verdict.stops, report.verdict.gradients, report.verdict.at) == (True, (0,), (1, word))
    assert server.machine(1).version == 0  # type: ignore[union-attr]
    assert server.report_again() == [report]
    server.adopt(_view(2, {0: "s0", 1: "s0"}, generation=2))
    assert server.report_again() == []


@pytest.mark.parametrize("rule", [Rule(1.0, stops=True), Rule(1.0, skips=True), Rule(None, skips=True)])
def test_all_servers_refuse_or_skip_what_one_of_them_finds(rule: Rule) -> None:
    plan = ServerPlan(Sync(), [1, 1], frozenset({0, 1}), frozenset({0, 1}), rule)
    server = _server(plan, _view(1, {0: "s0", 1: "s1"}), "s1")
    _step(server, 0, 0, 1.0)
    (verdict,) = [e for e in server.told(0, [Measure(1, (0.0,), gradients=(2,), at=5)]) if isinstance(e, StepVerdict)]
    assert (verdict.scale, verdict.stops, verdict.at, verdict.gradients) == (None, rule.stops, (1, 5), (2,))
    assert _on(server.decided(verdict), Apply) == ([] if rule.stops else [(0, applied(0, None))])
    assert server.report_again() == ([TellNotFinite(verdict)] if rule.stops else [])
    server.validate()


def test_what_is_known_is_told_again_when_servers_change_and_when_a_link_stands_again() -> None:
    view = _view(1, {0: "s0", 1: "s1", 2: "s2"})
    server = _server(_plan(3, decides=True), view, "s1")
    _step(server, 0, 0, 2.0)
    server.told(0, [Measure(1, (2.0,))])
    known = Tell(0, (Measure(0, (2.0,)), Measure(1, (2.0,))))
    assert server.peer_linked("s2") == [known]
    assert known in server.adopt(_view(2, {0: "s0", 1: "s1", 2: "s1"}, incarnations={"s0": 1, "s1": 2}))


def test_a_shard_that_is_promoted_after_the_decision_takes_the_same_decision() -> None:
    view = _view(1, {0: "s0", 1: "s1"}, {1: "s0"})
    server = _server(_plan(2, decides=True), view, "s1")
    server.handle(1, Loaded(0))
    _step(server, 0, 0, 3.0)
    verdict = server.told(0, [Measure(1, (4.0,))])
    _finish(server, verdict)  # and s1 dies before it has replicated its part of step 0
    server.adopt(_view(2, {0: "s0", 1: "s0"}, incarnations={"s0": 1}))
    effects = server.handle(1, Contribute(0, 0, 1.0, 7))  # sent again
    assert _on(effects, Apply) == [(1, applied(0, 1.0 / (5.0 + 1e-6)))]


def test_a_shard_whose_server_died_is_measured_by_its_successor() -> None:
    view = _view(1, {0: "s0", 1: "s1"}, {1: "s0"})
    server = _server(_plan(2, decides=True), view, "s1")
    server.handle(1, Loaded(0))
    _step(server, 0, 0, 3.0)
    server.adopt(_view(2, {0: "s0", 1: "s0"}, incarnations={"s0": 1}))
    effects = _step(server, 1, 0, 4.0)
    assert Tell(0, (Measure(0, (3.0,)), Measure(1, (4.0,)))) in effects
    assert _on(_finish(server, effects), Apply) == [
        (0, applied(0, 1.0 / (5.0 + 1e-6))), (1, applied(0, 1.0 / (5.0 + 1e-6))),
    ]  # fmt: skip


def test_a_verdict_of_a_generation_that_is_over_decides_nothing() -> None:
    """It was in the inbox when all went back to a snapshot: with a quorum the step's sum is another one now."""
    server = _server(_plan(1, decides=True), _view(1, {0: "s0"}))
    (old,) = [effect for effect in _step(server, 0, 0, 4.0) if isinstance(effect, StepVerdict)]
    server.adopt(_view(2, {0: "s0"}, generation=2))
    server.handle(0, Initialise(5))
    (new,) = [effect for effect in _step(server, 0, 0, 8.0) if isinstance(effect, StepVerdict)]
    assert server.decided(old) == []
    assert _on(server.decided(new), Apply) == [(0, applied(0, 1.0 / (8.0 + 1e-6)))]
    server.validate()


def test_the_link_to_a_peer_s_older_incarnation_does_not_count() -> None:
    """It comes out of the inbox after the view in which another process has that name; it is closed by then."""
    shell: ServerShell[_Line] = ServerShell(ServerMachine("s0", _plan(2)))
    shell.adopt(_view(1, {0: "s0", 1: "s1"}, {0: "s1"}))
    shell.adopt(_view(2, {0: "s0", 1: "s0"}, {0: "s1"}, incarnations={"s0": 1, "s1": 7}, paired={0: 2}))
    old, new = _Line(), _Line()
    assert shell.peer_linked(Member("s1", "h", "s1:1", 2), old) == []
    assert shell.peers == {}
    shell.peer_linked(Member("s1", "h", "s1:1", 7), new)
    assert shell.peers == {"s1": new}


def test_a_worker_s_new_link_takes_the_place_of_its_old_one_before_that_is_known_to_be_lost() -> None:
    """A connection whose other end has vanished may stay for long: nothing is sent on it any more, and what was asked
    for on it is not answered on the new one."""
    shell: ServerShell[_Line] = ServerShell(ServerMachine("s0", _plan(1, policy=Async())))
    shell.adopt(_view(1, {0: "s0"}))
    old, new = _Line(1), _Line(2)
    assert shell.linked(old, "w") == []
    shell.follow(old)
    assert shell.want(old, "w", 0, 0) == []  # not yet: there is no version
    assert shell.linked(new, "w") == []
    assert shell.followers == []
    assert _on(shell.machine.handle(0, Initialise(1)), fx.Reply) == []
    shell.follow(new)
    assert shell.gone(old, "w") == []
    assert (shell.followers, shell.workers) == ([new], {"w": new})


def test_a_link_that_is_older_than_the_known_one_is_not_followed() -> None:
    """Two connections of one worker waited for the same view, and come in the other order."""
    shell: ServerShell[_Line] = ServerShell(ServerMachine("s0", _plan(1)))
    shell.adopt(_view(1, {0: "s0"}))
    old, new = _Line(1), _Line(2)
    shell.linked(new, "w")
    assert shell.linked(old, "w") is None
    assert shell.workers == {"w": new}


# ---- proofs of backups ----


def _filled() -> tuple[ServerShell[_Line], _Line]:
    """s0 has sent its shard's state, at version 0, to the backup s1."""
    shell: ServerShell[_Line] = ServerShell(ServerMachine("s0", _plan(1)))
    view = _view(1, {0: "s0"}, {0: "s1"})
    shell.adopt(view)
    link = _Line()
    shell.peer_linked(view.server("s1"), link)
    shell.machine.handle(0, Initialise(1))
    assert shell.fill(0, "s1", 0, b"version 0") is link
    return shell, link


@pytest.mark.parametrize("digest", [b"", b"version 1", bytes(16)])
def test_a_backup_that_acknowledges_what_it_does_not_hold_is_found_out(digest: bytes) -> None:
    shell, link = _filled()
    assert shell.acked("s1", link, 0, Acked(0), FIRST, digest) == [TellDisproved(0, 0, FIRST)]
    assert not shell.machine.caught_up
    replication = shell.machine.machine(0).copies.backup  # type: ignore[union-attr]
    assert replication.acked == -1, "nothing is published that it says it has"


@pytest.mark.parametrize("version", [1, 7, 2**32 - 1])
def test_an_acknowledgement_of_what_was_never_sent_proves_nothing(version: int) -> None:
    shell, link = _filled()
    assert shell.acked("s1", link, 0, Acked(version), FIRST, b"version 0") == []
    assert not shell.machine.caught_up


def test_each_version_has_its_own_proof() -> None:
    proofs = Proofs()
    proofs.filled(0, "s1", 3, b"three")
    for version in (4, 5):
        proofs.sent(0, "s1", version, bytes([version]))
    assert proofs.check(1, "s1", 3, b"three") is None
    assert proofs.check(0, "s2", 4, bytes([4])) is None, "of another server"
    assert proofs.check(0, "s1", 4, b"three") is False
    assert proofs.check(0, "s1", 5, bytes([5])) is True
    assert proofs.check(0, "s1", 4, bytes([4])) is None, "of an earlier version, which it has been told since"
    assert proofs.check(0, "s1", 5, bytes([5])) is True, "said again"
    proofs.filled(0, "s1", 7, b"seven")
    assert proofs.check(0, "s1", 5, bytes([5])) is None, "another state was sent since"
    proofs.keep(["s2"])
    assert proofs.check(0, "s1", 7, b"seven") is None, "it is gone"


# ---- three copies, and a primary that becomes a backup -----------------------------------------------------------


class _Servers:
    """s0, s1 and s2 with one shard, of which s0 is the primary at first. Frames are told by hand."""

    def __init__(self, *, third: bool = False) -> None:
        self.shells: dict[str, ServerShell[_Line]] = {}
        self.links: dict[tuple[str, str], _Line] = {}
        incoming = {0: Incoming("s2", FIRST)} if third else {}
        self.view = msgspec.structs.replace(_view(1, {0: "s0"}, {0: "s1"}), homed={0: FIRST}, incoming=incoming)
        for name in ("s0", "s1", "s2"):
            self.shells[name] = ServerShell(ServerMachine(name, _plan(1)))
            self.shells[name].adopt(self.view)
        for shell in self.shells.values():
            for other in self.view.servers:
                if other.id != shell.machine.me:
                    link = self.links[shell.machine.me, other.id] = _Line()
                    shell.peer_linked(other, link)

    def machine(self, name: str) -> ShardMachine:
        found = self.shells[name].machine.machine(0)
        assert found is not None
        return found

    def copies(self) -> list[str]:
        """Those to whom s0 sends updates."""
        return self.shells["s0"].machine.pairs.replicating(0, self.machine("s0"))

    def adopt(self, view: View) -> dict[str, list[Effect]]:
        self.view = view
        return {name: list(shell.adopt(view)) for name, shell in self.shells.items()}

    def fill(self, to: str, version: int) -> None:
        """s0 sends its state at that version, and `to` loads it."""
        self.shells["s0"].fill(0, to, version, f"at {version}".encode())
        self.shells[to].replicated(_Line(), 0, Loaded(version))

    def acks(self, who: str, version: int, digest: bytes | None = None, *, by: str = "s0") -> list[Effect]:
        """`who` tells the primary `by` that it has that version."""
        digest = f"at {version}".encode() if digest is None else digest
        return list(self.shells[by].acked(who, self.links[by, who], 0, Acked(version), self.view.number, digest))

    def swapped(self) -> View:
        """The view in which s1 is the primary, and s0 a backup that is known to hold all."""
        number = ViewNumber(1, self.view.number.count + 1)
        return msgspec.structs.replace(
            self.view, number=number, primary={0: "s1"}, backup={0: "s0"}, homed={0: number}, incoming={}
        )


def _begun(*, third: bool = False) -> _Servers:
    servers = _Servers(third=third)
    servers.shells["s0"].machine.handle(0, Initialise(1))
    servers.fill("s1", 0)
    servers.acks("s1", 0)
    assert servers.shells["s0"].machine.caught_up == {0: FIRST}
    return servers


def test_a_demoted_primary_keeps_its_state_and_proves_by_a_digest_that_it_holds_it() -> None:
    servers = _begun()
    effects = servers.adopt(servers.swapped())
    assert servers.machine("s0").version == 0
    assert _on(effects["s1"], Prove) == [(0, Prove(0))]
    assert _on(effects["s1"], Publish) == []  # it publishes nothing that its backup may not have
    assert servers.shells["s1"].machine.caught_up == {0: FIRST}
    servers.shells["s1"].fill(0, "s0", 0, b"at 0")
    (answer,) = servers.shells["s0"].replicated(_Line(), 0, Compared(0, same=True))
    assert isinstance(answer, Answer)
    assert (answer.version, answer.differs) == (0, False)
    assert servers.acks("s0", 0, by="s1") == [On(0, Publish(0))]


@pytest.mark.parametrize("digest", [b"", b"something else"])
def test_a_demoted_primary_that_holds_something_else_is_filled_and_is_no_liar(digest: bytes) -> None:
    servers = _begun()
    servers.adopt(servers.swapped())
    servers.shells["s1"].fill(0, "s0", 0, b"at 0")
    (answer,) = servers.shells["s0"].replicated(_Line(), 0, Compared(0, same=False))
    assert isinstance(answer, Answer)
    assert answer.differs
    assert servers.machine("s0").version == 0  # all that was published is in it: it is kept until it is filled
    assert servers.machine("s0").handle(Replicated(0, False, 7)) == [fx.Drop(7)]
    assert _on(servers.acks("s0", 0, digest, by="s1"), Fill) == [(0, Fill(0))]
    assert servers.shells["s1"].machine.caught_up == {0: FIRST}
    assert servers.machine("s1").published == -1
    servers.shells["s1"].fill(0, "s0", 0, b"at 0")
    servers.shells["s0"].replicated(_Line(), 0, Loaded(0))
    assert servers.acks("s0", 0, by="s1") == [On(0, Publish(0))]
    assert servers.acks("s0", 0, b"made up", by="s1") == [TellDisproved(0, 0, FIRST)]  # now it is one


def test_a_frame_from_before_its_sender_became_the_primary_does_not_count() -> None:
    servers = _begun()
    servers.adopt(servers.swapped())
    assert servers.shells["s0"].takes_from(0, "s1", servers.view.number)
    assert not servers.shells["s0"].takes_from(0, "s1", FIRST)


def test_with_a_third_server_nothing_is_published_that_one_of_the_two_does_not_hold() -> None:
    servers = _begun(third=True)
    primary = servers.machine("s0")
    assert primary.published == 0
    servers.fill("s2", 0)
    assert servers.acks("s2", 0) == [On(0, BackupCaughtUp(incoming=True))]
    assert servers.shells["s0"].machine.arrived == {0: FIRST}
    done = servers.shells["s0"].machine.handle(0, Contribute(0, 0, 1.0, 9))
    assert [(apply.version, apply.copies) for _, apply in _on(done, Apply)] == [(1, (False, True))]
    assert servers.copies() == ["s1", "s2"]
    for name in ("s1", "s2"):
        servers.shells["s0"].replicate(0, name, 1, b"at 1")
    assert servers.acks("s1", 1) == []
    assert servers.acks("s2", 1) == [On(0, Publish(1))]


def test_a_third_server_that_takes_the_backup_s_place_is_not_filled_again() -> None:
    servers = _begun(third=True)
    servers.fill("s2", 0)
    servers.acks("s2", 0)
    number = ViewNumber(1, 2)
    view = msgspec.structs.replace(servers.view, number=number, backup={0: "s2"}, paired={0: FIRST}, incoming={})
    effects = servers.adopt(view)
    assert _on(effects["s0"], Fill) == []
    assert servers.shells["s0"].machine.caught_up == {0: FIRST}
    assert servers.copies() == ["s2"]
    assert effects["s1"] == [Disown(0)]
