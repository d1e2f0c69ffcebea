"""Between an exchange's threads: whoever waits is told as soon as there is something to do (no look at the clock makes
up for a lost wake-up), no link sends what is not what it was told to send, and no two links write one slot."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from rallypoint.config import resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Hello, Welcome
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.errors import JobAborted, LinkError, ProtocolError
from rallypoint.net.channel import Channel, Rank
from rallypoint.net.frames import Header, Kind, wants
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Credentials, Identity, ticket_for
from rallypoint.net.transport import InprocTransport
from rallypoint.observe.trace import Tracer
from rallypoint.worker.exchange import locked as module
from rallypoint.worker.exchange.exchange import Exchange, push_initial
from rallypoint.worker.exchange.links import ExchangeContext, ServerLink
from rallypoint.worker.exchange.locked import Rewound
from support.beside import Beside, raising, until

PATIENCE_S = 60.0
LAYOUT = build_layout([TensorSpec("w", (48,), "float32", 0)], shard_bytes=64)
SERVER = Member("s", "here", "nobody:1", 1)


def _view(count: int, assigned: dict[str, tuple[int, ...]], generation: int = 1) -> View:
    workers = (Member("w", "here", incarnation=2), Member("x", "here", incarnation=3))
    primary = {shard.index: "s" for shard in LAYOUT.shards}
    number, began = ViewNumber(1, count), ViewNumber(1, generation)
    return View(
        number, began, workers, (SERVER,), (Assignment(0, assigned),), primary, {}, uploader="x", contributors=assigned
    )


SECRET = b"the secret of every server here"


def credentials() -> Credentials:
    """Those of worker "w"."""
    known = Credentials(Identity("worker", "w"))
    known.admitted(2, b"")
    return known


def _adopt(exchange: Exchange, view: View) -> None:
    """A view comes, with tickets for its servers."""
    given = {server.id: ticket_for(SECRET, "worker", "w", 2) for server in view.servers}
    exchange._links._context.credentials.given(view, given)
    exchange.adopt(view)


def _exchange(transport: Any = None, **settings: Any) -> Exchange:
    config = resolve({"replicas": 2, "steps": 9, "network.shard_bytes": 64, **settings})
    context = ExchangeContext(credentials(), transport or InprocTransport(), Tracer("w"), lambda text: None)
    return Exchange(LAYOUT, config, context)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    def only_when_told(changed: threading.Condition, ready: Callable[[], bool], *_: Any, **__: Any) -> None:
        changed.wait_for(ready)

    monkeypatch.setattr(module, "wait_until", only_when_told)
    exchange = _exchange()
    yield exchange
    exchange.finish()
    exchange.close()


def _publish(exchange: Exchange, version: int) -> None:
    """All shards' version comes from the server."""
    for shard in LAYOUT.shards:
        header = Header(Kind.VERSION, exchange.view.number, shard=shard.index, step=version, length=shard.slot_bytes)
        if exchange.arrivals.arriving(header, SERVER.id) is not None:
            exchange.arrivals.landed(shard.index)


class _Waiting:
    """The main thread, which wants something to do."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._found = exchange, threading.Event()
        self._action: machine.Action | machine.Store | None = None
        threading.Thread(target=self._wait, daemon=True).start()
        self.settle()

    def settle(self) -> None:
        """Until it has seen that there is nothing, and waits."""
        until(lambda: bool(self._exchange._locked.changed._waiters))  # type: ignore[attr-defined]
        assert not self._found.is_set()

    def _wait(self) -> None:
        self._action = self._exchange.next_action()
        self._found.set()

    def found(self) -> machine.Action | machine.Store | None:
        assert self._found.wait(PATIENCE_S), "there is something to do, and nobody has told"
        return self._action


def _install(exchange: Exchange, version: int) -> None:
    assert exchange.next_action() == machine.Install(version)
    assert exchange.begin_install(version) is not None
    assert exchange.installed(version) == exchange.view.generation


def _hold_version_0(exchange: Exchange, replica: int = 0) -> None:
    exchange.adopt(_view(1, {"w": (replica,), "x": (1 - replica,)}))
    exchange.arrivals.link_up(SERVER)
    _publish(exchange, 0)
    _install(exchange, 0)


def _ends_with(exchange: Exchange, call: Callable[[], object]) -> type[BaseException]:
    """The error of a call on another thread that waits when the job ends."""
    with Beside(call) as waiting:
        until(lambda: bool(exchange._locked.changed._waiters))  # type: ignore[attr-defined]
        exchange.finish()
        return type(waiting.outcome())


def test_a_worker_that_is_assigned_a_replica_of_the_very_step_it_holds(exchange: Exchange) -> None:
    _hold_version_0(exchange)
    exchange.adopt(_view(2, {"w": (), "x": (0, 1)}))  # it is left without, and follows no more
    waiting = _Waiting(exchange)
    exchange.adopt(_view(3, {"w": (0,), "x": (1,)}))  # and at the same step has one again
    waiting.settle()
    _publish(exchange, 0)  # which it holds already: nothing lands
    assert waiting.found() == machine.Compute(0, 0)


def test_an_encoded_version_longer_than_any_codec_writes_is_refused(exchange: Exchange) -> None:
    """Before memory for its payload is allocated."""
    exchange.adopt(_view(1, {"w": (0,), "x": (1,)}))
    header = Header(Kind.VERSION, exchange.view.number, shard=0, step=0, length=64 << 20, codec=1)
    with pytest.raises(ProtocolError, match="no codec needs so many"):
        exchange.arrivals.arriving(header, SERVER.id)


@pytest.mark.parametrize(
    ("sync", "wrong"),
    [
        ({"type": "sync"}, {"step": 10}),  # the job has 9 steps: the worker would push nothing more to this shard
        ({"type": "sync"}, {"step": (1 << 32) - 1}),
        ({"type": "async"}, {"step": 19, "wants": 2}),  # two replicas, 9 updates each
        ({"type": "async"}, {"base": 10, "wants": 2}),
        ({"type": "async"}, {"wants": 4}),
    ],
)
def test_a_version_that_the_job_cannot_have_is_refused(sync: dict[str, str], wrong: dict[str, int]) -> None:
    exchange = _exchange(sync=sync)
    _adopt(exchange, _view(1, {"w": (0,), "x": (1,)}))
    last = Header(Kind.VERSION, exchange.view.number, shard=0, length=64, step=9 if sync["type"] == "sync" else 18)
    try:
        exchange.arrivals.arriving(last, "s")
        with pytest.raises(ProtocolError, match="this job has"):
            exchange.arrivals.arriving(last._replace(**wrong), "s")
    finally:
        exchange.finish()
        exchange.close()


def test_a_view_that_comes_when_the_exchange_is_closed_opens_no_links(exchange: Exchange) -> None:
    """The coordinator's link ends after the exchange: a view may come in between."""
    exchange.close()
    before = set(threading.enumerate())
    _adopt(exchange, _view(1, {"w": (0,), "x": (1,)}))
    assert set(threading.enumerate()) == before


def test_a_worker_whose_next_version_is_whole(exchange: Exchange) -> None:
    exchange.adopt(_view(1, {"w": (0,), "x": (1,)}))
    exchange.arrivals.link_up(SERVER)
    waiting = _Waiting(exchange)
    _publish(exchange, 0)
    assert waiting.found() == machine.Install(0)


def test_a_worker_whose_link_stands_again(exchange: Exchange) -> None:
    _hold_version_0(exchange)
    exchange.arrivals.link_lost(SERVER, LinkError("cut"))
    waiting = _Waiting(exchange)
    exchange.arrivals.link_up(SERVER)
    assert waiting.found() == machine.Compute(0, 0)


def _compute(exchange: Exchange, replica: int) -> None:
    """The main thread computes a replica up to the gradient of shard 0, which is in its slot now."""
    assert exchange.next_action() == machine.Compute(0, replica)
    assert exchange.replica.begin(0, replica) is not None
    exchange.replica.weigh(1.0, finite=True)
    assert exchange.replica.claim(0)


def _begin_early(exchange: Exchange, replica: int) -> None:
    """The main thread is in a forward pass of step 1 that began early: nothing of version 1 is here yet."""
    _hold_version_0(exchange, replica)
    _compute(exchange, replica)
    for shard in LAYOUT.shards:
        assert exchange.replica.claim(shard.index)
        exchange.replica.filled(shard.index)
    exchange.replica.computed()
    exchange.forward.allow(True)
    assert exchange.next_action() == machine.Compute(1, replica)
    assert exchange.replica.begin(1, replica) is not None


def test_a_worker_that_gets_a_lower_replica_in_a_step_that_it_began_early_sends_without_credits(
    exchange: Exchange
) -> None:
    """The server keeps the credit of its other replica back, until the lower one is there."""
    _begin_early(exchange, 1)
    assert exchange.forward.begin(1, 1), "it begins early"
    _publish(exchange, 1)
    exchange.adopt(_view(2, {"w": (0, 1)}))
    exchange.forward.take([shard.index for shard in LAYOUT.shards])
    exchange.forward.installed()
    assert exchange._links._overdraws
    exchange.replica.computed()
    _publish(exchange, 2)
    _install(exchange, 2)
    assert not exchange._links._overdraws


def test_a_job_that_ends_ends_the_wait_of_a_forward_pass(exchange: Exchange) -> None:
    """A worker that is set apart is not waited for: the job may end in the middle of its forward pass."""
    _begin_early(exchange, 0)
    assert _ends_with(exchange, lambda: exchange.forward.take([0])) is Rewound
    exchange.replica.abandoned()
    assert exchange.next_action() is None


def test_a_replica_is_not_begun_when_the_job_has_just_ended(exchange: Exchange) -> None:
    _hold_version_0(exchange)
    assert exchange.next_action() == machine.Compute(0, 0)
    exchange.finish()
    assert exchange.replica.begin(0, 0) is None
    assert exchange.next_action() is None


def test_a_job_that_ends_ends_a_pull_of_rows(exchange: Exchange) -> None:
    """Also in an evaluation, which no roll-back ends."""
    _hold_version_0(exchange)
    assert _ends_with(exchange, lambda: exchange.rows.pull({0: (memoryview(bytes(4)), 64)})) is JobAborted


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_slot_is_sent_only_on_the_link_that_it_was_queued_for(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    _hold_version_0(exchange)
    _compute(exchange, 0)
    link, pushed = exchange._links.get("s"), []

    def encode(*_: Any) -> None:
        """Where the main thread may lose the processor for long: the link ends meanwhile, and stands again."""
        if interrupted:
            exchange.arrivals.link_lost(SERVER, LinkError("cut"))
            exchange.arrivals.link_up(SERVER)

    monkeypatch.setattr(exchange._encoder, "raw", frozenset())
    monkeypatch.setattr(exchange._encoder, "encode", encode)
    monkeypatch.setattr(link, "push", lambda header, payload, sent, rank: pushed.append(header.shard))
    exchange.replica.filled(0)
    assert pushed == ([] if interrupted else [0])
    exchange.replica.computed()
    if interrupted:  # it is computed again, into the slot that nobody sends from
        _compute(exchange, 0)


class _Home:
    """A server that sends what the test sends."""

    def __init__(self, transport: InprocTransport, id: str) -> None:
        self.channels: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        me = Identity("server", id, incarnation=1, secret=SECRET)
        self.gate = Gate(transport, f"{id}:1", me, lambda hello: Welcome(), self._serve)
        self.member = Member(id, "here", self.gate.address, 1)

    def _serve(self, channel: Channel, hello: Hello) -> None:
        self.channels.put(channel)
        while True:
            channel.receive_bytes(channel.receive_header())


def _at(count: int, primary: dict[int, str], homes: list[_Home]) -> View:
    servers = tuple(home.member for home in homes)
    assignments = (Assignment(0, {"w": (0,), "x": (1,)}),)
    return View(ViewNumber(1, count), ViewNumber(1, 1), (), servers, assignments, primary, {}, uploader="x")


class _Dead:
    """A transport to servers whose host has died: no attempt to connect ends before the test does."""

    def __init__(self) -> None:
        self.connecting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.over = threading.Event()

    def connect(self, address: str, timeout: float) -> Any:
        self.connecting.put(address)
        assert self.over.wait(PATIENCE_S)
        raise LinkError(f"nobody answers at {address}")


def test_a_view_without_the_servers_of_a_dead_host_is_adopted_at_once() -> None:
    """The links to them are still connecting, which takes seconds and cannot be cut short."""
    transport = _Dead()
    exchange = _exchange(transport)
    dead = tuple(Member(f"s{n}", "dead", f"dead:{n}", n) for n in range(1, 5))
    before = msgspec.structs.replace(
        _view(1, {"w": (0,), "x": (1,)}), servers=dead, primary={shard.index: "s1" for shard in LAYOUT.shards}
    )
    _adopt(exchange, before)
    assert {transport.connecting.get(timeout=PATIENCE_S) for _ in dead} == {server.address for server in dead}
    (adopts := threading.Thread(target=_adopt, args=(exchange, _view(2, {"w": (0,), "x": (1,)})))).start()
    try:
        assert transport.connecting.get(timeout=PATIENCE_S) == SERVER.address, "the new home is connected to"
    finally:
        transport.over.set()
        adopts.join(PATIENCE_S)
        exchange.finish()
        exchange.close()


def test_a_shard_that_moves_is_not_written_by_the_home_that_it_has_left(exchange: Exchange) -> None:
    transport = exchange._links._context.transport
    assert isinstance(transport, InprocTransport)
    homes = [_Home(transport, "old"), _Home(transport, "new")]
    slot = exchange.buffer[LAYOUT.shards[0].start : LAYOUT.shards[0].stop]
    half = LAYOUT.shards[0].slot_bytes // 2
    try:
        _adopt(exchange, _at(1, {0: "old", 1: "new", 2: "new"}, homes))
        sender, other = (home.channels.get(timeout=PATIENCE_S) for home in homes)
        values = torch.full_like(slot, 1.0).numpy().tobytes()
        header = Header(Kind.VERSION, ViewNumber(1, 1), step=1, length=2 * half)
        sender.connection.send(sender._sealer.seal(header, memoryview(values)) + values[:half])
        until(lambda: exchange._shell.machine.slots[0] is machine.Slot.LANDING)
        _adopt(exchange, _at(2, {0: "new", 1: "new", 2: "new"}, homes))  # the rest of it is still on its way
        values = torch.full_like(slot, 6.0).numpy().tobytes()
        other.send(Header(Kind.VERSION, ViewNumber(1, 2), step=6, length=2 * half), memoryview(values))
        until(lambda: exchange._shell.machine.slots[0] is machine.Slot.LANDED)
        with pytest.raises(LinkError):
            sender.connection.send(bytes(half))  # of zeros
        assert slot.tolist() == [6.0] * len(slot)
    finally:
        exchange.close()
        for home in homes:
            home.gate.close()


def _one_home(exchange: Exchange) -> tuple[_Home, Channel]:
    transport = exchange._links._context.transport
    assert isinstance(transport, InprocTransport)
    home = _Home(transport, "home")
    _adopt(exchange, _at(1, dict.fromkeys((0, 1, 2), "home"), [home]))
    return home, home.channels.get(timeout=PATIENCE_S)


@pytest.mark.parametrize(("header", "sentence"), [
    (Header(Kind.CREDIT, replica=1000), "gives 1000 credits for 0 contributions"),
    (Header(Kind.WAIT, base=1, wants=wants(2)), "to wait for replica 2: this job has 2"),
    (Header(Kind.VERSION, ViewNumber(1, 1), shard=3), "shard 3: not in this job's layout"),
    (Header(Kind.TAKEN), "codecs have no state"),
], ids=lambda of: of.kind.name if isinstance(of, Header) else "")  # fmt: skip
def test_what_no_server_can_mean_ends_the_link_with_a_sentence(
    exchange: Exchange, header: Header, sentence: str
) -> None:
    home, channel = _one_home(exchange)
    try:
        channel.send(header)
        until(lambda: exchange._locked.failure is not None)
        with pytest.raises(JobAborted, match=sentence):
            exchange.next_action()
    finally:
        exchange.close()
        home.gate.close()


class _Sending:
    """A channel with one frame at a time, which is sent when `goes` is called."""

    connection = None  # no limits are set on it

    def __init__(self) -> None:
        self.frames: list[tuple[int, Rank]] = []
        self._sent: list[Callable[[], None]] = []

    def send(
        self, header: Header, payload: memoryview | None = None, sent: Callable[[], None] = lambda: None, *,
        rank: Rank = (), left: Callable[[], None] = lambda: None, urgent: bool = False,
    ) -> None:  # fmt: skip
        if urgent:
            return
        self.frames.append((header.shard, rank))
        self._sent.append((left, sent))

    def goes(self) -> None:
        for called in self._sent.pop(0):
            called()


def _link(channel: Any, *, window: int) -> ServerLink:
    link = ServerLink(transport=InprocTransport(), server=SERVER, credentials=credentials(), window=window,
        receiver=_Deaf(), view=ViewNumber, tracer=Tracer("w"))  # fmt: skip
    link._up(channel)
    return link


def _push(link: ServerLink, shard: int, rank: Rank = ()) -> None:
    link.push(Header(Kind.PUSH, shard=shard), memoryview(b""), lambda: None, rank)


class _AtOnce(_Sending):
    """One that sends each frame at once."""

    def send(self, header: Header, *rest: Any, **more: Any) -> None:
        super().send(header, *rest, **more)
        self.goes()


def test_credits_that_come_at_once_let_as_many_contributions_go() -> None:
    channel: Any = _AtOnce()
    link = _link(channel, window=2)
    for shard in range(5):
        _push(link, shard)
    assert [shard for shard, _ in channel.frames] == [0, 1]
    link._credit(channel, 2)
    assert [shard for shard, _ in channel.frames] == [0, 1, 2, 3]
    with pytest.raises(ProtocolError, match="gives 4294967295 credits for 2 contributions"):
        link._credit(channel, 2**32 - 1)  # at once: nobody counts that far
    assert [shard for shard, _ in channel.frames] == [0, 1, 2, 3]


def test_any_number_of_contributions_leaves_a_link_whose_channel_has_just_closed() -> None:
    """Each is dropped by the thread that sends it, and lets the next one go."""
    link, free = _link(_Sending(), window=9), []
    for shard in range(3000):
        link.push(Header(Kind.PUSH, shard=shard), memoryview(b""), partial(free.append, shard))
    link._channel = _AtOnce()  # type: ignore[assignment]
    link._busy = False
    link.overdraw(True)
    assert free == list(range(1, 3000))


def test_contributions_that_the_next_forward_pass_needs_first_overtake_those_that_wait() -> None:
    """Also those that have credit: only the one that is being sent is not overtaken."""
    channel = _Sending()
    link = _link(channel, window=2)
    first, *others = ((0, (7, 0, 3)), (1, (7, 0, 2)), (2, (7, 1, 0)), (3, (7, 0, 1)))
    for shard, rank in (first, *others):
        _push(link, shard, rank)
    assert channel.frames == [first]
    for _ in range(3):
        channel.goes()
        link._credit(channel, 1)  # type: ignore[arg-type]
    assert channel.frames == [first, others[2], others[0], others[1]]  # the next replica's come last


@pytest.mark.parametrize(("over", "order"), [(False, [0, 2, 1]), (True, [0, 1, 2])])
def test_the_forward_pass_s_order_counts_from_the_end_of_the_backward_pass(
    exchange: Exchange, over: bool, order: list[int]
) -> None:
    """Until then they leave scattered: see `Pushes._rank`."""
    _hold_version_0(exchange)
    channel: Any = _Sending()
    link = exchange._links.get("s")
    link._up(channel)
    exchange.forward.learn([0, 1, 2])
    _compute(exchange, 0)
    for shard in LAYOUT.shards:
        assert exchange.replica.claim(shard.index)
        exchange.replica.filled(shard.index)
    if over:
        exchange.replica.computed()
    channel.goes()
    channel.goes()
    assert [shard for shard, _ in channel.frames] == order


def test_a_contribution_that_has_left_lets_the_next_one_go_only_with_credit() -> None:
    channel = _Sending()
    link = _link(channel, window=1)
    _push(link, 0)
    _push(link, 1)
    channel.goes()
    assert [shard for shard, _ in channel.frames] == [0]
    link.want(2, 0, ViewNumber(1, 1))  # in its place
    assert len(channel.frames) == 1
    link._credit(channel, 1)  # type: ignore[arg-type]
    assert [shard for shard, _ in channel.frames] == [0, 1, 2]


def test_a_link_that_is_closed_lets_go_of_what_waits_for_credit() -> None:
    link, free = _link(_Deaf(), window=1), list[int]()
    for shard in range(3):
        link.push(Header(Kind.PUSH, shard=shard), memoryview(b""), lambda shard=shard: free.append(shard))  # type: ignore[misc]
    assert free == []  # the first is on its way, the others wait
    link.close()
    assert free == [1, 2]
    link.push(Header(Kind.PUSH, shard=3), memoryview(b""), lambda: free.append(3))
    assert free == [1, 2, 3]  # by whoever looked the link up before it was closed


def test_an_upload_that_nobody_takes_ends_with_its_generation() -> None:
    views = iter([_view(1, {})] * 16)  # as many as may be on their way at once; then there is a roll-back

    class _Stopped:
        """Links whose server takes no byte."""

        def get(self, server: str) -> Any:
            return _Deaf()

    layout = build_layout([TensorSpec("w", (17 * 16,), "float32", 0)], shard_bytes=64)
    homes = dict.fromkeys(range(len(layout.shards)), "s")

    def view() -> View | None:
        at = next(views, None)
        return None if at is None else msgspec.structs.replace(at, primary=homes)

    links: Any = _Stopped()
    upload = threading.Thread(target=push_initial, daemon=True, args=(
        layout, links, view, lambda: None, 0, lambda start, stop: torch.zeros(stop - start), None))  # fmt: skip
    upload.start()
    upload.join(PATIENCE_S)
    assert not upload.is_alive()


class _Deaf:
    """A receiver that takes no notice."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def test_the_predicate_of_a_wait_changes_nothing_however_often_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a roll-back the encoder forgets and codec states are recalled: once, and not by the look whether."""
    waiting = False

    def many_looks(changed: threading.Condition, ready: Callable[[], bool], *_: Any, **__: Any) -> None:
        nonlocal waiting
        waiting = True
        while sum(ready() for _ in range(3)) < 3:
            changed.wait()
        waiting = False

    monkeypatch.setattr(module, "wait_until", many_looks)
    exchange = _exchange(codec={"type": "topk", "ratio": 0.5})
    resets: list[bool] = []
    recalls: list[tuple[int, bool]] = []
    monkeypatch.setattr(exchange._encoder, "reset", lambda: resets.append(waiting))
    try:
        exchange.adopt(_view(1, {"w": (0,), "x": (1,)}))
        exchange.adopt(_view(2, {"w": (0,), "x": (1,)}, generation=2))
        link = exchange._links.get("s")
        monkeypatch.setattr(link, "send_codec_state", lambda header, _: recalls.append((header.shard, waiting)))
        exchange.arrivals.link_up(SERVER)
        _publish(exchange, 0)
        _install(exchange, 0)
        found: list[Any] = []
        (thread := threading.Thread(target=lambda: found.append(exchange.next_action()), daemon=True)).start()
        until(lambda: bool(exchange._locked.changed._waiters))  # type: ignore[attr-defined]
        for shard in LAYOUT.shards:
            header = Header(Kind.CODEC_STATE, exchange.view.number, shard=shard.index)
            exchange.arrivals.codec_state(header, bytearray())
        thread.join(PATIENCE_S)
        assert found == [machine.Compute(0, 0)]
        assert resets == [False]
        assert recalls == [(0, False), (1, False), (2, False)]
    finally:
        exchange.finish()
        exchange.close()


@pytest.fixture
def with_codec_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Exchange, list[Header]]]:
    """The exchange of worker w, about to compute replica 0 of step 0; and what it has sent of codec states."""
    monkeypatch.setattr(module, "wait_until", lambda changed, ready, *_, **__: changed.wait_for(ready))
    exchange = _exchange(codec={"type": "topk", "ratio": 0.5})
    frames: list[Header] = []
    exchange.adopt(_view(1, {"w": (0,), "x": (1,)}))
    monkeypatch.setattr(exchange._links.get("s"), "send_codec_state", lambda header, _: frames.append(header))
    exchange.arrivals.link_up(SERVER)
    _publish(exchange, 0)
    _install(exchange, 0)
    (waiting := threading.Thread(target=exchange.next_action, daemon=True)).start()
    until(lambda: len(frames) == len(LAYOUT.shards))
    for shard in LAYOUT.shards:
        exchange.arrivals.codec_state(Header(Kind.CODEC_STATE, exchange.view.number, shard=shard.index), bytearray())
    waiting.join(PATIENCE_S)
    frames.clear()
    yield exchange, frames
    exchange.finish()
    exchange.close()


def test_a_replica_reassigned_just_before_it_is_computed_has_its_codec_states_given_to_its_new_worker(
    with_codec_states: tuple[Exchange, list[Header]],
) -> None:
    """Worker w has no replica left after that: no later event would make it give them, and x would wait for ever."""
    exchange, frames = with_codec_states
    exchange.adopt(_view(2, {"x": (0, 1)}))
    assert exchange.replica.begin(0, 0) is None
    _Waiting(exchange)
    sent = [(frame.kind, frame.shard, frame.replica) for frame in frames]
    assert sent == [(Kind.CODEC_STATE, shard, 0) for shard in range(3)]


def test_a_copy_of_a_codec_state_carries_the_view_in_which_its_contribution_was_sent(
    with_codec_states: tuple[Exchange, list[Header]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A roll-back may come between the two: the copy must not count in the new generation."""
    exchange, frames = with_codec_states
    send = machine.Send(0, 3, 0, "s", 1, exchange.view.number)
    exchange._encoder.encode(0, 2, 0, torch.ones(16))
    exchange.adopt(_view(2, {"w": (0,), "x": (1,)}, generation=2))
    monkeypatch.setattr(exchange._links.get("s"), "send_codec_state", lambda header, _: frames.append(header))
    states = exchange._locked.effects._codec_states  # type: ignore[attr-defined]
    states.copy(send)
    assert [frame.view for frame in frames] == [send.view]


def test_copies_are_sent_once_on_a_connection_and_again_if_the_replica_went_and_came_back(
    with_codec_states: tuple[Exchange, list[Header]],
) -> None:
    """What it sent before may have come to a server that took nothing of that replica from it any more."""
    exchange, frames = with_codec_states
    _publish(exchange, 1)
    _install(exchange, 1)
    exchange.capture(machine.Store("a snapshot", 1, ("s",)))
    copies, number = exchange._locked.effects.run, exchange.view.number

    def contribute() -> list[tuple[int, int]]:
        frames.clear()
        copies([machine.Send(shard, 1, 0, "s", 1, number) for shard in range(3)])
        return [(frame.shard, frame.base) for frame in frames]

    assert contribute() == [(0, 1), (1, 1), (2, 1)]
    assert contribute() == []
    exchange.adopt(_view(2, {"x": (0, 1)}))
    exchange.adopt(_view(3, {"w": (0,), "x": (1,)}))
    assert [shard for shard, _ in contribute()] == [0, 1, 2]


def test_a_raw_shard_is_sent_without_a_look_at_the_encoder(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them asked whether the encoder is closed, also where no codec has a state."""
    _hold_version_0(exchange)
    pushed: list[Header] = []
    monkeypatch.setattr(exchange._links.get("s"), "push", lambda header, *_, **__: pushed.append(header))
    exchange._encoder.close()
    _compute(exchange, 0)
    exchange.replica.filled(0)
    assert [(header.shard, header.replica) for header in pushed] == [(0, 0)]


def test_an_upload_of_an_older_generation_ends_even_if_the_view_changes_while_it_is_looked_at(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [msgspec.structs.replace(_view(n, {"w": (0,), "x": (1,)}, generation=n), uploader="w") for n in (1, 2)]
    exchange.adopt(mine[0])
    exchange.arrivals.link_up(SERVER)
    pushed: list[Header] = []
    monkeypatch.setattr(exchange._links.get("s"), "push", lambda header, *_, **__: pushed.append(header))
    looks = iter(mine)
    monkeypatch.setattr(Exchange, "view", property(lambda _: next(looks, mine[1])))
    exchange.initialise(lambda start, stop: torch.zeros(stop - start))
    assert [header.view for header in pushed] == [mine[0].number]


def test_a_beat_says_for_how_long_the_main_thread_has_waited_and_which_server_is_out_of_reach(
    exchange: Exchange,
) -> None:
    assert exchange.beat().waited == 0.0
    exchange.adopt(_view(1, {"w": (), "x": (0, 1)}))
    waiting = _Waiting(exchange)
    until(lambda: exchange.beat().waited > 0.01)
    beat = exchange.beat()
    assert beat.unreachable.keys() == {"s"}, "nobody listens there"
    assert beat.activity == exchange.beat().activity, "a thread that waits does not get on"
    exchange.finish()
    waiting.found()
    assert exchange.beat().waited == 0.0


def test_a_replica_that_is_computed_again_because_its_link_broke_does_not_end_the_waiting(exchange: Exchange) -> None:
    """A link over which only small frames pass comes back at once, again and again."""
    _hold_version_0(exchange)
    progress = exchange._locked.progress
    for count in range(3):
        _compute(exchange, 0)
        assert progress.waits(100.0 * count) >= 3.0 * count
        progress.goes_on(100.0 * count + 3.0)
        exchange.replica.abandoned()
        exchange.arrivals.link_lost(SERVER, LinkError("no acknowledgement for 3 s"))
        exchange.arrivals.link_up(SERVER)


def test_a_main_thread_that_evaluates_counts_as_active(exchange: Exchange) -> None:
    before = exchange.beat().activity
    assert exchange.beat().activity == before
    assert not exchange.beat().evaluating
    with exchange.evaluating():
        assert exchange.beat().evaluating
        assert exchange.beat().activity < exchange.beat().activity
    exchange.check()
    assert exchange.beat().activity > before


def test_a_fault_of_a_link_s_thread_ends_the_run_with_a_sentence(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the main thread would wait for ever for versions that nobody receives."""
    home, channel = _one_home(exchange)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(exchange._shell, "link_lost", raising(KeyError("a bug")))
            channel.connection.close()
            until(lambda: exchange._locked.failure is not None)
        with pytest.raises(JobAborted, match=r"the link to server home has failed: KeyError\('a bug'\)"):
            exchange.next_action()
    finally:
        exchange.close()
        home.gate.close()
