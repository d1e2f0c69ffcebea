"""Defects planted in what runs the machines: a server's reducer and its parts, its intake, an aggregator's relay, a
worker's links, the coordinator's journal. The simulation finds each of them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rallypoint.aggregator import AggregatorRelay
from rallypoint.codec.base import RowSum, decode_gradient
from rallypoint.coordinator.acts import CommitSnapshot
from rallypoint.coordinator.journal import Journal
from rallypoint.core.cluster.effects import FindSnapshot
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Capture
from rallypoint.core.shard.effects import Apply
from rallypoint.core.view import ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.pool import Buffer
from rallypoint.server.held import HeldShard
from rallypoint.server.member import Views
from rallypoint.server.parts import Followers, PayloadTickets, Pulls
from rallypoint.server.reducer import Reducer, ShardEffects
from rallypoint.server.rows import OwnedRows, _used
from rallypoint.server.shard import GradientSum, OwnedShard, WireCopies
from rallypoint.testing.simulation.coordinator import Disk, _Tasks
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.plan import Plan
from rallypoint.testing.simulation.policies import parse_policy
from rallypoint.testing.simulation.run import play
from support.failing import first_failure

_settle, _apply = PayloadTickets.settle, ShardEffects._apply
_send, _merge = Followers.send, AggregatorRelay._merge
_add, _credit = Pulls.add, PayloadTickets.credit
_applied, _loaded, _taken, _kept = OwnedShard.apply, OwnedShard.load, GradientSum.take, WireCopies.keep
_rows_merged, _rows_loaded, _rows_read, _rows_encoded = (
    OwnedRows.merge, OwnedRows.load, OwnedRows.rows, OwnedRows._encoded
)  # fmt: skip


def test_how_long_a_keeper_of_snapshots_takes_follows_from_the_act_and_not_from_its_words() -> None:
    delays: list[float] = []
    node: Any = SimpleNamespace(
        world=SimpleNamespace(now=10.0, latency=lambda: 0.5), later=lambda delay, call: delays.append(delay)
    )
    keeper: Any = SimpleNamespace(do=lambda act: tasks.put(("any words", lambda: None)))
    tasks = _Tasks(node, keeper)
    commit: Any = CommitSnapshot.__new__(CommitSnapshot)
    for act in (Capture("a", 0), FindSnapshot(), Capture("b", 0), commit):
        keeper.do(act)
    assert delays == [0.0, 0.5, 0.5, 1.0]


def _credit_twice(self: PayloadTickets, ticket: int, **early: Any) -> Any:
    channel = self._arrived[ticket].channel
    buffer = _settle(self, ticket, **early)
    self.credit(channel)
    return buffer


def _no_credit(self: PayloadTickets, channel: Channel) -> None:
    if next(_credits) % 50:
        _credit(self, channel)


_credits = itertools.count()


def _released_twice(self: PayloadTickets, ticket: int, fault: str) -> None:
    buffer = self.settle(ticket)
    buffer.release()
    buffer.release()


def _other_released_twice(self: AggregatorRelay, merge: Any) -> None:
    other = self._parts[merge.shard, merge.step, merge.right]
    _merge(self, merge)
    other.release()


def _published_at_once(self: ShardEffects, index: int, owned: HeldShard, effect: Apply) -> None:
    _apply(self, index, owned, effect)
    if self._parts.shell.machine.is_primary(index):
        self._parts.followers.publish(index, effect.version)


def _of_any_generation(self: Views, number: ViewNumber) -> bool:
    return True


def _the_version_before(self: Followers, channels: Any, shard: int, version: int, *, asked: bool = False) -> None:
    owned: Any = self._owned[shard]
    if asked and owned.keeps(version - 1):
        owned.wire[version], kept = owned.wire[version - 1], owned.wire[version]
        _send(self, channels, shard, version, asked=asked)
        owned.wire[version] = kept
    else:
        _send(self, channels, shard, version, asked=asked)


def _nobody_looks_again(self: Pulls, channel: Any, header: Any, ids: Any) -> None:
    _add(self, channel, header, ids)
    self.wait = False


def _clocks_as_they_are_now(self: Reducer, index: int, version: int, clocks: tuple[int, ...]) -> Any:
    machine = self.machine.machine(index)
    assert machine is not None
    return self._owned[index].state(version, tuple(machine.clocks), wires=False)


def _sum_is_sent_and_is_the_version(self: OwnedShard, update: Apply) -> Any:
    kept = self._sum.buffer
    left = _applied(self, update)
    if left is not None:
        self._wire._raw[update.version] = kept
    return left


def _other_parts_memory(self: GradientSum, payload: Buffer, weight: float, at: int = 0) -> None:
    _taken(self, payload, weight, at)
    if at - 1 in self._parts:
        self._parts[at - 1].tensor.copy_(payload.tensor)


def _let_go_early(self: WireCopies, version: int, buffer: Buffer, oldest: int, pinned: int = -1) -> None:
    _kept(self, version, buffer, oldest, pinned)
    if version - 1 in self._raw:
        self._raw[version - 1].release()


def _without_moments(self: OwnedShard, record: Any) -> None:
    moments = {name for name in record.arrays if name != "master" and not name.startswith("wire-")}
    _loaded(self, replace(record, arrays={n: a for n, a in record.arrays.items() if n not in moments}, scalars={}))


def _rows_without_moments(self: OwnedRows, record: Any) -> None:
    moments = {"exp_avg", "exp_avg_sq"}
    arrays = {name: array for name, array in record.arrays.items() if name not in moments}
    _rows_loaded(self, replace(record, arrays=arrays, scalars={}))


def _last_row_twice(self: OwnedRows, left: int, right: int) -> None:
    """Of a row that both parts have, the right one's values are added twice."""
    other = self._parts[right]
    _rows_merged(self, left, right)
    self._parts[left].add(other.ids[-1:], other.values[-1:].clone())


def _rows_of_a_later_version(self: OwnedRows, version: int, ids: Any) -> Any:
    return _rows_read(self, min(version + 1, self._version), ids)


def _free_while_it_is_sent(self: OwnedRows, gradient: RowSum) -> Any:
    buffer, nbytes = _rows_encoded(self, gradient)
    buffer._pool.free.append(buffer)
    return buffer, nbytes


def _sums_share_their_values(self: OwnedRows, payload: Buffer, weight: float, at: int) -> None:
    """A contribution is not copied, and its memory is free for the next one."""
    ids, values = decode_gradient(payload.bytes[: _used(payload, self.shard.columns)], self.shard.columns)
    self._parts[at].add(ids, values)
    payload.release()


@pytest.mark.parametrize(("policy", "owner", "name", "bug", "said", "seeds"), [
    ("sync", PayloadTickets, "settle", _credit_twice, "a credit too many", 3),
    ("sync", PayloadTickets, "credit", _no_credit, "credits, not", 3),
    ("sync", PayloadTickets, "drop", _released_twice, "more often than it was held", 20),
    ("sync", AggregatorRelay, "_merge", _other_released_twice, "more often than it was held", 100),
    ("sync", ShardEffects, "_apply", _published_at_once, "publishes version", 40),
    ("sync", Views, "counts", _of_any_generation, "the generation is", 200),
    ("sync", Followers, "send", _the_version_before, "other bytes|other floats", 100),
    ("tables", Pulls, "add", _nobody_looks_again, "stuck", 20),
    ("fold:3", Reducer, "_stored_state", _clocks_as_they_are_now, "runs ahead|missing", 400),
    ("sync", OwnedShard, "apply", _sum_is_sent_and_is_the_version, "other floats", 10),
    ("sync", GradientSum, "take", _other_parts_memory, "other floats", 10),
    ("sync", WireCopies, "keep", _let_go_early, "more often|other floats", 10),
    ("sync", OwnedShard, "load", _without_moments, "other floats|another state|other bytes", 60),
    ("tables", OwnedRows, "load", _rows_without_moments, "other bytes|other floats|another state", 60),
    ("tables", OwnedRows, "merge", _last_row_twice, "other floats", 20),
    ("tables", OwnedRows, "rows", _rows_of_a_later_version, "other floats", 60),
    ("tables", OwnedRows, "_encoded", _free_while_it_is_sent, "with floats are held|other floats|more often", 20),
    ("tables", OwnedRows, "_add", _sums_share_their_values, "other floats", 20),
], ids=[
    "a credit twice", "a credit not at all", "a buffer released twice", "a block released twice",
    "published before its backup", "a void generation's contribution", "the version before", "a lost wake-up",
    "clocks of later", "one buffer for two", "a part written over", "a version let go early", "moments left behind",
    "rows without moments", "a row added twice", "rows of later", "rows in a free buffer", "rows not copied",
])  # fmt: skip
@pytest.mark.some("a credit*", "a buffer*", "published*", "the version*")
def test_a_defect_planted_in_a_shell_is_found(
    monkeypatch: pytest.MonkeyPatch, policy: str, owner: Any, name: str, bug: Any, said: str, seeds: int
) -> None:
    monkeypatch.setattr(owner, name, bug)
    found = first_failure(parse_policy(policy), range(seeds))
    assert re.search(said, found)


_write = Journal._write


def _computed_again() -> int:
    """Replicas that are computed once more because the coordinator dies, in a job that loses nothing else."""
    job = SimulatedJob(replicas=2, steps=8, shards=2)
    terms = Terms(workers_start=2, workers_max=2, servers=2, snapshots=True, replication=2)
    return play(Plan(1, job, terms, 2, 2, (Fault(1.0, "crash", "coordinator", 0.5),))).recomputed


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
