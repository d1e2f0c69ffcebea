"""The life of an aggregator: it joins the coordinator, serves workers near it, and ends with the job."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

from rallypoint.aggregator.relay import Relay
from rallypoint.aggregator.upstream import Event, Ticked, Upstream
from rallypoint.config import parse
from rallypoint.core.aggregator.machine import AggregatorMachine
from rallypoint.core.aggregator.shell import AggregatorShell
from rallypoint.core.job import JobRecord
from rallypoint.core.view import View
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.messages import Aborted, Beat, Finished, Hello, Message, NewView, Prepare, Refused, Say, Welcome
from rallypoint.net.places import wanted
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.observed import observed
from rallypoint.observe.trace import Tracer
from rallypoint.observe.waits import wait_heeding_signals
from rallypoint.server.intake import Intake
from rallypoint.server.job import ServerJob
from rallypoint.server.reducer import inbox as of_servers
from rallypoint.server.reducer.owner import Owner
from rallypoint.server.views import Views

_TICK_S = 0.25


class AggregatorService:
    """One aggregator of one job, from joining to the end. `near`: see `core.view.Member`.

    `start` returns once the coordinator has welcomed it. `wait` blocks until the job is over. It holds nothing that
    could be lost: it may be closed, or killed, at any time.

    Threads: as a server's (`server/service.py`), and one that tells the owner the time.
    """

    role, waits_for = "aggregator", "workers near it"

    def __init__(
        self, *, id: str, coordinator: str, token: str = "", near: str = "", bind: str = "127.0.0.1:0",
        advertise: str = "", transport: Transport | None = None,
    ) -> None:  # fmt: skip
        self.id = id
        self._me = Identity("aggregator", id, token, near=near)
        self._coordinator, self._bind, self._advertise = coordinator, bind, advertise
        self._transport: Transport = transport or TcpTransport()
        self._tracer = Tracer(id)
        self._views = Views()
        self._owner: Owner[Event] = Owner(self.failed)
        self._upstream: Upstream | None = None  # the job's, once it is known; set with the next two
        self._relay: Relay | None = None
        self._intake: Intake | None = None
        self._clock = threading.Thread(target=self._tell_time, name="time", daemon=True)

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
        self._clock.start()

    @property
    def address(self) -> str:
        """The address where workers connect, "host:port"."""
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
        """For how many seconds the owner of its parts has handled one event."""
        return self._owner.busy_s

    @property
    def view(self) -> View | None:
        """The view that it has; None before the first."""
        return self._views.view

    @property
    def counts(self) -> tuple[int, int]:
        """How many contributions came from workers, and how many went upstream."""
        return (0, 0) if self._relay is None else (self._relay.taken, self._relay.sent)

    def leave(self) -> None:
        """End now: its workers go to the servers at once. Safe in a signal handler."""
        threading.Thread(target=self._views.end, args=(None,), name="leave", daemon=True).start()

    def close(self) -> None:
        """End every connection and thread, and save the trace. May be called at any time after `start`."""
        self._views.end(None)
        self._gate.close()
        self._link.close()
        if self._upstream is not None:
            self._upstream.close()
        self._clock.join()
        self._owner.stop()
        if self._link.welcome.folder:
            self._tracer.save(Path(self._link.welcome.folder))

    def failed(self, error: BaseException) -> None:
        """It cannot go on. The job can, without it."""
        reason = f"aggregator {self.id} failed: {type(error).__name__}: {error}"
        self._link.send(Say(reason))
        self._views.end(reason)

    # ---- the coordinator ----

    def _on_admitted(self, new: bool) -> None:
        self._gate.me = self._link.credentials.me

    def _on_message(self, message: Message) -> None:
        match message:
            case Prepare(record=record):
                self._prepare(record)
            case NewView(view=view):
                self._adopt(view)
            case Finished():
                self._views.end(None)
            case Aborted(reason=reason) | Refused(reason=reason):
                self._views.end(reason)
            case _:
                raise ProtocolError(f"an aggregator has no use for a {type(message).__name__} message")

    def _on_coordinator_lost(self, error: RallypointError) -> None:
        self._views.end(f"the coordinator is gone: {error}")

    def _beat(self) -> Beat:
        return Beat() if self._upstream is None else Beat(self._upstream.unreachable())

    def _prepare(self, record: JobRecord) -> None:
        if self._upstream is not None:
            return  # repeated when this aggregator joins again
        job = ServerJob(record, parse(record.config))
        self._gate.backlog.allow(*job.most_waiting)
        self._upstream = Upstream(
            self._link.credentials, job, self._views, self._owner.put,
            transport=self._transport, tracer=self._tracer, failed=self.failed,
        )  # fmt: skip
        machine = AggregatorMachine(self.id, job.plan.expected, job.plan.cadence, job.plan.carried)
        shell: AggregatorShell[Channel] = AggregatorShell(observed(machine, self.id))
        self._relay = self._owner.reducer = Relay(job, shell, self._upstream, self._tracer)
        self._intake = Intake(job, self._views, self._owner.put, self._tracer, self._link.welcome.trace)

    def _adopt(self, view: View) -> None:
        if self._upstream is None or not self._views.is_new(view):
            return
        self._owner.put(of_servers.Viewed(view))
        self._views.adopt(view)  # frames that waited for this view now go into the inbox, behind it
        self._upstream.adopt(view)

    def _tell_time(self) -> None:
        while not self._views.over.wait(_TICK_S):
            self._owner.put(Ticked(time.monotonic()))

    # ---- workers ----

    def _admit(self, hello: Hello) -> Welcome:
        if hello.role != "worker":
            raise AccessDenied(f"a {hello.role} has no business with an aggregator")
        return Welcome()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        """Receive one worker's frames until its connection ends. Runs in that connection's own thread."""
        self._views.wait_for(hello.view)
        if self._intake is None:
            raise LinkError("the job ended before it began")
        self._check_member(hello)
        self._owner.put(of_servers.Linked(channel, hello.id))
        try:
            while not self._views.over.is_set():
                self._intake.receive_from_worker(channel, hello.id)
        finally:
            self._owner.put(of_servers.Gone(channel, hello.id))
            if channel.fault is not None:
                self.failed(channel.fault)

    def _check_member(self, hello: Hello) -> None:
        """ProtocolError if the current view does not give this worker to this aggregator."""
        view = self._views.view
        workers = {(member.id, member.incarnation) for member in view.workers} if view is not None else set()
        if view is None or (hello.id, hello.incarnation) not in workers or view.aggregator_of.get(hello.id) != self.id:
            raise ProtocolError(f"worker {hello.id} is not near aggregator {self.id} in this view")
