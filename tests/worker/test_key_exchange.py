"""What a store's calls promise when the servers go back to a snapshot, and when nobody keeps an answer."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

import rallypoint as rp
from rallypoint.config import JobConfig, of_group
from rallypoint.core.layout import Layout
from rallypoint.core.policy import Async, ServerPolicy, Sync
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.errors import ConfigError, JobAborted, ProtocolError, StoreRolledBack, UsageError
from rallypoint.net.frames import LATEST, SKIP, Header, Kind, wants
from rallypoint.worker import keys_exchange
from rallypoint.worker.exchange.links import ExchangeContext
from rallypoint.worker.keys import DenseKey, KeySettings, KeyStore, TableKey, declared
from rallypoint.worker.keys_exchange import KeyArrivals, KeyExchange

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


# ---- What a store's worker checks: what servers claim, and what a script gives ----


STEPS, CONTRIBUTORS, NBYTES = 9, 2, 16


class Arrivals(KeyArrivals):
    """Whatever is `heard` was not refused."""

    heard: list[tuple[Any, ...]]

    def valued(self, *what: Any) -> None:
        self.heard.append(what)

    def answered(self, *what: Any) -> None:
        self.heard.append(what)


def arrivals(sync: ServerPolicy) -> Arrivals:
    settings = cast(KeySettings, {"steps": STEPS, "contributors": CONTRIBUTORS, "sync": sync})
    config, layout = declared({"w": (4,)}, settings, {})
    exchange = SimpleNamespace(layout=layout, config=config, machine=None, answers=None)
    taken = Arrivals(cast(KeyExchange, exchange))
    taken.heard = []
    return taken


ROWS = Header(Kind.ROWS, length=NBYTES)
VALUE = Header(Kind.VERSION, length=NBYTES, wants=wants(1))


@pytest.mark.parametrize(
    ("sync", "most"), [(Sync(), STEPS), (Async(), STEPS * CONTRIBUTORS)], ids=["rounds", "streaming"]
)
def test_a_version_that_a_key_never_gets_to_is_refused(sync: ServerPolicy, most: int) -> None:
    """Else a worker would take its own pushes for counted."""
    taken = arrivals(sync)
    taken.rows(ROWS._replace(step=most), bytearray(NBYTES))
    assert len(taken.heard) == 1
    for flags in (0, SKIP):
        for step in (most + 1, LATEST):
            with pytest.raises(ProtocolError, match=f"has {most} at most"):
                taken.rows(ROWS._replace(step=step, flags=flags, length=0 if flags else NBYTES), bytearray(NBYTES))
    with pytest.raises(ProtocolError, match=f"has {most} at most"):
        taken.arriving(VALUE._replace(step=most + 1), "s")
    assert len(taken.heard) == 1


def test_a_clock_that_a_contributor_never_gets_to_is_refused() -> None:
    taken = arrivals(Async())
    assert taken.arriving(VALUE._replace(base=STEPS), "s") is not None
    taken.landed(0)
    assert len(taken.heard) == 1
    with pytest.raises(ProtocolError, match=f"step {STEPS + 1} of {STEPS}"):
        taken.arriving(VALUE._replace(base=STEPS + 1), "s")


def test_contributors_shards_and_lengths_that_a_store_does_not_have_are_refused() -> None:
    taken = arrivals(Async())
    for header in (VALUE._replace(wants=wants(CONTRIBUTORS)), VALUE._replace(shard=1), VALUE._replace(length=12)):
        with pytest.raises(ProtocolError):
            taken.arriving(header, "s")
    with pytest.raises(ProtocolError, match="there are 2"):
        taken.to_wait(CONTRIBUTORS, 0)
    with pytest.raises(ProtocolError):
        taken.rows(ROWS, bytearray(12))
    assert taken.heard == []


# ---- what a script gives ----


@pytest.fixture
def layout() -> Layout:
    keys = {"w": torch.zeros(2, 3), "one": torch.zeros(()), "t": torch.empty(40, 2, device="meta")}
    return declared(keys, {"steps": STEPS}, {})[1]


def dense(layout: Layout, name: str) -> DenseKey:
    return DenseKey(next(entry for entry in layout.entries if entry.spec.name == name), layout)


def read(key: DenseKey | TableKey, parts: dict[int, memoryview], rows: Any = None) -> torch.Tensor:
    reading = key.reading(rows)
    reading.check(None)
    return reading.filled({shard: bytearray(data) for shard, data in parts.items()}, None)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def _other_default(request: pytest.FixtureRequest) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_other_default")
def test_values_are_fp32_whatever_the_scripts_default_is(layout: Layout) -> None:
    key, table = dense(layout, "w"), TableKey(0, layout)
    values = torch.arange(6.0, dtype=torch.float32).view(2, 3) / 3
    back = read(key, key.pushed(values, None))
    assert back.dtype == torch.float32
    assert torch.equal(back, values)
    pushed = table.pushed(torch.full((3, 2), 1 / 3), torch.tensor([5, 1, 5]))
    assert sum(map(len, pushed.values())) == 4 * len(pushed) + 2 * (4 + 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_other_dtypes_are_converted(layout: Layout, dtype: torch.dtype) -> None:
    key = dense(layout, "w")
    assert torch.equal(read(key, key.pushed(torch.ones(2, 3, dtype=dtype), None)), torch.ones(2, 3))


def test_a_key_of_no_dimension_is_one_number(layout: Layout) -> None:
    key = dense(layout, "one")
    assert read(key, key.pushed(torch.tensor(2.5), None)).item() == 2.5


def test_rows_may_have_any_shape(layout: Layout) -> None:
    table = TableKey(0, layout)
    given: list[tuple[Any, tuple[int, ...]]] = [
        (torch.tensor(7), ()), ([], (0,)), (torch.empty(0, 3), (0, 3)), (range(3), (3,)), ([[1, 2]], (1, 2)),
    ]  # fmt: skip
    for rows, shape in given:
        assert table.pushed(torch.ones(*shape, 2), rows)
        wanted = table.reading(rows).wanted
        assert sum(nbytes for _, nbytes in wanted.values()) == 8 * torch.empty(shape).numel()


@pytest.mark.parametrize("rows", [[[1], [2, 3]], [1 << 70], "ab", [0.5], [True]], ids=str)
def test_rows_that_are_no_whole_numbers_are_told(layout: Layout, rows: Any) -> None:
    with pytest.raises(UsageError, match="rows of key t are whole numbers"):
        TableKey(0, layout).reading(rows)


def test_an_optimizer_by_the_first_part_of_names_is_each_keys_own() -> None:
    keys = {"g.a": (4,), "g.b": (4,), "d": (4,)}
    both = {"g": rp.Adam(lr=0.1), "d": rp.SGD(lr=0.2)}
    config, layout = declared(keys, {"steps": STEPS, "optimizer": both}, {})
    own = {entry.spec.name: of_group(config, entry.spec.group).optimizer for entry in layout.entries}
    assert own == {"g.a": both["g"], "g.b": both["g"], "d": both["d"]}


@pytest.mark.parametrize(("optimizer", "overrides", "sentence"), [
    ({"g": rp.Adam()}, {}, "'d' has no optimizer: give each key one"),
    ({"g": rp.Adam(), "d": rp.SGD(), "e": rp.SGD()}, {}, "'e' is the first part of no key's name"),
    ({"g": rp.Adam(), "d": rp.SGD()}, {"optimizer": {"lr": 0.5}}, "optimizer is set, and the script gives each key"),
])  # fmt: skip
def test_optimizers_of_other_keys_are_refused(
    optimizer: dict[str, Any], overrides: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        declared({"g.a": (4,), "d": (4,)}, {"optimizer": optimizer}, overrides)
