"""The coordinator's connections and the one thread that owns its machine."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rallypoint.config import JobConfig, parse
from rallypoint.coordinator.events import EventLog
from rallypoint.coordinator.progress import StepTally
from rallypoint.core import cluster
from rallypoint.core.view import Member
from rallypoint.errors import AccessDenied, ConfigError, LinkError, ProtocolError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Kind
from rallypoint.net.gate import Gate
from rallypoint.net.messages import (
    Aborted,
    Done,
    Finished,
    GiveUp,
    Hello,
    Message,
    Metrics,
    Planned,
    Prepare,
    Prepared,
    Propose,
    Report,
    Say,
    Skipped,
    Start,
    Waiting,
    Welcome,
    decode,
)
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport

SILENCE_S = 5.0  # without news for so long, say what the job waits for
_FAREWELL_S = 2.0


class Reception(msgspec.Struct, frozen=True):
    """What every member is told when it joins."""

    overrides: dict[str, Any] = {}
    folder: str = ""
    trace: tuple[int, int] = (0, 0)


class CoordinatorService:
    """The coordinator of one job of `workers` workers and `servers` servers.

    `start` returns once it listens (`address`); `wait` blocks until the job is over: None, or why it failed.
    """

    def __init__(
        self, *, workers: int, servers: int, token: str = "", bind: str = "127.0.0.1:0",
        reception: Reception | None = None, transport: Transport | None = None,
    ) -> None:  # fmt: skip
        self._machine = cluster.ClusterMachine(workers, servers)
        self._token, self._bind = token, bind
        self._reception = reception or Reception()
        self._transport: Transport = transport or TcpTransport()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._members: dict[str, Channel] = {}
        self._observers: list[Channel] = []
        self._tally: StepTally | None = None
        self._planned: Planned | None = None
        self._last_news = time.monotonic()
        self._over = threading.Event()
        self._failure: str | None = None

    def start(self) -> None:
        """Begin to listen. AddressInUse when somebody does there already."""
        self._log = EventLog(self._reception.folder)
        self._thread = threading.Thread(target=self._run, name="coordinate", daemon=True)
        self._thread.start()
        try:
            self._gate = Gate(self._transport, self._bind, self._token, self._admit, self._serve)
        except BaseException:
            self._stop_owner()
            raise

    @property
    def address(self) -> str:
        """Where members connect."""
        return self._gate.address

    def wait(self) -> str | None:
        """Until the job is over and everybody has been told: None, or why it failed."""
        self._over.wait()
        return self._failure

    def abort(self, reason: str) -> None:
        """End the job from outside (a child died, Ctrl-C); everybody is told why."""
        self._inbox.put(lambda: self._run_effects([cluster.Abort(reason)]))

    def close(self) -> None:
        """End every connection and thread; members are given a moment to receive the last word."""
        for channel in (*self._members.values(), *self._observers):
            channel.flush(_FAREWELL_S)
        self._gate.close()
        self._stop_owner()

    def _stop_owner(self) -> None:
        self._inbox.put(None)
        self._thread.join()
        self._log.close()

    # ---- connections ----

    def _admit(self, hello: Hello) -> Welcome:
        if hello.role not in ("worker", "server", "observer"):
            raise AccessDenied(f"there is no role {hello.role}")
        if hello.id in self._members:
            raise AccessDenied(_taken(hello.id))
        return Welcome(self._reception.overrides, self._reception.folder, self._reception.trace)

    def _serve(self, channel: Channel, hello: Hello) -> None:
        self._inbox.put(lambda: self._joined(channel, hello))
        reason = "it closed its connection"
        try:
            while True:
                header = channel.receive_header()
                if header.kind is not Kind.CONTROL or hello.role == "observer":
                    raise ProtocolError(f"a {header.kind.name} frame from {hello.role} {hello.id}")
                message = _checked(decode(channel.receive_bytes(header)))
                self._inbox.put(lambda message=message: self._received(channel, hello, message))  # type: ignore[misc]
        except LinkError as error:
            reason = str(error)
            raise
        except ProtocolError as error:
            reason = f"it broke the protocol: {error}"
            raise
        finally:
            self._inbox.put(lambda: self._left(channel, hello, reason))

    # ---- the owner's thread ----

    def _run(self) -> None:
        while True:
            try:
                call = self._inbox.get(timeout=SILENCE_S)
            except queue.Empty:
                self._say_what_we_wait_for()
                continue
            if call is None:
                return
            try:
                call()
            except Exception as error:  # whatever it was, nobody would be told of anything any more
                self._end(f"the coordinator failed: {type(error).__name__}: {error}")

    def _joined(self, channel: Channel, hello: Hello) -> None:
        if hello.role == "observer":
            self._observers.append(channel)
            if self._planned is not None:
                channel.send_message(self._planned)
            return
        if hello.id in self._members:
            channel.refuse(_taken(hello.id))
            return
        self._members[hello.id] = channel
        self._handle(cluster.Joined(Member(hello.id, hello.host, hello.address), hello.role))

    def _left(self, channel: Channel, hello: Hello, reason: str) -> None:
        if channel in self._observers:
            self._observers.remove(channel)
        if self._members.get(hello.id) is channel:
            del self._members[hello.id]
            self._handle(cluster.Left(hello.id, reason))

    def _received(self, channel: Channel, hello: Hello, message: Message) -> None:
        if self._members.get(hello.id) is not channel:
            return  # it was refused: what it says does not count
        match message:
            case Report() if hello.role == "worker":
                self._report(message)
            case Metrics() | Say() | Skipped():
                self._announce(message)
            case Propose(record=record):
                self._handle(cluster.Proposed(hello.id, record))
            case Prepared():
                self._handle(cluster.Prepared(hello.id))
            case Done():
                self._handle(cluster.Done(hello.id))
            case GiveUp(reason=reason):
                self._handle(cluster.Failed(hello.id, reason))
            case _:
                self._handle(cluster.Failed(hello.id, f"it sent a {type(message).__name__} message"))

    def _report(self, report: Report) -> None:
        if self._tally is not None and (done := self._tally.add(report)) is not None:
            self._announce(done)

    def _handle(self, event: cluster.Event) -> None:
        self._last_news = time.monotonic()
        self._run_effects(self._machine.handle(event))

    def _run_effects(self, effects: Sequence[cluster.Effect]) -> None:
        for effect in effects:
            match effect:
                case cluster.Refuse(member=member, reason=reason):
                    self._members.pop(member).refuse(reason)
                case cluster.Prepare(record=record, view=view):
                    self._plan(effect)
                    for server in view.servers:
                        self._members[server.id].send_message(Prepare(record, view))
                case cluster.Start(view=view):
                    for worker in view.workers:
                        self._members[worker.id].send_message(Start(view))
                case cluster.Finish():
                    self._end(None)
                case cluster.Abort(reason=reason):
                    self._end(reason)

    def _plan(self, effect: cluster.Prepare) -> None:
        config, layout, view = effect.record.config, effect.record.layout, effect.view
        self._tally = StepTally(config["replicas"])
        self._planned = Planned(
            steps=config["steps"], replicas=config["replicas"], item=config["item"], words=layout.words,
            shards=len(layout.shards), workers=tuple(m.id for m in view.workers),
            servers=tuple(m.id for m in view.servers),
        )  # fmt: skip
        self._announce(self._planned)

    def _end(self, failure: str | None) -> None:
        if self._over.is_set():
            return
        self._failure = failure
        last_word: Message = Finished() if failure is None else Aborted(failure)
        for channel in self._members.values():
            channel.send_message(last_word)
        self._announce(last_word)
        self._over.set()

    def _announce(self, message: Message) -> None:
        self._last_news = time.monotonic()
        self._log.write(message)
        for channel in self._observers:
            channel.send_message(message)

    def _say_what_we_wait_for(self) -> None:
        if self._over.is_set() or time.monotonic() - self._last_news < SILENCE_S:
            return
        silence = time.monotonic() - self._last_news
        what = self._machine.waiting_for() or self._who_is_late()
        waiting = Waiting(f"waiting for {what}, {silence:.0f} s so far")
        self._log.write(waiting)
        for channel in self._observers:
            channel.send_message(waiting)

    def _who_is_late(self) -> str:
        assert self._tally is not None
        assert self._machine.view is not None
        step, replicas = self._tally.missing()
        late = [worker for worker, hand in self._machine.view.deal.items() if set(hand) & set(replicas)]
        return f"step {step}: replica {', '.join(map(str, replicas))} on {', '.join(late)} has not reported"


def _checked(message: Message) -> Message:
    """ProtocolError for a message that decodes but makes no sense."""
    if isinstance(message, Report) and not (message.weight > 0 and math.isfinite(message.weight)):
        raise ProtocolError(f"a report of weight {message.weight}")
    if isinstance(message, Propose):
        config = message.record.config
        if missing := sorted(set(JobConfig.__struct_fields__) - config.keys()):
            raise ProtocolError(f"a job record whose settings are not resolved: {missing[0]} is missing")
        try:
            parse(config)
        except ConfigError as error:
            raise ProtocolError(str(error)) from None
    return message


def _taken(id: str) -> str:
    return f"the id {id} is taken: give every member one of its own"
