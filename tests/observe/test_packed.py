"""Machines, events and effects as msgpack data: what comes back is what was packed, and nothing unknown comes back."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from rallypoint.core.cluster.events import From
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.policy import BoundedStaleness, Sync
from rallypoint.core.protocol import CaughtUp
from rallypoint.core.shard.effects import Take
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.server import On
from rallypoint.core.view import ViewNumber, assign_replicas
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.slots import Arriving, Slot
from rallypoint.core.worker.streaming import StreamMachine
from rallypoint.observe.recording import PackingError, pack, pack_state
from support.replay import unpack


def _there_and_back(data: Any) -> Any:
    return unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(data)))


@pytest.mark.parametrize("value", [
    None, True, 7, -1, 2.5, float("inf"), "text", b"bytes", [1, [2]], (1, (2, ())), {1, 2}, frozenset({"a"}),
    {1: (2,), "k": [3]}, {(1, 2): "pair"}, Counter({3: 2}), deque([1, 2], maxlen=4), Slot.LANDED, Sync(quorum=2),
    BoundedStaleness(3), ViewNumber(2, 5), From("server0", CaughtUp({3: ViewNumber(1, 1)})), On(4, Take(9, 0.5)),
    Arriving(1, 2, ViewNumber(1, 4), whole=False), Terms(servers=3),
], ids=repr)  # fmt: skip
def test_a_value_comes_back_as_what_it_was(value: Any) -> None:
    back = _there_and_back(pack(value))
    assert back == value
    assert type(back) is type(value)


def test_a_bounded_queue_stays_bounded() -> None:
    assert _there_and_back(pack(deque([1, 2], maxlen=4))).maxlen == 4


@pytest.mark.parametrize("machine", [
    ClusterMachine(Terms()), WorkerMachine("me", 3, frozenset({2}), 10), StreamMachine("me", 3, frozenset(), 10),
    ShardMachine(BoundedStaleness(1), 2, rounds=9),
], ids=lambda machine: type(machine).__name__)  # fmt: skip
def test_a_machine_comes_back_with_all_that_it_holds(machine: Any) -> None:
    back = _there_and_back(pack_state(machine))
    assert type(back) is type(machine)
    assert pack_state(back) == pack_state(machine)


def test_what_a_machine_holds_twice_is_one_thing_again() -> None:
    machine = ClusterMachine(Terms())
    shared = machine.course
    back = _there_and_back(pack_state([machine, {"the course": shared}]))
    assert back[0].course is back[1]["the course"]


def test_a_set_is_packed_in_one_order_whatever_its_own_is() -> None:
    names = [f"server{i}" for i in range(20)]
    packed = [pack(set(order)) for order in (names, names[::-1])]
    assert packed[0] == packed[1] == ["s", *sorted(names, key=lambda name: (len(name), name))]


@dataclass
class Stranger:
    name: str = "x"


def test_a_function_of_the_core_is_itself_again() -> None:
    assert _there_and_back(pack(assign_replicas)) is assign_replicas


@pytest.mark.parametrize("value", [Stranger(), print, _there_and_back, object(), [Stranger()], {1: Stranger()}])
def test_what_is_not_of_the_core_is_refused_with_a_sentence(value: Any) -> None:
    with pytest.raises(PackingError, match=r"cannot be recorded: machines, their events and their effects consist of"):
        pack(value)


@pytest.mark.parametrize(("data", "said"), [
    (["os:system", "true"], "holds a os:system, which this version of Rallypoint does not know"),
    (["core.worker.slots:Landed"], "Landed has 0 fields, and 1 here"),
    (["core.worker.slots:Slot", "WET"], r"holds \['WET'\], which is no Slot"),
    (["core.view:ViewNumber", 1], "ViewNumber has 1 fields, and 2 here"),
    (["os:abort"], "holds a os:abort, which this version of Rallypoint does not know"),
    (["r", 3], "is damaged: it has no value"),
    (["d", 1], "is damaged"),
    (["s", ["core.shard.clip:Rule", *[["-"]] * 5]], "is damaged"),
    ([3, 4], "has no tag"),
    ([], "has no tag"),
])  # fmt: skip
def test_what_is_not_known_is_refused_with_a_sentence(data: Any, said: str) -> None:
    with pytest.raises(PackingError, match=said):
        unpack(data)
