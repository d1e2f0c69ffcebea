"""The life of a server: it joins the coordinator, serves workers and other servers, and ends with the job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

import torch

from rallypoint.core.protocol import Capture, GiveUp, Hello, Leaving, Message, Refused, Skipped, expect
from rallypoint.core.shard import clip
from rallypoint.core.shard.events import Acked
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.typed import LONGEST_NAME, printable
from rallypoint.core.view import Member
from rallypoint.errors import AccessDenied, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.dialer import Calls, Dialer, dialer_over
from rallypoint.net.frames import Kind
from rallypoint.observe.lines import Once
from rallypoint.observe.usage import usable_cores
from rallypoint.optim import import_for_optimizers
from rallypoint.server import inbox
from rallypoint.server.intake import Intake
from rallypoint.server.job import ServerJob
from rallypoint.server.member import ListeningMember, Receive, ServerLinks
from rallypoint.server.reducer import Reducer
from rallypoint.store.manifest import Compression
from rallypoint.store.writer import SnapshotWriter

# ---- The links from this server to the other servers of its view ----


class Peers(ServerLinks):
    """This server's: each link's thread receives acknowledgements."""

    def _opened(self, member: Member) -> Dialer:
        standing: list[Channel] = []

        def up(channel: Channel) -> None:
            standing[:] = [channel]
            self._put(inbox.PeerLinked(member, channel))

        def down(_: RallypointError) -> None:
            self._put(inbox.PeerLost(member.id, standing[0]))
            if standing[0].fault is not None:
                self._failed(standing[0].fault)

        calls = Calls(
            lambda: self._views.number, up, lambda channel: self._receive_acks(member.id, channel), down, self._failed
        )
        return dialer_over(
            self._transport, peer=member, credentials=self._credentials, calls=calls, tracer=self._tracer
        )

    def _receive_acks(self, peer: str, channel: Channel) -> None:
        while True:
            header = channel.receive_header()
            if header.kind is Kind.REFUSE:
                raise AccessDenied(expect(channel.receive_bytes(header), Refused).reason)
            if header.kind is not Kind.ACK:
                raise ProtocolError(f"a {header.kind.name} frame from server {peer}")
            digest = bytes(channel.receive_bytes(header))
            acked = Acked(header.step, chosen=header.base == 1)
            self._put(inbox.AckCame(peer, channel, header.shard, acked, header.view, digest))


# ---- The life of a server: it joins the coordinator, serves workers and other servers, and ends with the job ----

LEAVING_EVERY_S = 1.0


class ServerService(ListeningMember):
    """One reduction server of one job, from joining to the end."""

    role, waits_for = "server", "its part of the parameters"
    serves = ("worker", "server", "aggregator")
    _intake_of: type[Intake] = Intake
    _writer_of = SnapshotWriter

    _reducer: Reducer | None = None  # the job's, once it is known

    @property
    def waiting(self) -> int:
        return self._owner.waiting

    @property
    def machine(self) -> ServerMachine | None:
        """The machine of its shards; None before its job is known. Other threads may only look."""
        return None if self._reducer is None else self._reducer.machine

    @property
    def busy_s(self) -> float:
        """For how many seconds the owner has handled one event, or another thread has made one update."""
        return max(super().busy_s, 0.0 if self._reducer is None else self._reducer.updating_s)

    def _leave(self) -> None:
        """Move this server's shards to other servers, then end. For example when a spot machine gets its notice."""
        self._joined.wait()  # the notice may come before this server has joined
        while not self._views.over.is_set():
            self._link.send(Leaving())  # repeated, because a restarted coordinator does not know it
            self._views.over.wait(LEAVING_EVERY_S)

    # ---- messages of the coordinator ----

    def _on_admitted(self, new: bool) -> None:
        super()._on_admitted(new)
        self._owner.put(inbox.AdmissionCame(new))

    def _on_other(self, message: Message) -> None:
        if isinstance(message, Capture):
            self._owner.put(message)
        else:
            super()._on_other(message)

    def _begin(self, job: ServerJob) -> Peers:
        about = self._link.welcome
        torch.set_num_threads(about.threads)  # a norm is a sum, which torch cuts by them
        writer = None
        if about.snapshots:
            writer = self._writer_of(about.snapshots, cast(Compression, about.compression), self.id, self._link.send)
        self._skipped = Once()  # of one contribution, each of its shards says so
        self._intake = self._intake_of(job, self._views, self._owner.put, self._tracer, about.trace)
        threads = update_threads(about.servers if about.one_host else 1) if self._owner.alone else 0
        self._reducer = Reducer(self.id, job, self, self._owner.put, self._tracer, writer, about.snapshots, threads)
        self._owner.handler = self._reducer
        return Peers(
            self._views, self._owner.put, transport=self._transport, credentials=self._link.credentials,
            tracer=self._tracer, failed=self.failed, always=job.config.decides,  # servers exchange measures
        )  # fmt: skip

    # ---- called by the reducer (`ReducerContext`) ----

    def say(self, message: Message) -> None:
        """Send a message to the coordinator. Any thread may call it."""
        self._link.send(message)

    def not_finite(self, verdict: clip.StepVerdict, *, alone: bool) -> None:
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

    def _receiver(self, hello: Hello) -> Receive:
        """See `ListeningMember`. A peer that has the token may still be none of the current view's members."""
        if (view := self._views.view) is not None:
            members = {"server": view.servers, "aggregator": view.aggregators}.get(hello.role, view.workers)
            if (hello.id, hello.incarnation) not in {(member.id, member.incarnation) for member in members}:
                raise ProtocolError(f"{hello.role} {hello.id} is not in view {view.number}")
        match hello.role:
            case "server":
                return self._intake.receive_from_server
            case "aggregator":
                return self._intake.receive_from_aggregator
            case _:
                return self._intake.receive_from_worker


def update_threads(servers: int) -> int:
    """How many threads of a server make updates where so many share the cores: one a core, 4 at most; 0 on one core."""
    return min(max(count // servers, 1), 4) if (count := usable_cores()) > 1 else 0


def run_servers(services: Sequence[ServerService]) -> str | None:
    """Start these servers, wait until their job is over, close them. Returns None, or why the job failed."""
    with ExitStack() as started:
        for service in services:
            service.start()
            started.callback(service.close)
        import_for_optimizers()
        failures = [service.wait() for service in services]
    return next((failure for failure in failures if failure is not None), None)
