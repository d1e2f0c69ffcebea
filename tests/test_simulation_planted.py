"""Defects planted on purpose, in the machines and in what runs them: the simulation finds each and says what it is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from rallypoint.aggregator import AggregatorRelay
from rallypoint.codec.base import RowSum, decode_gradient
from rallypoint.coordinator import connections
from rallypoint.coordinator.acts import CommitSnapshot
from rallypoint.coordinator.journal import Journal
from rallypoint.core import sums as presum
from rallypoint.core.aggregator import BlockSum
from rallypoint.core.cadence import Cadence
from rallypoint.core.cluster import evaluations
from rallypoint.core.cluster.effects import Effect as ClusterEffect
from rallypoint.core.cluster.effects import FindSnapshot, SendTo
from rallypoint.core.cluster.recovery import WorkersHoldState
from rallypoint.core.cluster.state import Origin
from rallypoint.core.cluster.succession import Succession
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.cluster.view_sequence import ViewSequence
from rallypoint.core.keys import Line
from rallypoint.core.layout import Shard
from rallypoint.core.placing import view_change
from rallypoint.core.policy import Async, BoundedStaleness, Verdict
from rallypoint.core.protocol import Capture, Finished, Hello, Message
from rallypoint.core.shard.audited import Opinions
from rallypoint.core.shard.clip import Rule
from rallypoint.core.shard.clip import StepVerdict as ClipVerdict
from rallypoint.core.shard.effects import Apply, Effect, Publish
from rallypoint.core.shard.events import Contribute
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.pulls import Clocks, Request, Requests
from rallypoint.core.shard.server import Effect as ServerEffect
from rallypoint.core.shard.server import ServerMachine, ServerPlan
from rallypoint.core.shard.shell import Fence
from rallypoint.core.sums import Block, Forest, Presum, leaf
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker import shell as worker_shell
from rallypoint.core.worker.aligned import AuditDuties, WorkerMachine
from rallypoint.core.worker.ending import LeasedVersion
from rallypoint.core.worker.handover import CodecStateCustody, Paths
from rallypoint.core.worker.local import GoneAhead, InnerStates, OwnParameters
from rallypoint.core.worker.slots import Action, Compute, Install, Landed, Send, Slot, SlotMachine
from rallypoint.core.worker.streaming import StreamMachine
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header
from rallypoint.net.pool import Buffer
from rallypoint.server import reducer
from rallypoint.server.held import HeldShard
from rallypoint.server.intake import FrameChecks
from rallypoint.server.member import Views
from rallypoint.server.parts import Fingerprints, Followers, PayloadTickets, Pulls, Replication
from rallypoint.server.reducer import Reducer, ShardEffects
from rallypoint.server.rows import OwnedRows, _used
from rallypoint.server.service import ServerService
from rallypoint.server.shard import GradientSum, OwnedShard, ScaleWords, ShardAverage, StreamedShard, WireCopies
from rallypoint.server.snapshots import StateRelay
from rallypoint.store.record import ShardRecord
from rallypoint.testing.simulation.coordinator import Disk, _Tasks
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.operating import resuming
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import parse_policy
from rallypoint.testing.simulation.replicas.inner import Drifting, Inner
from rallypoint.testing.simulation.run import Simulation, SimulationFailed, play
from rallypoint.testing.simulation.server import SimulatedServer
from rallypoint.testing.simulation.worker import SimulatedWorker
from rallypoint.worker.exchange.arrivals import PulledParameter, RowPull, WordPulls
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.locked import LockedShell
from rallypoint.worker.exchange.pushes import Contributions, Partials, Pushes
from support.failing import first_failure

pytestmark = pytest.mark.timeout(600)  # plays take a minute of a core, which a busy machine may not have

STALE = r"server\d+ takes a \w+ of \w+ that is of view [\d.]+; the generation is"
PLANTED: list[Any] = []  # (word, owner, name, bug, said, seeds)


def planted(
    words: str, owner: Any, name: str, said: str = "", seeds: int | Sequence[int] = 100, *, quick: bool = False
) -> Callable[[Any], Any]:
    """Let what is defined stand for `owner.name`; its first argument is what it stands for, if that is called `honest`.

    Of each of the `words` one of these seeds has to find it, and say `said` (a pattern); in `make test` if `quick`.
    """

    def plant(bug: Any) -> Any:
        function, honest = getattr(bug, "fget", bug), getattr(owner, name, None)
        if "honest" in signature(function).parameters:

            def bug(*args: Any, **named: Any) -> Any:
                return function(honest, *args, **named)

        tried = range(seeds) if isinstance(seeds, int) else seeds
        for word in words.split():
            marks = () if quick else pytest.mark.slow
            title = f"{word}: {function.__name__.strip('_').replace('_', ' ')}"
            PLANTED.append(pytest.param(word, owner, name, bug, said, tried, id=title, marks=marks))
        return function

    return plant


# ---- the tree of sums, and who computes what (I1 to I4) ----


@planted("sync", Forest, "covers", seeds=300)
@planted("fragments:2", Forest, "covers", seeds=300)
def _a_repeat_is_added(self: Forest, block: Block) -> bool:
    """I2 broken: whether a block is covered already is not asked."""
    return False


@planted("sync", Forest, "merge", seeds=300)
def _merged_as_they_come(self: Forest, block: Block) -> tuple[Block, Block] | None:
    """I3 broken: a block is added to whatever is to its left, or to its right, sibling or not."""
    held = sorted(self._held.values())
    for left, right in pairwise(held):
        if block in (left, right) and left.stop == right.start:
            del self._held[right.start]
            self._held[left.start] = Block(left.start, right.stop)
            return left, right
    return None


@planted("sync", presum, "blocks_of", seeds=300)
def _the_whole_run_is_one_block(own: Iterable[int], replicas: int) -> list[Block]:
    """I3 broken: a worker adds up all that it has, whether it is a node of the tree or not."""
    left = sorted(own)
    return [Block(left[0], left[-1] + 1)] if left and left[-1] - left[0] == len(left) - 1 else [*map(leaf, left)]


@planted("sync", Presum, "_prune", seeds=300)
def _what_is_kept_is_never_dropped(self: Presum, shard: int) -> None:
    """Half of a block stays with a worker that will never have the other half."""


@planted("sync", Presum, "lost", seeds=300)
def _a_lost_link_loses_nothing(self: Presum, shard: int) -> None:
    """What a dead server was sent counts as sent."""


@planted("sync", ShardMachine, "_publish", seeds=300)
def _published_at_once(self: ShardMachine) -> list[Effect]:
    """I4 broken: the backup is not waited for."""
    if self.version == self.published:
        return []
    self.published = self.version
    return [Publish(self.version)]


@planted("sync", view_change, "assign_replicas", seeds=300, quick=True)
def _one_replica_too_few(honest: Any, replicas: int, *args: Any) -> Any:
    """I1 broken."""
    return honest(replicas - 1, *args)


@planted("sync", view_change, "assign_replicas", seeds=300, quick=True)
def _one_replica_too_many(honest: Any, replicas: int, *args: Any) -> Any:
    """I1 broken."""
    return honest(replicas + 1, *args)


@planted("fragments:2", WorkerMachine, "_in_place", seeds=300)
def _any_version_of_a_shard_will_do(self: WorkerMachine, shard: int, target: int) -> bool:
    """What has landed is installed, whatever tick it is right for."""
    return not self._changes(shard, target) or self._slots[shard] is Slot.LANDED


@planted("fragments:2", Cadence, "next_due", seeds=300)
def _the_end_is_nothing_special(self: Cadence, shard: int, tick: int) -> int:
    """Some shards are not moved at the last tick."""
    if tick < 0 or tick >= self.rounds or (turn := self._period(shard)) is None:
        return tick
    return tick + (turn.first - tick) % turn.every


@planted("poisoned", Rule, "verdict", "is published, and is not finite", 300, quick=True)
def _what_is_not_finite_is_applied(self: Rule, step: int, measures: Any, generation: ViewNumber) -> ClipVerdict:
    """Nobody looks."""
    return ClipVerdict(step, 0.0, 1.0, generation=generation)


@planted("poisoned", ServerMachine, "report_again", "stuck after", 300)
def _a_refusal_said_once(self: ServerMachine) -> list[ServerEffect]:
    """A coordinator that dies before it hears of it never does."""
    return []


@planted("all-reduce", Fence, "is_stale", STALE, quick=True)
@planted("sync quorum:2 ssp:1", Fence, "is_stale", STALE)
def _a_frame_of_a_stale_generation_is_taken(self: Fence, number: ViewNumber) -> bool:
    """I10 broken."""
    return False


# ---- streaming ----


@planted("ssp:1", BoundedStaleness, "serve", "runs ahead of", 300, quick=True)
def _a_bound_that_is_none(self: BoundedStaleness, shard: ShardMachine, clock: int) -> bool:
    """The gate removed."""
    return True


@planted("ssp:1", BoundedStaleness, "serve", "runs ahead of", 300)
def _a_bound_on_what_is_not_published(self: BoundedStaleness, shard: ShardMachine, clock: int) -> bool:
    """The bound holds for what has been applied; but that is not what a follower gets to see."""
    return clock <= shard.slowest + self.staleness


@planted("ssp:1", Clocks, "tick", "are applied twice", 300, quick=True)
def _a_clock_that_stands_still(self: Clocks, replica: int, version: int) -> None:
    """A contribution is applied, and nobody remembers."""
    if replica != 0:
        self.steps[replica] += 1
    self._versions[replica] = version


@planted("async", Clocks, "tick", "runs ahead of", 300)
def _a_clock_that_forgets_the_version(self: Clocks, replica: int, version: int) -> None:
    """Who asks may get parameters without what it has just contributed."""
    self.steps[replica] += 1


@planted("async", Async, "admit", "are applied twice|in one sum", 300)
def _every_arrival_is_added(self: Async, shard: ShardMachine, step: int, replica: int) -> Verdict:
    """I2 broken."""
    return Verdict.ADD if step <= shard.clock(replica) else Verdict.REJECT


@planted("async", ShardMachine, "_publish", "publishes version", 300, quick=True)
def _published_before_it_is_durable(self: ShardMachine) -> list[Effect]:
    """I4 broken: answers before the backup has acknowledged."""
    if self.version == self.published:
        return []
    self.published = self.version
    return self.wants.serve(self)


@planted("ssp:1", StreamMachine, "_forget", "stuck after", 300)
def _wants_that_are_not_heard_again(honest: Any, self: StreamMachine, shards: Iterable[int]) -> None:
    """What was wanted of a server that is gone is taken for heard: the rest is as it should be."""
    shards = list(shards)
    asked = [self._asked[shard] for shard in shards]
    honest(self, shards)
    for shard, was in zip(shards, asked, strict=True):
        self._asked[shard] = was


@planted("async", StreamMachine, "_landed_clock", "stuck after", 300)
@property
def _the_quickest_answer_counts(self: StreamMachine) -> int:
    """A replica goes on from the highest clock, not from the lowest."""
    return max((answer for answer in self._answers if answer <= self.steps), default=self.steps)


@planted("ssp:1", ShardMachine, "_publish", "stuck after|has forgotten", 300)
def _wants_that_nobody_serves(self: ShardMachine) -> list[Effect]:
    """Only who asks at the right moment gets an answer."""
    self.published = max(self.published, self.copies.durable(self.version))
    return []


@planted("async quorum:2", ShardMachine, "_count", "Tally", 300)
def _counted_twice(honest: Any, self: ShardMachine, *, skipped: bool) -> float:
    self.tally.applied += not skipped
    return honest(self, skipped=skipped)


@planted("ssp:1", StreamMachine, "take", "stuck after|missing|ready for no replica|unasked|step -1 of", range(200, 300))
def _whatever_was_said_before_is_done(honest: Any, self: StreamMachine, action: Action | None) -> bool:
    """Nobody asks again whether it still holds."""
    match action:
        case Install():
            self._installing = True
        case Compute(replica=replica):
            self._computing, self.rewound = replica, False
        case _:
            return honest(self, action)
    return True


# ---- members that come and go, and workers that have the state ----

_RESIZED = [seed for seed in range(300) if any(fault.kind == "resize" for fault in make_plan(seed).faults)]


@planted("sync", Succession, "dismiss", "is dismissed, and has shards", _RESIZED)
def _dismissed_at_once(self: Succession) -> list[ClusterEffect]:
    """Who was told to go may, with what it holds."""
    members = self.course.members
    return [SendTo(server, Finished()) for server in members.servers if server in members.leaving]


@planted("sync", Succession, "dismiss", "is dismissed, and was not told to go", _RESIZED)
def _everybody_may_go(self: Succession) -> list[ClusterEffect]:
    """Who holds nothing is sent home, whether or not it was told to go."""
    view, members = self.course.view, self.course.members
    held = set() if view is None else {*view.primary.values(), *view.backup.values()}
    return [SendTo(server, Finished()) for server in members.servers if server not in held]


@planted("uneven", view_change, "all", seeds=60)
def _a_shard_moves_before_its_new_home_has_it(_: Any) -> bool:
    return True


@planted("all-reduce", WorkersHoldState, "needs_new_generation", seeds=300)
def _whoever_comes_may_go_on(self: WorkersHoldState, *args: Any, **kwargs: Any) -> bool:
    return False


@planted("all-reduce", SimulatedWorker, "_initialise", seeds=300)
def _the_state_is_of_another_version(honest: Any, self: SimulatedWorker) -> None:
    """What is brought is said to be one step further than it is."""
    self.shell.holds += self.shell.holds > 0
    honest(self)


@planted("resumed", Succession, "begin", "begins with first weights of", range(1000, 1020))
def _a_resumed_job_begins_anew(self: Succession) -> Any:
    return self.new_generation("")


@planted("resumed", Origin, "is_elsewhere", "aborted: ", range(1130, 1150))
@property
def _a_fork_has_no_way_back(self: Origin) -> bool:
    return False


@planted("resumed", resuming, "begun_by", "the same command goes back to step", range(1000, 1020))
def _what_began_it_is_forgotten(state: Any, command: str) -> bool:
    return False


# ---- audits, evaluations and decisions ----


@planted("audited:wrong", Opinions, "hear", "other bytes", 10, quick=True)
def _no_second_opinion_is_waited_for(self: Opinions, event: Contribute) -> tuple[bool, list[Any]]:
    return True, []


@planted("audited", AuditDuties, "plan", seeds=60)
def _who_is_left_alone_sends_nothing_again(honest: Any, self: AuditDuties, view: Any, step: int, presum: Any) -> None:
    self._planned = (-1, ViewNumber(), False, frozenset())  # of no step
    honest(self, view, step, presum)


@planted("audited:wrong", ViewSequence, "following", seeds=10)
def _the_view_names_no_third_worker(honest: Any, self: ViewSequence, *args: Any, **named: Any) -> Any:
    orders, self.orders = self.orders, msgspec.structs.replace(self.orders, disputes=())
    view = honest(self, *args, **named)
    self.orders = orders
    return view


@planted("decided", LeasedVersion, "holds_back", seeds=20)
def _a_worker_waits_for_no_decision(self: LeasedVersion, view: Any, action: Any) -> bool:
    return False


@planted("decided", reducer, "reductions_at", "other bytes", 10, quick=True)
def _a_server_hears_of_no_reduction(reductions: Any, step: int) -> int:
    return 0


@planted("decided", evaluations.EvaluationLedger, "go_back_to", seeds=60)
def _a_coordinator_forgets_at_a_roll_back(self: evaluations.EvaluationLedger, decided: Any) -> None:
    self.decided = evaluations.Decided(version=decided.version)


@pytest.mark.slow
def test_a_server_that_does_not_keep_what_is_leased_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = ServerMachine.adopt

    def forgetful(self: ServerMachine, view: View) -> Any:
        effects = adopt(self, view)
        for index in self.held:
            self._machines[index].pinned = -1
        return effects

    monkeypatch.setattr(ServerMachine, "adopt", forgetful)
    monkeypatch.setattr(SimulatedWorker, "evaluate_s", 3.0)  # others train on meanwhile, and who evaluates is killed
    assert "have no result" in first_failure(parse_policy("evaluating"), range(1139, 1169))


# ---- averages, late gradients, digests, streamed parameters, and what nobody may send ----


@planted("averaged", ShardAverage, "load", "a backup has other bytes|another state")
def _another_average(
    honest: Any, self: ShardAverage, arrays: Mapping[str, torch.Tensor], scalars: Mapping[str, float]
) -> None:
    """A backup, or a server that restores, begins another average."""
    honest(self, {}, {})


@planted("averaged", ShardAverage, "update", "another state")
def _counts_from_0(honest: Any, self: ShardAverage, version: int) -> None:
    honest(self, version - 1)


@planted("late", OwnedShard, "take", "other floats", quick=True)
def _compares_with_the_version_after(
    honest: Any, self: OwnedShard, payload: Buffer, weight: float, base: int | None = None, at: int = 0
) -> None:
    honest(self, payload, weight, None if base is None else base + 1, at)


@planted("late", Async, "rate", "rate .* after", quick=True)
def _as_in_other_modes(self: Async, shard: ShardMachine, staleness: int) -> float:
    return 1.0 / shard.expected


@planted("recorded", Fingerprints, "applied", "other digests of step", quick=True)
def _of_the_next_version(honest: Any, self: Fingerprints, shard: int, version: int, held: Any) -> None:
    honest(self, shard, version + 1, held)


@planted("recorded", Contributions, "filled", "other digests of step", quick=True)
def _of_another_weight(honest: Any, self: Contributions, shard: int, gradient: torch.Tensor, weight: float) -> None:
    honest(self, shard, gradient, 2 * weight)


@planted("streamed", StreamedShard, "words", "other bytes|other floats")
def _the_newest_words(honest: Any, self: StreamedShard, version: int, first: int, count: int) -> Any:
    return honest(self, max(self._wire), first, count)


@planted("streamed", WordPulls, "_unasked", "stuck after")
def _words_asked_for_once(self: WordPulls, pulled: PulledParameter) -> Any:
    """A request that is lost with its link is not sent again."""
    homes, links = self._locked.shell.view.primary, self._locked.shell.links.connections
    for number, part in pulled.missing.items():
        if number not in pulled.asked and (home := homes[part.shard]) in links:
            yield number, part, (self._locked.shell.number, home, links[home])


@planted("malformed", FrameChecks, "_push", "takes Header", quick=True)
def _any_push(self: FrameChecks, header: Header) -> None:
    """A contribution to a step that the job does not have."""


@planted("malformed", connections, "checked", "may say", quick=True)
def _from_anybody(message: Message, sender: Hello) -> Message:
    return message


# ---- what replicas carry: states, codec states, inner optimizers, a delay, a loss scale ----


@planted("carrying", SlotMachine, "contributes", seeds=40)
def _a_worker_leaves_the_state_to_replica_0(self: SlotMachine, shard: int, replica: int) -> bool:
    """What replicas carry is sent as buffers are, by replica 0 alone."""
    return shard not in self.buffer_shards or replica == 0


@planted("carrying", ServerPlan, "machine", seeds=40, quick=True)
def _a_server_takes_the_state_of_replica_0_alone(honest: Any, plan: ServerPlan, index: int, *, primary: bool) -> Any:
    """It does not know which replica carries a shard."""
    machine = honest(plan, index, primary=primary)
    machine.lowest = machine._sum.lowest = 0
    return machine


@planted("carrying", BlockSum, "__init__", seeds=40)
def _an_aggregator_takes_the_state_of_replica_0_alone(
    honest: Any, self: BlockSum, shard: int, step: int, replicas: int, lowest: int = 0
) -> None:
    honest(self, shard, step, replicas)


@planted("codec-state", CodecStateCustody, "keep_only", "stuck after|made from", 150)
def _nothing_is_given(self: CodecStateCustody, replicas: frozenset[int], paths: Paths) -> list[Any]:
    """The worker lets go of replicas, and says nothing to the primaries."""
    self._here &= replicas
    return []


@planted("codec-state", CodecStateCustody, "rolled_back", "codec state of generation|state is ahead", 150)
def _a_roll_back_changes_nothing(self: CodecStateCustody) -> None:
    """The encoder goes on with codec states of a stale generation."""


@planted("codec-state", CodecStateCustody, "ready", "made from", 150)
def _nobody_waits(self: CodecStateCustody, replica: int) -> bool:
    """A replica is computed before its codec states have come."""
    return True


@planted("codec-state", StateRelay, "awaited", "is stored with codec states", 150)
def _no_copies(self: StateRelay, record: ShardRecord, place: Shard) -> bool:
    """Snapshots contain no codec states."""
    return False


@planted("inner:3", InnerStates, "begin", "is begun with the inner state of|is begun once more after", 200)
def _stale_states_go_on(
    honest: Any, self: InnerStates[Inner], round: int, replica: int, generation: ViewNumber
) -> Inner:
    """After a roll-back the replica goes on with what it had made before it."""
    self.generation = generation
    return honest(self, round, replica, generation)


@planted("inner:3", InnerStates, "begin", "is begun with two inner states", 200)
def _begun_again_from_zero(
    honest: Any, self: InnerStates[Inner], round: int, replica: int, generation: ViewNumber
) -> Inner:
    """A round that is begun once more does not go back to what it was begun with."""
    if (state := self.kept.get(replica)) is not None and state.round == round:
        del self.kept[replica]
    return honest(self, round, replica, generation)


@planted("inner:3 inner-fragments:3", InnerStates, "begin", "other bytes|two inner states", 200)
def _nothing_is_kept(self: InnerStates[Inner], round: int, replica: int, generation: ViewNumber) -> Inner:
    """Every round begins from zero."""
    return self.new(round)


@planted("inner-fresh:2", InnerStates, "begin", "other bytes", 200)
def _everything_is_kept(
    honest: Any, self: InnerStates[Inner], round: int, replica: int, generation: ViewNumber
) -> Inner:
    """Also where every round is to begin from zero."""
    self.keeps = True
    return honest(self, round, replica, generation)


@planted("delay:2", Drifting, "step_back", "has two values|other bytes", 200)
def _not_back(self: Drifting) -> None:
    """The round before is computed again from what the steps of the next one have come to."""
    self.round -= 1


@planted("delay:2", Drifting, "step_back", "has two values|other bytes", 200)
def _optimizer_not_back(honest: Any, self: Drifting) -> None:
    """The parameters go back by a round, and the optimizer's state does not."""
    before = self.before
    honest(self)
    self.before = before


@planted("delay:2", OwnParameters, "mixes", "other bytes", 200)
def _mixed_by_all(self: OwnParameters[Any, Any], round: int, replica: int) -> bool:
    """A replica that starts from the version mixes it in once more."""
    return True


@planted("delay:2", OwnParameters, "mixes", "other bytes", 200)
def _mixed_by_none(self: OwnParameters[Any, Any], round: int, replica: int) -> bool:
    """No version is ever mixed in."""
    return False


@planted("delay:2", OwnParameters, "put_away", "other bytes|two values", 200)
def _not_put_away(self: OwnParameters[Any, Any]) -> None:
    """What a replica has come to is not saved before the version is shown."""
    self.in_model = None


_skipped = itertools.count()


@planted("scaled", ScaleWords, "advance", "another loss scale|other floats|another state|other bytes", 60, quick=True)
def _a_scale_does_not_always_back_off(honest: Any, self: ScaleWords, before: list[float], *, skipped: bool) -> None:
    honest(self, before, skipped=skipped and next(_skipped) % 3 != 2)


# ---- keys and tables ----


@planted("store", Line, "forget", quick=True)
def _nothing_is_lost(self: Line) -> None:
    """What was sent on a link that has ended counts as sent."""


@planted("tables", Requests, "answered", "other bytes")
def _the_newest_for_everybody(
    honest: Any, self: Requests[Any, Any], shard: int, published: int, keeps: Callable[[int], bool]
) -> list[tuple[Request[Any, Any], int | None]]:
    """A server answers with the newest version, whichever was asked for."""
    return [(request, published) for request, _ in honest(self, shard, published, keeps)]


@planted("tables", RowPull, "unasked", "stuck after")
def _rows_asked_for_once(self: RowPull, view: Any, homes: Any, connections: Any) -> Iterator[int]:
    """A request that is lost with its link is not sent again."""
    for shard in self.missing:
        if homes[shard] in connections and shard not in self._asked:
            yield shard


@planted("tables", RowPull, "over", "other bytes")
@property
def _rows_are_not_waited_for(self: RowPull) -> bool:
    """A replica computes with the rows that are here."""
    return True


@planted("evaluating", RowPull, "answered", "evaluated to something else")
def _whichever_pull_it_answers(
    honest: Any, self: RowPull, shard: int, number: int, data: bytearray, *, outdated: bool
) -> bool:
    return honest(self, shard, self.number, data, outdated=outdated)


@planted("tables", OwnedRows, "load", "other bytes|other floats|another state", 60)
def _rows_without_moments(honest: Any, self: OwnedRows, record: Any) -> None:
    moments = {"exp_avg", "exp_avg_sq"}
    arrays = {name: array for name, array in record.arrays.items() if name not in moments}
    honest(self, replace(record, arrays=arrays, scalars={}))


@planted("tables", OwnedRows, "merge", "other floats", 20)
def _last_row_twice(honest: Any, self: OwnedRows, left: int, right: int) -> None:
    """Of a row that both parts have, the right one's values are added twice."""
    other = self._parts[right]
    honest(self, left, right)
    self._parts[left].add(other.ids[-1:], other.values[-1:].clone())


@planted("tables", OwnedRows, "rows", "other floats", 60)
def _rows_of_a_later_version(honest: Any, self: OwnedRows, version: int, ids: Any) -> Any:
    return honest(self, min(version + 1, self._version), ids)


@planted("tables", OwnedRows, "_encoded", "with floats are held|other floats|more often", 20)
def _rows_in_a_free_buffer(honest: Any, self: OwnedRows, gradient: RowSum) -> Any:
    buffer, nbytes = honest(self, gradient)
    buffer._pool.free.append(buffer)
    return buffer, nbytes


@planted("tables", OwnedRows, "_add", "other floats", 20)
def _sums_share_their_values(self: OwnedRows, payload: Buffer, weight: float, at: int) -> None:
    """A contribution is not copied, and its memory is free for the next one."""
    ids, values = decode_gradient(payload.bytes[: _used(payload, self.shard.columns)], self.shard.columns)
    self._parts[at].add(ids, values)
    payload.release()


@planted("tables", Pulls, "add", "stuck", 20)
def _nobody_looks_again(honest: Any, self: Pulls, channel: Any, header: Any, ids: Any) -> None:
    honest(self, channel, header, ids)
    self.wait = False


# ---- a worker's exchange ----


@planted("sync", Pushes, "_push_slot", "other bytes")
def _a_slot_is_free_while_it_is_sent(honest: Any, self: Pushes, send: Send, header: Header) -> None:
    honest(self, send, header)
    self._sent(send.shard, send.serial)


@planted("all-reduce", Exchange, "adopt", "other bytes")
def _drops_landed_states_again(honest: Any, self: Exchange, view: View) -> None:
    honest(self, view)
    self._locked.set(self._optimizer.rolled_back)


@planted("codec-state", Exchange, "adopt", "made from no codec state")
def _drops_codec_states_again(honest: Any, self: Exchange, view: View) -> None:
    honest(self, view)
    self._locked.set(self._encoder.reset)


@planted("sync", LockedShell, "landed", "stuck", quick=True)
def _wakes_nobody_who_waits_for_one(self: LockedShell, shard: int) -> None:
    """A forward pass that began early waits for some shards only."""
    with self.changed:
        effects = self.machine.handle(Landed(shard))
        if self.machine.complete:
            self.changed.notify_all()
    self.effects.run(effects)


@pytest.mark.slow
def test_a_contribution_that_is_sent_twice_by_who_was_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept stays, also of a step in which the worker was given up: others have contributed it since."""
    monkeypatch.setattr(Partials, "clear", lambda self: None)
    monkeypatch.setattr(Partials, "_keep", lambda self, key, kept: self._kept.setdefault(key, kept))
    assert "other bytes" in first_failure(parse_policy("sync"), range(100))


# ---- a server's reducer and its parts, its intake, an aggregator's relay ----


@planted("sync", PayloadTickets, "settle", "a credit too many", 3, quick=True)
def _a_credit_twice(honest: Any, self: PayloadTickets, ticket: int, **early: Any) -> Any:
    channel = self._arrived[ticket].channel
    buffer = honest(self, ticket, **early)
    self.credit(channel)
    return buffer


_credits = itertools.count()


@planted("sync", PayloadTickets, "credit", "credits, not", 3, quick=True)
def _a_credit_not_at_all(honest: Any, self: PayloadTickets, channel: Channel) -> None:
    if next(_credits) % 50:
        honest(self, channel)


@planted("sync", PayloadTickets, "drop", "more often than it was held", 20, quick=True)
def _a_buffer_released_twice(self: PayloadTickets, ticket: int, fault: str) -> None:
    buffer = self.settle(ticket)
    buffer.release()
    buffer.release()


@planted("sync", AggregatorRelay, "_merge", "more often than it was held", 100)
def _a_block_released_twice(honest: Any, self: AggregatorRelay, merge: Any) -> None:
    other = self._parts[merge.shard, merge.step, merge.right]
    honest(self, merge)
    other.release()


@planted("sync", ShardEffects, "_apply", "publishes version", 40, quick=True)
def _published_before_its_backup(honest: Any, self: ShardEffects, index: int, owned: HeldShard, effect: Apply) -> None:
    honest(self, index, owned, effect)
    if self._parts.shell.machine.is_primary(index):
        self._parts.followers.publish(index, effect.version)


@planted("sync", Views, "counts", "the generation is", 200)
def _of_any_generation(self: Views, number: ViewNumber) -> bool:
    return True


@planted("sync", Followers, "send", "other bytes|other floats", 100, quick=True)
def _the_version_before(
    honest: Any, self: Followers, channels: Any, shard: int, version: int, *, asked: bool = False
) -> None:
    owned: Any = self._owned[shard]
    if asked and owned.keeps(version - 1):
        owned.wire[version], kept = owned.wire[version - 1], owned.wire[version]
        honest(self, channels, shard, version, asked=asked)
        owned.wire[version] = kept
    else:
        honest(self, channels, shard, version, asked=asked)


@planted("fold:3", Reducer, "_stored_state", "runs ahead|missing", 400)
def _clocks_as_they_are_now(self: Reducer, index: int, version: int, clocks: tuple[int, ...]) -> Any:
    machine = self.machine.machine(index)
    assert machine is not None
    return self._owned[index].state(version, tuple(machine.clocks), wires=False)


@planted("sync", OwnedShard, "apply", "other floats", 10)
def _one_buffer_for_sum_and_version(honest: Any, self: OwnedShard, update: Apply) -> Any:
    kept = self._sum.buffer
    left = honest(self, update)
    if left is not None:
        self._wire._raw[update.version] = kept
    return left


@planted("sync", GradientSum, "take", "other floats", 10)
def _a_part_written_over(honest: Any, self: GradientSum, payload: Buffer, weight: float, at: int = 0) -> None:
    honest(self, payload, weight, at)
    if at - 1 in self._parts:
        self._parts[at - 1].tensor.copy_(payload.tensor)


@planted("sync", WireCopies, "keep", "more often|other floats", 10)
def _let_go_early(honest: Any, self: WireCopies, version: int, buffer: Buffer, oldest: int, pinned: int = -1) -> None:
    honest(self, version, buffer, oldest, pinned)
    if version - 1 in self._raw:
        self._raw[version - 1].release()


@planted("sync", OwnedShard, "load", "other floats|another state|other bytes", 60)
def _without_moments(honest: Any, self: OwnedShard, record: Any) -> None:
    moments = {name for name in record.arrays if name != "master" and not name.startswith("wire-")}
    honest(self, replace(record, arrays={n: a for n, a in record.arrays.items() if n not in moments}, scalars={}))


GIVEN_UP_AND_BACK = 490  # a seed in which a worker comes back whose contribution was dropped in between


@pytest.mark.slow
def test_a_worker_that_counts_what_it_sent_before_it_was_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers take contributions only from workers that the view lists, and lose none of an honest worker's by that."""
    Simulation(make_plan(GIVEN_UP_AND_BACK)).run()
    monkeypatch.setattr(worker_shell, "_came_back", lambda worker, before, view: False)
    with pytest.raises(SimulationFailed, match="stuck after"):
        Simulation(make_plan(GIVEN_UP_AND_BACK)).run()


@pytest.mark.slow
def test_a_server_that_holds_nothing_of_what_it_acknowledges_never_becomes_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = [seed for seed in range(300) if make_plan(seed).terms.replication == 2 and make_plan(seed).servers > 2][:12]
    honest, found = Replication._digest_of_update, []

    def made_up(self: Replication, shard: int, server: str, version: int) -> bytes:
        wrong = (self._shell.machine.me, server) == ("server2", "")
        return b"made up" if wrong else honest(self, shard, server, version)

    monkeypatch.setattr(Replication, "_digest_of_update", made_up)
    monkeypatch.setattr(SimulatedServer, "say", ServerService.say)  # here a backup that is disproved is no failure
    for seed in seeds:
        said = [text for text in Simulation(make_plan(seed)).run().outcome.said if "does not hold what" in text]
        found += said
        assert all("server2 is gone: it acknowledged version" in text for text in said)
    assert len(found) >= len(seeds) // 2, "in the others it was no backup, or was killed before"


@pytest.mark.parametrize(("word", "owner", "name", "bug", "said", "seeds"), PLANTED)
def test_a_defect_planted_on_purpose_is_found(
    monkeypatch: pytest.MonkeyPatch, word: str, owner: Any, name: str, bug: Any, said: str, seeds: Sequence[int]
) -> None:
    monkeypatch.setattr(owner, name, bug, raising=name != "all")
    assert re.search(said, first_failure(parse_policy(word), seeds))


def test_steps_of_a_generation_that_is_over_are_found_when_they_are_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only server dies while the replica goes ahead: the job goes back to just the version that was on its way."""

    def resumes_what_is_stale(self: GoneAhead[Any], round: int, replica: int, generation: ViewNumber) -> Any:
        if self._of is None or self._of[:2] != (round, replica):
            return None
        results, self._of = self._results, None
        return results

    sync = parse_policy("delay:1").of
    job = SimulatedJob(shards=2, buffers=0, replicas=1, steps=8, sync=sync, inner=True, loses_states=True)
    terms = Terms(workers_start=1, workers_max=1, servers=1, snapshot_steps=1, snapshots=True)
    plans = [Plan(seed, job, terms, 1, 1, (Fault(1.0 + seed / 20, "crash", "server", 0.5),)) for seed in range(12)]
    assert all(map(play, plans))
    monkeypatch.setattr(GoneAhead, "resume", resumes_what_is_stale)
    with pytest.raises(SimulationFailed, match="was begun in"):
        assert all(map(play, plans))


# ---- the coordinator's journal ----


def _computed_again() -> int:
    """Replicas that are computed once more because the coordinator dies, in a job that loses nothing else."""
    job = SimulatedJob(replicas=2, steps=8, shards=2)
    terms = Terms(workers_start=2, workers_max=2, servers=2, snapshots=True, replication=2)
    return play(Plan(1, job, terms, 2, 2, (Fault(1.0, "crash", "coordinator", 0.5),))).recomputed


_write = Journal._write


def _what_nobody_heard_of_is_found(self: Disk, before: int, after: int) -> int:
    return after


def _without_the_record(self: Journal, state: Any) -> None:
    _write(self, msgspec.structs.replace(state, record=None))


def _only_the_first_views(self: Journal, state: Any) -> None:
    if state.view is None or state.view.number.count < 2:
        _write(self, state)


@pytest.mark.parametrize(("owner", "name", "bug"), [
    (Disk, "_cut", _what_nobody_heard_of_is_found), (Journal, "_write", _without_the_record),
    (Journal, "_write", _only_the_first_views),
], ids=["half a write counts", "no record", "a write that is none"])  # fmt: skip
def test_a_coordinator_that_dies_costs_no_step_and_with_a_wrong_journal_it_does(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Any
) -> None:
    assert _computed_again() == 0
    monkeypatch.setattr(owner, name, bug)
    assert _computed_again() > 0


def test_how_long_a_keeper_of_snapshots_takes_follows_from_the_act_and_not_from_its_words() -> None:
    delays: list[float] = []
    node: Any = SimpleNamespace(
        world=SimpleNamespace(now=10.0, latency=lambda: 0.5), later=lambda delay, call: delays.append(delay)
    )
    keeper: Any = SimpleNamespace(do=lambda act: tasks.put(("any words", lambda: None)))
    tasks = _Tasks(node, keeper)
    commit: Any = CommitSnapshot("a", 0, 0, None, {}, "")  # type: ignore[arg-type]
    for act in (Capture("a", 0), FindSnapshot(), Capture("b", 0), commit):
        keeper.do(act)
    assert delays == [0.0, 0.5, 0.5, 1.0]
