"""The life of a member that others connect to (a server, an aggregator): it listens, joins the coordinator, and leaves.

What arrives on connections, and each view, goes into the inbox of one thread, which owns the tensors.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rallypoint.config import parse
from rallypoint.core.protocol import Aborted, Beat, Finished, Hello, Message, NewView, Prepare, Refused, Welcome
from rallypoint.core.shard.shell import Fence
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.errors import REFUSED, AccessDenied, LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Credentials, Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.places import wanted
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.trace import Tracer
from rallypoint.observe.waits import SharedCores, wait_heeding_signals
from rallypoint.optim import InPlace
from rallypoint.server import inbox
from rallypoint.server.job import ServerJob

VIEW_TIMEOUT_S = 60.0  # long enough for a coordinator to restart


class Views:
    """The current view. The coordinator's link sets it; any thread may read it.

    `over` is set when the job has ended, with or without a `failure`. Threads that wait for a view then continue at
    once.
    """

    def __init__(self) -> None:
        self.view: View | None = None
        self.over = threading.Event()
        self.failure: str | None = None
        self._fence = Fence()
        self._changed = threading.Condition()  # a new view, or the end

    @property
    def number(self) -> ViewNumber:
        return self._fence.number

    def is_new(self, view: View) -> bool:
        return not self._fence.known or view.number > self._fence.number

    def adopt(self, view: View) -> None:
        """Adopt a view and wake the threads that wait for it."""
        with self._changed:
            if self._fence.adopt(view):
                self.view = view
            self._changed.notify_all()

    def wait_for(self, number: ViewNumber, unless: threading.Event | None = None) -> None:
        """Block until this member knows the view of that number, because the frame was sent for it (I10).

        It ends too when `unless` is set with `end_wait`. ProtocolError if the view does not come within VIEW_TIMEOUT_S;
        before the first view there is no limit.
        """
        if self._fence.has_come(number):
            return
        with self._changed:
            known = self._changed.wait_for(
                lambda: self.over.is_set() or self._fence.has_come(number) or (unless is not None and unless.is_set()),
                VIEW_TIMEOUT_S if self._fence.known else None,
            )
        if not known:
            raise ProtocolError(f"view {number} has not come here within {VIEW_TIMEOUT_S:.0f} s: is it of this job?")

    def end_wait(self, unless: threading.Event) -> None:
        """Set this event, and wake who waits with it."""
        with self._changed:
            unless.set()
            self._changed.notify_all()

    def counts(self, number: ViewNumber) -> bool:
        """Wait like `wait_for`. Returns False for a frame of an older generation: it must be ignored (I10)."""
        if not self._fence.has_come(number):
            self.wait_for(number)
        return not self._fence.is_stale(number)

    def end(self, failure: str | None) -> None:
        """The job is over. Only the first call counts."""
        with self._changed:
            if not self.over.is_set():
                self.failure = failure
                self.over.set()
                self._changed.notify_all()


class Handler:
    """What the owner's thread calls: the reducer, or the relay."""

    def handle(self, event: Any) -> None:
        """Handle one event."""
        raise NotImplementedError

    def idle_work(self) -> Callable[[], None] | None:
        """A function to call while the inbox is empty; None if there is nothing to do."""
        return None

    def close(self) -> None:
        """The job is over."""


class OwnerThread:
    """The one thread that owns a member's tensors: it passes the inbox's events to the handler, in order.

    With a single owner no tensor needs a lock. Any thread may `put` an event. An exception in the handler ends the
    thread; `failed` is called with it.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self.handler: Handler | None = None  # set once, before any event of a job is put into the inbox
        self._failed = failed
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._get: Callable[..., object] = self._inbox.get
        self._began: float | None = None  # to handle the event in progress
        self.alone = True  # does no script compute in this process?
        self.put = self._inbox.put
        self.thread = threading.Thread(target=self._run, name="reduce", daemon=True)
        self.thread.start()

    def share(self, cores: SharedCores) -> None:
        """Wait, from the second event on, while a script of this process computes."""
        self._get, self.alone = partial(_get_with, cores, self._inbox), False

    @property
    def busy_s(self) -> float:
        """For how many seconds the thread has handled one event; 0.0 while it waits for the next."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def waiting(self) -> int:
        return self._inbox.qsize()

    def stop(self) -> None:
        """End the thread, after the events that are already in the inbox."""
        self.put(None)
        self.thread.join()
        if self.handler is not None:
            self.handler.close()

    def _run(self) -> None:
        try:
            while True:
                work = self.handler.idle_work() if self.handler is not None else None
                try:
                    event = self._get(block=work is None)
                except queue.Empty:
                    assert work is not None
                    work()
                    continue
                if event is None:
                    return
                self._began = time.monotonic()
                if self.handler is not None:
                    self.handler.handle(event)
                self._began = None
        except Exception as error:  # after any error the tensors can no longer be trusted
            self._failed(error)


def _get_with(cores: SharedCores, inbox: queue.SimpleQueue[object], *, block: bool) -> object:
    event = inbox.get(block=block)
    cores.wait()
    return event


Key = tuple[str, int]  # id and incarnation: a server that joins again is another one


class ServerLinks(ABC):
    """A member's links to the other servers of the view: an aggregator's, and a server's own for measures and backups.

    Each has a thread. The coordinator's link calls `adopt`. `put` takes events for the owner; `failed` is called with a
    fault of our own that has ended a link. `always`: not only where shards have backups.
    """

    def __init__(
        self, views: Views, put: Callable[[Any], None], *, transport: Transport, credentials: Credentials,
        tracer: Tracer, failed: Callable[[Exception], None], always: bool = True,
    ) -> None:  # fmt: skip
        self._views, self._put, self._failed, self._always = views, put, failed, always
        self._transport, self._credentials, self._tracer = transport, credentials, tracer
        self._links: dict[Key, Any] = {}

    @abstractmethod
    def _opened(self, server: Member) -> Any:
        """A new link, with `start`, `unreachable` and `close`."""

    def _end(self, key: Key) -> None:
        self._links.pop(key).close()

    def adopt(self, view: View) -> None:
        """Close the links that the view no longer needs, and open the new ones."""
        others = {(m.id, m.incarnation): m for m in view.servers if m.id != self._credentials.me.id}
        for key in [key for key in self._links if key not in others]:
            self._end(key)
        for key in [key for key in others if key not in self._links] if self._always or view.backup else ():
            self._links[key] = link = self._opened(others[key])
            link.start()

    def unreachable(self) -> dict[str, float]:
        """The servers that cannot be reached -> seconds. Any thread may call it."""
        missed = {key[0]: link.unreachable() for key, link in list(self._links.items())}
        return {server: seconds for server, seconds in missed.items() if seconds > 0}

    def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            link.close()


Receive = Callable[[Channel, str], None]  # receives one frame of a connection, from whom


class ListeningMember(ABC):
    """One member of one job, from joining to the end. `near`: see `core.view.Member`.

    `start` returns once the coordinator has welcomed it. `wait` blocks until the job is over.

    Threads: one for the coordinator's link (views and other messages), one for each connection (`intake.py`), one for
    each link to a server, and the owner's. All other threads put events into the owner's inbox.
    """

    role: ClassVar[str]
    serves: ClassVar[tuple[str, ...]]  # the roles that may connect
    _owner_of = OwnerThread  # the simulation has another

    def __init__(
        self, *, id: str, coordinator: str, token: str = "", bind: str = "127.0.0.1:0",
        advertise: str = "", transport: Transport | None = None, near: str = "", link_mbit: float = 0.0,
    ) -> None:  # fmt: skip
        self.id = id
        self._me = Identity(self.role, id, token, near=near, link_mbit=link_mbit)
        self._coordinator, self._bind, self._advertise = coordinator, bind, advertise
        self._transport: Transport = transport or TcpTransport()
        self._tracer = Tracer(id)
        self._views = Views()
        self._owner = self._owner_of(self.failed)
        self._links: ServerLinks | None = None  # the job's, once it is known
        self._in_place = InPlace()
        self._joined = threading.Event()

    # ---- what the roles differ in ----

    @abstractmethod
    def _begin(self, job: ServerJob) -> ServerLinks:
        """The job is known: set the owner's handler, and return the links to servers."""

    @abstractmethod
    def _receiver(self, hello: Hello) -> Receive:
        """Return what receives the frames of this peer. ProtocolError if the current view does not let it connect."""

    @abstractmethod
    def failed(self, error: BaseException) -> None:
        """The owner, or a thread that receives, has failed: end this member."""

    def _on_other(self, message: Message) -> None:
        """A message of the coordinator that only some roles get."""
        raise ProtocolError(f"a member of role {self.role} has no use for a {type(message).__name__} message")

    def _on_admitted(self, new: bool) -> None:
        """The coordinator has welcomed this member (again). `new`: as a newcomer."""
        self._gate.me = self._link.credentials.me

    # ---- from the start to the end ----

    def share(self, cores: SharedCores, in_place: InPlace) -> None:
        """Before `start`: handle events only while the script of this process does not compute, and step its model
        where it lies if that may be."""
        self._owner.share(cores)
        self._in_place = in_place

    def start(self) -> None:
        """Listen, then join the coordinator.

        Raises AddressInUse, AccessDenied or LinkError when that fails, UsageError if nobody could connect to the
        advertised address.
        """
        with ExitStack() as started:
            started.callback(self._owner.stop)
            self._gate = Gate(self._transport, self._bind, self._me, self._admit, self._serve, self._tracer)
            started.callback(self._gate.close)
            self._link = CoordinatorLink(
                transport=self._transport, address=self._coordinator, me=self._me,
                listening_at=wanted(self._gate.address, self._advertise),
                handlers=Handlers(self._on_message, self._on_coordinator_lost, self._on_admitted, self._beat),
            )  # fmt: skip
            started.pop_all()
        self._link.start()
        self._joined.set()

    @property
    def address(self) -> str:
        """The address where others connect, "host:port"."""
        return self._gate.address

    def wait(self) -> str | None:
        """Block until the job is over. Returns None, or the sentence with which it failed."""
        wait_heeding_signals(self._views.over)
        return self._views.failure

    def unready(self) -> str:
        """Return why it serves nobody, "" while it is in the job. Any thread may call it, once it is started."""
        return "its job is over" if self._views.over.is_set() else ""

    @property
    def busy_s(self) -> float:
        return self._owner.busy_s

    @property
    def view(self) -> View | None:
        return self._views.view

    def leave(self) -> None:
        """Leave the job. Returns at once. Safe in a signal handler."""
        threading.Thread(target=self._leave, name="leave", daemon=True).start()

    def _leave(self) -> None:
        """End now: an aggregator's workers go to the servers at once."""
        self._views.end(None)

    def close(self) -> None:
        """End every connection and thread, and save the trace. May be called at any time after `start`."""
        self._views.end(None)
        self._gate.close()
        self._link.close()
        if self._links is not None:
            self._links.close()
        self._owner.stop()
        if self._link.welcome.folder:
            self._tracer.save(Path(self._link.welcome.folder))

    # ---- the coordinator ----

    def _on_message(self, message: Message) -> None:
        match message:
            case Prepare(record=record):
                if self._links is None:  # else it is repeated, because this member joined again
                    job = ServerJob(record, parse(record.config), self._in_place)
                    self._gate.backlog.allow(*job.most_waiting)
                    self._links = self._begin(job)
            case NewView(view=view):
                if self._links is not None and self._views.is_new(view):
                    self._owner.put(inbox.ViewCame(view))
                    self._views.adopt(view)  # frames that waited for this view now go into the inbox, behind it
                    self._links.adopt(view)
            case Finished():
                self._views.end(None)
            case Refused(reason=reason, final=True):
                self._views.end(f"{REFUSED}{reason}")
            case Aborted(reason=reason) | Refused(reason=reason):
                self._views.end(reason)
            case _:
                self._on_other(message)

    def _on_coordinator_lost(self, error: RallypointError) -> None:
        self._views.end(f"the coordinator is gone: {error}")

    def _beat(self) -> Beat:
        return Beat() if self._links is None else Beat(self._links.unreachable())

    def _admit(self, hello: Hello) -> Welcome:
        if hello.role not in self.serves:
            raise AccessDenied(f"{self.role} {self.id} serves nobody of role {hello.role}")
        return Welcome()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        """Receive one connection's frames until it ends. Runs in that connection's own thread."""
        self._views.wait_for(hello.view)  # a peer may get the view before this member does
        if self._links is None:
            raise LinkError("the job ended before it began")
        receive = self._receiver(hello)
        if hello.role != "server":  # an aggregator looks like a worker
            self._owner.put(inbox.Linked(channel, hello.id))
        try:
            while not self._views.over.is_set():
                receive(channel, hello.id)
        finally:
            self._owner.put(inbox.Gone(channel, hello.id))
            if channel.fault is not None:
                self.failed(channel.fault)
