"""What a store's calls promise when the servers go back to a snapshot, and when nobody keeps an answer."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from rallypoint.config import JobConfig
from rallypoint.core.layout import Layout
from rallypoint.core.policy import Async
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.errors import JobAborted, StoreRolledBack, UsageError
from rallypoint.net.frames import Header, Kind
from rallypoint.worker import keys_exchange
from rallypoint.worker.exchange.links import ExchangeContext
from rallypoint.worker.keys import KeySettings, KeyStore, declared
from rallypoint.worker.keys_exchange import KeyExchange

SERVER = Member("s", "", "", 1)


class Wire:
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Header] = []

    def push(self, header: Header, payload: memoryview, sent: Any) -> None:
        self.sent.append(header)

    def want(self, shard: int, replica: int, number: ViewNumber) -> None:
        self.sent.append(Header(Kind.WANT, number, shard=shard))

    def pull(self, header: Header, payload: memoryview | None = None) -> None:
        self.sent.append(header)


class Wires(dict[str, Wire]):
    def open(self, servers: Any, receiver: Any, view: View) -> None:
        self.update({server.id: Wire() for server in servers})

    def end(self, servers: Any) -> None:
        for server in servers:
            del self[server]

    def close(self) -> None:
        self.clear()

    def unreachable(self) -> dict[str, float]:
        return {}


def view(count: int, generation: int) -> View:
    return View(
        number=ViewNumber(1, count), generation=ViewNumber(1, generation), workers=(Member("w", "", "", 1),),
        servers=(SERVER,), assignments=(Assignment(0, {"w": (0,)}),), primary={0: "s"},
        homed={0: ViewNumber(1, 1)}, contributors={"w": (0,)}, origin="snapshot" if generation > 1 else "",
    )  # fmt: skip


class Stage:
    """One worker's store with one key, `w`, and the server that it hears."""

    def __init__(self, **settings: Any) -> None:
        self.wires = Wires()
        given = cast(KeySettings, {"steps": 9, **settings})
        config, layout = cast(tuple[JobConfig, Layout], declared({"w": (4,)}, given, {}))
        context = cast(ExchangeContext, SimpleNamespace(me="w", say=lambda said: None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keys_exchange, "Links", lambda *of: self.wires)
            self.exchange = KeyExchange(layout, config, context, lambda report: None)
        self.exchange.adopt(view(1, 1))
        self.exchange.arrivals.link_up(SERVER)
        self.done: list[ViewNumber] = []
        self.store = KeyStore(self.exchange, self.done.append, {})

    def is_at(self, version: int, number: int = 0) -> None:
        self.exchange.arrivals.answered(0, number, version, bytearray(16))

    def rolls_back(self, version: int) -> None:
        self.exchange.adopt(view(2, 2))
        self.exchange.arrivals.link_up(SERVER)
        self.is_at(version)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_thread_hears_of_a_roll_back_once_whatever_it_calls_next(stage: Stage) -> None:
    """A pull of the step that was due would wait for ever: the version comes when this thread itself has gone back."""
    stage.is_at(5)
    assert next(stage.store.due("w", 9)) == (5, 0)
    stage.rolls_back(3)
    with pytest.raises(StoreRolledBack):
        stage.store.pull("w", step=5)
    assert stage.store.step("w") == 3


def test_a_push_of_a_step_from_before_a_roll_back_is_no_mistake_of_the_script(stage: Stage) -> None:
    stage.is_at(5)
    due = next(stage.store.due("w", 9))
    stage.rolls_back(3)
    with pytest.raises(StoreRolledBack):
        stage.store.push("w", torch.ones(4), step=due.step)
    assert next(stage.store.due("w", 9)) == (3, 0)


def test_futures_of_a_generation_that_is_over_end(stage: Stage) -> None:
    stage.is_at(5)
    push, pull = stage.store.push("w", torch.ones(4)), stage.store.pull_later("w")
    stage.rolls_back(3)
    for future in (push, pull):
        with pytest.raises(StoreRolledBack):
            future.done()


def test_a_pull_that_nobody_keeps_needs_no_memory(stage: Stage) -> None:
    stage.is_at(0)
    pull = stage.store.pull_later("w")
    assert len(stage.exchange.answers.asked) == 1
    del pull
    gc.collect()
    assert len(stage.exchange.answers.asked) == 0
    stage.is_at(0, number=1)


def test_a_value_that_came_with_a_push_is_not_given_after_a_newer_one(stage: Stage) -> None:
    stage.is_at(0)
    stage.store.push("w", torch.ones(4))
    stage.is_at(1)
    stage.is_at(7, number=0)
    with stage.exchange.changed:
        assert stage.exchange.with_pushes([0]) == {}


def test_requests_leave_in_the_order_of_the_machine_whichever_thread_sends(stage: Stage) -> None:
    """A server keeps only the newest request: one that overtakes another would never be answered."""
    stage.is_at(0)
    wire = stage.wires["s"]
    wire.sent.clear()
    with stage.exchange._sends.sending:  # another thread sends
        first, second = stage.store.pull_later("w", step=2), stage.store.pull_later("w")
        assert wire.sent == [], "it leaves this to that thread"
    stage.exchange._sends.run_all()
    assert [header.base for header in wire.sent] == [1, 2]
    assert not first.done()
    assert not second.done()


def test_steps_that_no_key_gets_to_are_refused(stage: Stage) -> None:
    stage.is_at(0)
    calls: list[Any] = [
        lambda: stage.store.pull("w", step=10), lambda: stage.store.pull("w", step=-1),
        lambda: stage.store.push("w", torch.ones(4), step=9), lambda: next(stage.store.due("w", 10)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match="this store has steps="):
            call()
    stage.is_at(9)
    with pytest.raises(UsageError, match="has made all of its 9 pushes"):
        stage.store.push("w", torch.ones(4))


@pytest.mark.parametrize("step", [2**32 - 1, 2**32, 2**33])
def test_a_version_that_no_frame_can_name_is_refused_where_so_many_pushes_may_come(step: int) -> None:
    """By default 2^30 pushes of each contributor may: with 16 of them more updates than 32 bits count."""
    stage = Stage(contributors=16, steps=1 << 30, sync=Async())
    stage.is_at(5)
    with pytest.raises(UsageError, match="this store has steps="):
        stage.store.pull_later("w", step=step)
    stage.store.pull_later("w", step=2**32 - 2)


def test_servers_take_no_first_value_where_a_generation_begins_from_a_snapshot() -> None:
    from rallypoint.core.policy import Sync
    from rallypoint.core.shard.server import ServerMachine, ServerPlan
    from rallypoint.core.shard.shell import ServerShell

    plan = ServerPlan(policy=Sync(), expected=[1], measured=frozenset({0}), decides=frozenset(), keyed=True)
    shell: ServerShell[Any] = ServerShell(ServerMachine("s", plan))
    shell.adopt(view(1, 1))
    assert shell.may_begin("w")
    shell.adopt(msgspec.structs.replace(view(2, 2)))
    assert not shell.may_begin("w")


def test_leaving_waits_until_the_last_push_counts(stage: Stage) -> None:
    """Else the coordinator could end the job while a push is on its way, with nobody left to send it again."""
    stage.is_at(0)
    stage.store.push("w", torch.ones(4), step=0)
    stage.exchange.finish()
    with pytest.raises(JobAborted):  # there is nothing to wait for any more: it has waited
        stage.store.finish()
    assert stage.done == [], "it says that it is done before its push counts"
    stage.is_at(1)
    stage.store.finish()
    assert stage.done == [stage.exchange.view.generation]


def test_the_future_of_a_push_that_is_another_workers_by_now_is_done_when_that_has_made_it() -> None:
    """Only asking tells (streaming): `done` alone, in a script's own loop, has to ask."""
    stage = Stage(sync=Async(), contributors=2)
    stage.exchange.arrivals.valued(0, 1, 0, 0, bytearray(16))
    push = stage.store.push("w", torch.ones(4), step=0, contributor=1)
    wire = stage.wires["s"]
    wire.sent.clear()
    assert not push.done()
    assert [(header.kind, header.shard) for header in wire.sent] == [(Kind.WANT, 0)]
    stage.exchange.arrivals.valued(0, 1, 0, 0, bytearray(16))
    assert not push.done()
    assert len(wire.sent) == 1, "each answer brings the value: it does not ask again at once"
    stage.exchange.arrivals.valued(0, 1, 1, 1, bytearray(16))
    assert push.done()
