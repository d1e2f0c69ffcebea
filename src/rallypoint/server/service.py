"""The life of a server: it joins the coordinator, serves workers and other servers, and ends with the job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch

from rallypoint.config import parse
from rallypoint.core.job import JobRecord
from rallypoint.core.shard import clip
from rallypoint.core.shard.links import PeerLinks
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.typed import LONGEST_NAME
from rallypoint.core.view import View
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.messages import (
    Aborted,
    Beat,
    Capture,
    Finished,
    GiveUp,
    Hello,
    Leaving,
    Message,
    NewView,
    Prepare,
    Refused,
    Skipped,
    Welcome,
)
from rallypoint.net.places import wanted
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.lines import Once, printable
from rallypoint.observe.trace import Tracer
from rallypoint.observe.waits import wait_heeding_signals
from rallypoint.optim.flat import import_for_optimizers
from rallypoint.server.intake import Intake
from rallypoint.server.job import ServerJob
from rallypoint.server.peers import Peers
from rallypoint.server.reducer import inbox
from rallypoint.server.reducer.owner import Owner
from rallypoint.server.reducer.reducer import Reducer
from rallypoint.server.views import Views
from rallypoint.store.manifest import Compression
from rallypoint.store.writer import SnapshotWriter

LEAVING_EVERY_S = 1.0


class ServerService:
    """One reduction server of one job, from joining to the end.

    `start` returns once the coordinator has welcomed it. `wait` blocks until the job is over.

    Threads: one for the coordinator's link (views and other messages), one for each connection (`intake.py`), one for
    each link to another server (`peers.py`), and the owner of the shards (`owner.py`). All other threads put events
    into the owner's inbox.
    """

    role, waits_for = "server", "its part of the parameters"

    def __init__(
        self, *, id: str, coordinator: str, token: str = "", bind: str = "127.0.0.1:0",
        advertise: str = "", transport: Transport | None = None, near: str = "", link_mbit: float = 0.0,
    ) -> None:  # fmt: skip
        self.id, self._near, self._link_mbit = id, near, link_mbit
        self._coordinator, self._token, self._bind, self._advertise = coordinator, token, bind, advertise
        self._transport: Transport = transport or TcpTransport()
        self._tracer = Tracer(id)
        self._views = Views()
        self._owner: Owner[inbox.Event] = Owner(self.failed)
        self._reducer: Reducer | None = None  # the job's, once it is known; set with the next two
        self._intake: Intake | None = None
        self._peers: Peers | None = None
        self._joined = threading.Event()
        self._skipped = Once()  # of one contribution, each of its shards says so

    def start(self) -> None:
        """Listen, then join the coordinator.

        Raises AddressInUse, AccessDenied or LinkError when that fails, UsageError if nobody could connect to the
        advertised address.
        """
        me = Identity("server", self.id, self._token, near=self._near, link_mbit=self._link_mbit)
        with ExitStack() as started:
            started.callback(self._owner.stop)
            self._gate = Gate(self._transport, self._bind, me, self._admit, self._serve, self._tracer)
            started.callback(self._gate.close)
            self._link = CoordinatorLink(
                transport=self._transport, address=self._coordinator, me=me,
                listening_at=wanted(self._gate.address, self._advertise),
                handlers=Handlers(
                    self._on_message, self._on_coordinator_lost, self._on_admitted,
                    lambda: Beat() if self._peers is None else Beat(self._peers.unreachable()),
                ),
            )  # fmt: skip
            started.pop_all()
        self._link.start()
        self._joined.set()

    @property
    def address(self) -> str:
        """The address where workers and other servers connect, "host:port"."""
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
        """For how many seconds the owner of its shards has handled one event."""
        return self._owner.busy_s

    @property
    def waiting(self) -> int:
        """How many events wait for the owner of its shards."""
        return self._owner.waiting

    @property
    def view(self) -> View | None:
        """The view that it has; None before the first."""
        return self._views.view

    @property
    def machine(self) -> ServerMachine | None:
        """The machine of its shards; None before its job is known. Other threads may only look."""
        return None if self._reducer is None else self._reducer.machine

    def leave(self) -> None:
        """Move this server's shards to other servers, then end. For example when a spot machine gets its notice.

        Returns at once. Safe in a signal handler.
        """
        threading.Thread(target=self._leave, name="leave", daemon=True).start()

    def _leave(self) -> None:
        self._joined.wait()  # the notice may come before this server has joined
        while not self._views.over.is_set():
            self._link.send(Leaving())  # repeated, because a restarted coordinator does not know it
            self._views.over.wait(LEAVING_EVERY_S)

    def close(self) -> None:
        """End every connection and thread, and save the trace. May be called at any time after `start`."""
        self._views.end(None)
        self._gate.close()
        self._link.close()
        if self._peers is not None:
            self._peers.close()
        self._owner.stop()
        if self._link.welcome.folder:
            self._tracer.save(Path(self._link.welcome.folder))

    # ---- messages of the coordinator ----

    def _on_admitted(self, new: bool) -> None:
        self._gate.me = self._link.credentials.me
        self._owner.put(inbox.Admitted(new))

    def _on_message(self, message: Message) -> None:
        match message:
            case Prepare(record=record):
                self._prepare(record)
            case NewView(view=view):
                self._adopt(view)
            case Capture(snapshot=snapshot, version=version):
                self._owner.put(inbox.CaptureWanted(snapshot, version))
            case Finished():
                self._views.end(None)
            case Aborted(reason=reason) | Refused(reason=reason):
                self._views.end(reason)
            case _:
                raise ProtocolError(f"a server has no use for a {type(message).__name__} message")

    def _on_coordinator_lost(self, error: RallypointError) -> None:
        self._views.end(f"the coordinator is gone: {error}")

    def _prepare(self, record: JobRecord) -> None:
        if self._reducer is not None:
            return  # repeated when this server joins again
        torch.set_num_threads(self._link.welcome.threads)  # a norm is a sum, which torch cuts by them
        about, job = self._link.welcome, ServerJob(record, parse(record.config))
        writer = None
        if about.snapshots:
            writer = SnapshotWriter(about.snapshots, cast(Compression, about.compression), self.id, self._link.send)
        self._gate.backlog.allow(*job.most_waiting)
        self._intake = Intake(job, self._views, self._owner.put, self._tracer, about.trace)
        self._peers = Peers(
            PeerLinks(self.id, decides=job.config.decides), self._views, self._owner.put,
            transport=self._transport, credentials=self._link.credentials, tracer=self._tracer, failed=self.failed,
        )  # fmt: skip
        self._reducer = Reducer(self.id, job, self, self._owner.put, self._tracer, writer, about.snapshots)
        self._owner.reducer = self._reducer

    def _adopt(self, view: View) -> None:
        if self._peers is None or not self._views.is_new(view):
            return
        self._owner.put(inbox.Viewed(view))
        self._views.adopt(view)  # frames that waited for this view now go into the inbox, behind it
        self._peers.adopt(view)

    # ---- called by the reducer (`decisions.Context`) ----

    def say(self, message: Message) -> None:
        """Send a message to the coordinator. Any thread may call it."""
        self._link.send(message)

    def not_finite(self, verdict: clip.Verdict, *, alone: bool) -> None:
        """Report a step that is skipped, or must stop the job.

        Every server reports a verdict that all share: any of them may die before it has. The coordinator says it once.
        """
        assert self._reducer is not None
        job = self._reducer.job
        parameter = "" if verdict.at is None else printable(job.record.layout.name_at(*verdict.at), LONGEST_NAME)
        losses, gradients = verdict.not_finite, verdict.gradients
        if verdict.stops:
            what = clip.phrase(losses, gradients, parameter)
            reason = (
                f"{job.round_named(verdict.step)}: {what}: nothing of it was applied there; lower the learning "
                "rate, clip, or set nonfinite to 'skip' or 'continue'"
            )
            self._link.send(GiveUp(reason, verdict.step, verdict.generation))  # it still has that version
        elif self._skipped.is_new((verdict.generation, verdict.step, losses, gradients)):
            scaled, scaling = job.plan.rule.scaled, job.config.loss_scale
            scale = scaling.after(verdict.loss_scale, 0, skipped=True)[0] if scaled else 0.0
            self._link.send(Skipped(verdict.step, losses, verdict.generation, gradients, parameter, alone, scale))

    def failed(self, error: BaseException) -> None:
        """The shards can no longer be trusted: end the job."""
        reason = f"server {self.id} failed: {type(error).__name__}: {error}"
        self._link.send(GiveUp(reason))
        self._views.end(reason)

    # ---- connections ----

    def _admit(self, hello: Hello) -> Welcome:
        if hello.role not in ("worker", "server", "aggregator"):
            raise AccessDenied(f"a {hello.role} has no business with a server")
        return Welcome()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        """Receive one connection's frames until it ends. Runs in that connection's own thread."""
        self._views.wait_for(hello.view)  # a peer may get the view before this server does
        if self._intake is None:
            raise LinkError("the job ended before it began")
        self._check_member(hello)
        if hello.role != "server":  # an aggregator looks like a worker
            self._owner.put(inbox.Linked(channel, hello.id))
        receive: Callable[[Channel, str], None]
        match hello.role:
            case "server":
                receive = self._intake.receive_from_server
            case "aggregator":
                receive = self._intake.receive_from_aggregator
            case _:
                receive = self._intake.receive_from_worker
        try:
            while not self._views.over.is_set():
                receive(channel, hello.id)
        finally:
            self._owner.put(inbox.Gone(channel, hello.id))
            if channel.fault is not None:
                self.failed(channel.fault)

    def _check_member(self, hello: Hello) -> None:
        """ProtocolError if the peer has the token but is not in the current view."""
        view = self._views.view
        if view is None:
            return
        members = {"server": view.servers, "aggregator": view.aggregators}.get(hello.role, view.workers)
        if (hello.id, hello.incarnation) not in {(member.id, member.incarnation) for member in members}:
            raise ProtocolError(f"{hello.role} {hello.id} is not in view {view.number}")


def run_servers(services: Sequence[ServerService]) -> str | None:
    """Start these servers, wait until their job is over, close them. Returns None, or why the job failed."""
    with ExitStack() as started:
        for service in services:
            service.start()
            started.callback(service.close)
        import_for_optimizers()
        failures = [service.wait() for service in services]
    return next((failure for failure in failures if failure is not None), None)
