"""Updates that threads make beside the owner's: the test says when each of them is made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import msgspec
import pytest
import torch
from one_server import FIRST, SECOND, Context

from rallypoint.config import JobConfig, record_of, resolve
from rallypoint.core.layout import Layout, TensorSpec, build_layout
from rallypoint.core.protocol import Applied, Message
from rallypoint.core.shard import clip
from rallypoint.core.view import Assignment, Member, View
from rallypoint.launch.observing.health import STUCK_S, stuck_for
from rallypoint.net.frames import Header, Kind
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.server.held import LEAST_BESIDE, worked_beside
from rallypoint.server.job import ServerJob
from rallypoint.server.reducer import Reducer
from rallypoint.server.service import ServerService, update_threads
from rallypoint.testing.simulation.server import Made

MIB = 1 << 18  # words
_CONFIG = resolve({
    "replicas": 2, "steps": 5, "optimizer": {"type": "adamw", "lr": 0.1}, "network.shard_bytes": 1 << 20,
})  # fmt: skip
_LAYOUT = build_layout([TensorSpec("w", (2 * MIB,), "float32", 0)], _CONFIG.network.shard_bytes)


class _Later(Executor):
    """Makes what it is given when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.given: list[Made] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        self.given.append(made := Made(partial(function, *args)))
        return made


class _Channel:
    name, number, connection = "w", 1, None

    def __init__(self) -> None:
        self.versions: list[tuple[int, int, float]] = []  # shard, version, first word
        self.answers: list[Kind] = []

    def send(self, header: Header, payload: Any = None, sent: Callable[[], None] | None = None, **_: Any) -> None:
        if header.kind is Kind.VERSION:
            first = torch.frombuffer(payload, dtype=torch.float32)[0].item()
            self.versions.append((header.shard, header.step, first))
        elif header.kind is Kind.WORDS:
            self.answers.append(header.kind)
        if sent is not None:
            sent()


class _Server:
    """Two shards of 1 MiB, of two replicas that worker "w" computes. It follows."""

    held_back = False  # do events stay in the inbox?

    def __init__(self, config: JobConfig = _CONFIG, *, beside: bool = True) -> None:
        self.job = ServerJob(record_of(config, _LAYOUT), config)
        self.queued: list[inbox.Event] = []
        self.reducer = Reducer("s", self.job, Context(), self.queued.append, Tracer("s"), threads=2 * beside)
        self.later, self.channel = _Later(), _Channel()
        if beside:
            effects = self.reducer._effects
            effects.threads.shutdown()
            effects.threads = self.later
        members = (Member("w", "here", incarnation=1),), (Member("s", "here", "s:1", 2),)
        self.view(FIRST, members)
        self.handle(inbox.Linked(self.link, "w"))
        for shard in (0, 1):
            self.send(Kind.INITIAL, shard, 1.0)
        self.handle(inbox.Followed(self.link, "w", Header(Kind.FOLLOW, FIRST)))
        self.channel.versions.clear()
        self.members = members

    @property
    def link(self) -> Any:
        return self.channel

    def view(self, number: Any, members: Any, shards: tuple[int, ...] = (0, 1)) -> None:
        replicas = tuple(range(self.job.config.replicas))
        workers, servers = members
        primary = {shard: "s" if shard in shards else "t" for shard in (0, 1)}
        self.handle(inbox.ViewCame(View(
            number, FIRST, workers, servers, (Assignment(0, {"w": replicas}),), primary, {}, uploader="w",
            contributors={"w": replicas},
        )))  # fmt: skip

    def handle(self, event: inbox.Event) -> None:
        self.reducer.handle(event)
        while self.queued and not self.held_back:
            self.reducer.handle(self.queued.pop(0))

    def send(self, kind: Kind, shard: int, value: float, replica: int = 0, step: int = 0, weight: float = 1.0) -> None:
        buffer = self.job.pool.take()
        buffer.tensor.fill_(value)
        header = Header(
            kind, FIRST, shard=shard, replica=replica, step=step, length=_LAYOUT.shards[shard].nbytes, weight=weight
        )
        event = inbox.Initial if kind is Kind.INITIAL else lambda c, h, b: inbox.Pushed(c, "w", h, b)
        self.handle(event(self.link, header, buffer))

    def step(self, shard: int, step: int = 0) -> Self:
        for replica in (0, 1):
            self.send(Kind.PUSH, shard, 0.5 + step, replica, step)
        return self

    @property
    def sent(self) -> list[tuple[int, int]]:
        return [(shard, version) for shard, version, _ in self.channel.versions]

    def parameters(self) -> list[torch.Tensor]:
        held: Any = self.reducer._owned
        return [held[shard].master.clone() for shard in (0, 1)]


def test_other_shards_go_on_while_a_thread_makes_an_update() -> None:
    server = _Server().step(0)
    server.step(1)
    assert len(server.later.given) == 2
    assert server.sent == []  # nobody hears of a version that is not made
    server.later.given[1].make()
    server.handle(inbox.Wake())
    assert server.sent == [(1, 1)]
    server.later.given[0].make()
    server.handle(inbox.Wake())
    assert server.sent == [(1, 1), (0, 1)]
    assert not server.reducer._effects.updating


def test_the_bytes_are_those_of_one_thread() -> None:
    one, several = _Server(beside=False), _Server()
    for server in (one, several):
        for step in range(4):
            server.step(1, step)
            server.step(0, step)
            for made in reversed(server.later.given):
                made.make()
            server.later.given.clear()
            server.handle(inbox.Wake())
    assert several.channel.versions[-1][1] == 4
    assert sorted(one.channel.versions) == sorted(several.channel.versions)
    for expected, found in zip(one.parameters(), several.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_who_begins_to_follow_during_an_update_gets_it() -> None:
    server = _Server().step(0)
    server.handle(inbox.UnfollowCame(server.link, "w"))
    server.step(1)
    server.handle(inbox.Followed(server.link, "w", Header(Kind.FOLLOW, FIRST)))
    assert sorted(server.sent)[-2:] == [(0, 1), (1, 1)]


def test_who_asks_for_a_version_during_the_next_update_gets_it() -> None:
    server = _Server().step(0)
    server.handle(inbox.Fetched(server.link, "w", 0, 0))  # I5: the version before is still kept
    assert server.sent == [(0, 1), (0, 0)]


def test_a_contribution_for_the_next_step_waits_for_the_update() -> None:
    server = _Server().step(0)
    server.step(0, 1)  # as where workers need not have the version: its sum is a later effect on the same shard
    assert server.sent == []
    server.later.given[0].make()
    server.handle(inbox.Wake())
    assert server.sent == [(0, 1)]
    server.later.given[1].make()
    server.handle(inbox.Wake())
    assert server.sent == [(0, 1), (0, 2)]


def test_a_view_waits_for_all_updates() -> None:
    server = _Server().step(0)
    server.step(1)
    server.view(SECOND, server.members)
    assert not server.reducer._effects.updating
    assert server.sent == [(0, 1), (1, 1)]


def test_a_view_that_finishes_a_step_says_so_when_its_update_is_made() -> None:
    """The step's verdict waits in the inbox behind the view, which brings it too."""
    server = _Server(resolve({
        "replicas": 2, "steps": 5, "clip": 1.0, "optimizer": {"type": "adamw", "lr": 0.1},
        "network.shard_bytes": 1 << 20,
    }))  # fmt: skip
    server.held_back = True
    server.step(0)
    server.step(1)
    assert [type(event) for event in server.queued] == [clip.StepVerdict]
    made_when_said = []

    def say(message: Message) -> None:
        if isinstance(message, Applied):
            made_when_said.append(server.later.given[0].done())

    server.reducer._ledger._say = say
    server.view(SECOND, server.members)
    assert made_when_said
    assert all(made_when_said)


def test_an_update_that_fails_ends_the_owner() -> None:
    server = _Server().step(0)
    server.later.given[0].set_exception(ArithmeticError("no memory"))
    with pytest.raises(ArithmeticError, match="no memory"):
        server.handle(inbox.Wake())


def test_a_server_whose_update_never_ends_says_so_though_its_owner_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server, begun, go_on = _Server(), threading.Event(), threading.Event()
    held: Any = server.reducer._owned[0]

    def hangs(_: object) -> None:
        begun.set()
        assert go_on.wait(60.0)

    monkeypatch.setattr(held, "apply", hangs)
    service = ServerService(id="s0", coordinator="nowhere:1")
    service._reducer = server.reducer
    with ThreadPoolExecutor(1, "update") as server.reducer._effects.threads:
        try:
            server.step(0)
            assert begun.wait(60.0)
            later = time.monotonic() + STUCK_S + 1.0
            monkeypatch.setattr(time, "monotonic", lambda: later)
            assert stuck_for(service.id, service.busy_s).startswith("s0 has not got on for 6")
        finally:
            monkeypatch.undo()
            go_on.set()
    assert service.busy_s == 0.0
    service._owner.stop()


def test_a_contribution_that_comes_during_an_update_is_not_counted_as_late_for_it() -> None:
    server = _Server(resolve({
        "replicas": 2, "steps": 5, "sync": {"type": "async"}, "optimizer": {"type": "adamw", "lr": 0.1},
        "network.shard_bytes": 1 << 20,
    }))  # fmt: skip
    entries: list[Applied] = []
    server.reducer._ledger._say = lambda message: entries.append(message) if isinstance(message, Applied) else None
    for replica in (0, 1):
        server.send(Kind.PUSH, 0, 0.5, replica)
    server.send(Kind.PUSH, 0, 0.5, 0, step=1)
    while server.later.given:
        server.later.given.pop(0).make()
        server.handle(inbox.Wake())
    assert [entry.late for entry in entries] == [{"w": 0.0}] * 3


def test_a_thread_is_worth_3_mib_of_work() -> None:
    """SGD touches 2 MiB for a shard of 1 MiB at most, AdamW 3; AllReduce only keeps the mean."""

    def bytes_of_an_update(layout: Layout = _LAYOUT, **settings: Any) -> dict[int, int]:
        config = resolve({"replicas": 2, "steps": 5, "network.shard_bytes": 1 << 20, **settings})
        return worked_beside(ServerJob(record_of(config, layout), config))

    adamw, sgd = ({"type": name, "lr": 0.1} for name in ("adamw", "sgd"))
    assert bytes_of_an_update(optimizer=adamw) == {0: LEAST_BESIDE, 1: LEAST_BESIDE}
    assert max(bytes_of_an_update(optimizer=sgd).values()) < LEAST_BESIDE
    assert bytes_of_an_update(sync={"type": "all-reduce"}, optimizer=adamw) == {0: 0, 1: 0}
    small = build_layout([TensorSpec("w", (MIB // 4,), "float32", 0)], _CONFIG.network.shard_bytes)
    assert bytes_of_an_update(small, optimizer=adamw) == {}


def _of_eight(**settings: Any) -> JobConfig:
    optimizer = {"type": "sgd", "lr": 0.1}
    return resolve({"replicas": 8, "steps": 5, "optimizer": optimizer, "network.shard_bytes": 1 << 20, **settings})


def _sum_of(server: _Server, shard: int) -> Any:
    held: Any = server.reducer._owned[shard]
    return held._sum._parts


def test_a_sum_is_added_up_by_the_owner_when_it_is_idle_and_by_a_thread_when_much_has_come() -> None:
    server = _Server(_of_eight())
    for replica in range(4):
        server.send(Kind.PUSH, 0, 1.0 + replica, replica)
    assert sorted(_sum_of(server, 0)) == [0, 1]  # the other events came first
    assert not server.later.given
    work = server.reducer.idle_work()
    assert work is not None
    work()
    assert {at: part.tensor[0].item() for at, part in _sum_of(server, 0).items()} == {0: 10.0}
    assert server.reducer.idle_work() is None

    for replica in (4, 5, 6, 7):
        server.send(Kind.PUSH, 0, 1.0 + replica, replica)
    [sums] = server.later.given  # what came before the last one, and then the mean: 5 additions
    assert server.sent == []
    sums.make()
    server.handle(inbox.Wake())
    assert server.sent == [(0, 1)]


@pytest.mark.parametrize("settings", [{}, {"clip": 1.0}, {"optimizer": {"type": "adamw", "lr": 0.1}}])
def test_a_sum_that_threads_add_up_has_the_bytes_of_one_thread(settings: dict[str, Any]) -> None:
    one, several = (_Server(_of_eight(**settings), beside=beside) for beside in (False, True))
    handed_over = 0
    for step in range(3):
        for replica in (6, 1, 0, 3, 7, 2, 5, 4):
            for shard in (1, 0):
                for server in (one, several):
                    server.send(Kind.PUSH, shard, 0.1 * replica - 0.3, replica, step, weight=0.7 + 0.1 * replica)
        while several.later.given:
            handed_over += 1
            several.later.given.pop().make()
            several.handle(inbox.Wake())
    assert handed_over > 6
    assert sorted(one.channel.versions) == sorted(several.channel.versions)
    assert several.channel.versions[-1][1] == 3
    for expected, found in zip(one.parameters(), several.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_an_owner_that_is_never_idle_adds_up_itself_where_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The senders have their credits back: nothing else would bound the payloads that wait."""
    monkeypatch.setattr("rallypoint.server.reducer._MOST_WORK", 1)
    server = _Server(_of_eight())
    for shard in (0, 1):
        for replica in range(2):
            server.send(Kind.PUSH, shard, 1.0, replica)
    assert [sorted(_sum_of(server, shard)) for shard in (0, 1)] == [[0], [0, 1]]
    for replica in range(2, 8):
        server.send(Kind.PUSH, 1, 1.0, replica)
    assert len(server.later.given) == 1  # which has shard 1
    for replica in range(2, 6):
        server.send(Kind.PUSH, 0, 1.0, replica)
    assert sorted(_sum_of(server, 0)) == [0, 4]
    assert not server.reducer._effects.adding


def test_additions_of_a_shard_that_moves_away_give_their_buffers_back() -> None:
    server = _Server(_of_eight())
    for replica in range(4):
        server.send(Kind.PUSH, 0, 1.0, replica)
    server.view(SECOND, server.members, shards=(1,))
    assert not server.reducer._effects.adding
    pool = server.job.pool
    assert pool.made - len(pool.free) == 1  # the version of the shard that stays


@pytest.mark.parametrize(("optimizer", "expected"), [("adamw", 1), ("muon", 2)])
def test_a_thread_that_updates_computes_alone_unless_the_bytes_need_more(optimizer: str, expected: int) -> None:
    config = msgspec.structs.replace(_CONFIG, optimizer=resolve({"optimizer": {"type": optimizer}}).optimizer)
    shards = tuple(msgspec.structs.replace(shard, columns=4 * (optimizer == "muon")) for shard in _LAYOUT.shards)
    job = ServerJob(record_of(config, msgspec.structs.replace(_LAYOUT, shards=shards)), config)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = Reducer("s", job, Context(), lambda event: None, Tracer("s"), threads=1)._effects.threads
        assert threads.submit(torch.get_num_threads).result() == expected
        threads.shutdown()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "servers", "expected"), [(1, 1, 0), (2, 1, 2), (2, 2, 1), (8, 1, 4), (8, 4, 2)])
def test_servers_of_one_host_share_its_cores(
    cores: int, servers: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rallypoint.server.service.usable_cores", lambda: cores)
    assert update_threads(servers) == expected
