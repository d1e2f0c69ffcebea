"""The coordinator's connections and the one thread that owns its machine."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rallypoint.config import JobConfig, parse
from rallypoint.coordinator.checks import checked
from rallypoint.coordinator.events import EventLog
from rallypoint.coordinator.journal import Journal
from rallypoint.coordinator.progress import Lateness, StepTally
from rallypoint.coordinator.snapshots import SnapshotKeeper
from rallypoint.core.cluster import effects as cluster_effects
from rallypoint.core.cluster import events as cluster_events
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.policy import Sync
from rallypoint.core.view import Member, View
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Kind
from rallypoint.net.gate import Gate
from rallypoint.net.messages import (
    Aborted,
    Accounted,
    Admitted,
    Applied,
    Assist,
    Beat,
    Capture,
    CaughtUp,
    Done,
    Finished,
    GiveUp,
    Hello,
    Leaving,
    Members,
    Message,
    Metrics,
    NewView,
    NotStored,
    Planned,
    Prepare,
    Propose,
    Report,
    Resize,
    Say,
    Skipped,
    Snapshotted,
    Stored,
    Waiting,
    Welcome,
    decode,
)
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.observed import observed
from rallypoint.store.retention import Retention

SILENCE_S = 5.0  # without news for so long, say what the job waits for
_FAREWELL_S = 2.0
_TICKS = 8  # in the time after which a silent member is given up
_LATE_TICK = 2  # so many times later than it should be, a tick comes after a pause of ours


class JoinInfo(msgspec.Struct, frozen=True):
    """What every member is told when it joins, and where the job's traces and snapshots go."""

    overrides: dict[str, Any] = {}
    folder: str = ""
    trace: tuple[int, int] = (0, 0)
    snapshots: str = ""
    compression: str = "none"
    retention: Retention = Retention()


class CoordinatorService:
    """The coordinator of one job.

    `start` returns once it listens (`address`); `wait` blocks until the job is over: None, or why it failed. With a
    folder it keeps a journal there, and goes on where the coordinator before it ended.
    """

    def __init__(
        self, *, terms: Terms, token: str = "", bind: str = "127.0.0.1:0", join_info: JoinInfo | None = None,
        transport: Transport | None = None, resume: tuple[JobRecord, str, int] | None = None,
    ) -> None:  # fmt: skip
        self._terms, self._token, self._bind, self._resume = terms, token, bind, resume
        self._join_info = join_info or JoinInfo()
        self._transport: Transport = transport or TcpTransport()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._members: dict[str, Channel] = {}
        self._observers: list[Channel] = []
        self._tally: StepTally | None = None
        self._config = JobConfig()
        self._late = Lateness()
        self._planned: Planned | None = None
        self._metrics: dict[str, float] = {}
        self._announced: Members | None = None
        self._last_news = self._last_said = self._ticked = self._awake = time.monotonic()
        self._last_word: Finished | Aborted | None = None
        self._end_at = 0.0
        self._over = threading.Event()
        self._failure: str | None = None

    def start(self) -> None:
        """Begin to listen. AddressInUse when somebody does there already; DataError for an unreadable journal."""
        self._journal = Journal(self._join_info.folder)
        machine = ClusterMachine(self._terms, recovered=self._journal.load(), resume=self._resume)
        self._machine = observed(machine, "coordinator")
        self._written = 0
        self._log = EventLog(self._join_info.folder)
        self._keeper: SnapshotKeeper | None = None
        self._capture: Capture | None = None  # the last snapshot that was asked for
        if self._terms.snapshots:
            self._keeper = SnapshotKeeper(
                self._join_info.snapshots, self._join_info.compression, self._join_info.retention, self._say_later
            )
        self._write_state()
        if self._machine.last_word is not None:  # whoever was here before us may not have told everybody
            self._last_word = _message(self._machine.last_word)
            self._end_at = time.monotonic() + self._terms.heartbeat
        if self._machine.record is not None and self._machine.view is not None:
            self._plan(self._machine.record, self._machine.view)
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
        self._inbox.put(lambda: self._run_effects([cluster_effects.Abort(reason)]))

    def close(self) -> None:
        """End every connection and thread; members are given a moment to receive the last word."""
        deadline = time.monotonic() + _FAREWELL_S  # for all of them together: many may have been paused
        for channel in (*self._members.values(), *self._observers):
            channel.flush(max(0.0, deadline - time.monotonic()))
        self._gate.close()
        self._stop_owner()

    def _stop_owner(self) -> None:
        self._inbox.put(None)
        self._thread.join()
        if self._keeper is not None:
            self._keeper.close()
        self._log.close()
        self._journal.close()

    # ---- connections ----

    def _admit(self, hello: Hello) -> Welcome:
        if hello.role not in ("worker", "server", "observer"):
            raise AccessDenied(f"there is no role {hello.role}")
        if hello.id in self._members and not hello.incarnation:
            raise AccessDenied(f"the id {hello.id} is taken: give every member one of its own")
        about = self._join_info
        return Welcome(
            about.overrides, about.folder, about.trace, about.snapshots if self._terms.snapshots else "",
            about.compression, self._terms.heartbeat,
        )  # fmt: skip

    def _serve(self, channel: Channel, hello: Hello) -> None:
        self._inbox.put(lambda: self._joined(channel, hello))
        reason = "it closed its connection"
        try:
            while True:
                header = channel.receive_header()
                if header.kind is not Kind.CONTROL:
                    raise ProtocolError(f"a {header.kind.name} frame from {hello.role} {hello.id}")
                message = checked(decode(channel.receive_bytes(header)), hello)
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
        due = time.monotonic()
        while True:
            call: Callable[[], None] | None = self._tick
            with contextlib.suppress(queue.Empty):
                call = self._inbox.get(timeout=max(0.0, due - time.monotonic()))
            if call is None:
                return
            if call == self._tick:
                due = time.monotonic() + self._terms.heartbeat / _TICKS
            try:
                call()
            except Exception as error:  # whatever it was, nobody would be told of anything any more
                known = isinstance(error, RallypointError)
                self._end(f"the coordinator failed: {error if known else f'{type(error).__name__}: {error}'}")

    def _tick(self) -> None:
        if self._last_word is not None:
            if time.monotonic() >= self._end_at:
                self._over.set()
            return
        self._handle(cluster_events.Tick(self._time_awake()))
        self._say_what_we_wait_for()

    def _time_awake(self) -> float:
        """The time without our own pauses (stopped, or a disk that hung): who was not heard then was not silent."""
        now = time.monotonic()
        self._awake += min(now - self._ticked, _LATE_TICK * self._terms.heartbeat / _TICKS)
        self._ticked = now
        return self._awake

    def _joined(self, channel: Channel, hello: Hello) -> None:
        if self._last_word is not None:
            channel.send_message(self._last_word)
            self._observers.append(channel)  # to be flushed before the end
            return
        if hello.role == "observer":
            self._observers.append(channel)
            if self._planned is not None:
                channel.send_message(self._planned)
            return
        if (old := self._members.get(hello.id)) is not None:
            if not hello.incarnation:
                channel.refuse(f"the id {hello.id} is taken: give every member one of its own")
                return
            old.connection.close()  # the same process came again before we noticed that it had gone
        self._members[hello.id] = channel
        self._handle(cluster_events.Joined(Member(hello.id, hello.host, hello.address, hello.incarnation), hello.role))

    def _left(self, channel: Channel, hello: Hello, reason: str) -> None:
        if channel in self._observers:
            self._observers.remove(channel)
        if self._members.get(hello.id) is channel:
            del self._members[hello.id]
            self._handle(cluster_events.Left(hello.id, reason))

    def _received(self, channel: Channel, hello: Hello, message: Message) -> None:
        if hello.role == "observer":
            if isinstance(message, Resize):
                self._handle(cluster_events.Resized(message.workers))
            else:
                self._handle(cluster_events.SnapshotWanted())
            return
        if self._members.get(hello.id) is not channel:
            return  # it was refused: what it says does not count
        self._handle(cluster_events.Heard(hello.id))
        match message:
            case Beat():
                pass
            case Report():
                done = (hello.id, message.step, message.replica, message.seconds, message.generation)
                self._handle(cluster_events.Progress(*done, now=self._time_awake()))
                self._report(message)
            case Applied(late=late):
                self._late.add(late)
                self._log.write(message)
            case Metrics(values=values):
                self._metrics = dict(values)
                self._announce(message)
            case Say() | Skipped() | Accounted():
                self._announce(message)
            case _:
                self._handle_message(hello, message)

    def _handle_message(self, hello: Hello, message: Message) -> None:
        match message:
            case Propose(record=record):
                self._handle(cluster_events.Proposed(hello.id, record))
            case CaughtUp(backups=backups):
                self._handle(cluster_events.CaughtUp(hello.id, backups))
            case Leaving():
                self._handle(cluster_events.Leaving(hello.id))
            case Stored(snapshot=snapshot, shards=shards):
                if self._keeper is not None:
                    self._keeper.stored(message)
                self._handle(cluster_events.Captured(hello.id, snapshot, tuple(shards)))
            case NotStored(snapshot=snapshot, reason=reason, passed=passed):
                self._handle(cluster_events.SnapshotLost(snapshot, f"{hello.id}: {reason}", passed))
            case Done(generation=generation):
                self._handle(cluster_events.Done(hello.id, generation))
            case GiveUp(reason=reason):
                self._handle(cluster_events.Failed(hello.id, reason))
            case _:
                raise AssertionError(f"a message that nobody takes: {message}")

    def _report(self, report: Report) -> None:
        if self._tally is not None and (done := self._tally.add(report)) is not None:
            self._announce(msgspec.structs.replace(done, step=self._config.steps_at(done.step + 1) - 1))

    def _handle(self, event: cluster_events.Event) -> None:
        effects = self._machine.handle(event)
        self._write_state()
        self._run_effects(effects)
        if isinstance(event, cluster_events.CaughtUp) and self._machine.view is not None:
            self._announce_members(self._machine.view)

    def _write_state(self) -> None:
        """Before anybody hears of it: the next coordinator must know at least as much as the members."""
        if self._machine.revision != self._written:
            self._written = self._machine.revision
            self._journal.save(self._machine.state())

    # ---- effects ----

    def _run_effects(self, effects: Sequence[cluster_effects.Effect]) -> None:
        for effect in effects:
            match effect:
                case cluster_effects.Refuse(member=member, reason=reason):
                    if (channel := self._members.pop(member, None)) is not None:
                        channel.refuse(reason)
                case cluster_effects.Admit(member=member, incarnation=incarnation):
                    self._send(member, Admitted(incarnation))
                case cluster_effects.Prepare(server=server, record=record):
                    self._send(server, Prepare(record))
                case cluster_effects.Publish(view=view, members=members):
                    self._publish(view, members)
                    self._tell_workers_to_capture()  # there may be new ones
                case cluster_effects.Assist(worker=worker, step=step, replica=replica):
                    self._send(worker, Assist(step, replica))
                case cluster_effects.Finish(lead=lead):
                    self._end(None, lead)
                case cluster_effects.Abort(reason=reason):
                    self._end(reason)
                case cluster_effects.Say(text=text):
                    self._announce(Say(text))
                case _:
                    self._run_snapshot_effect(effect)

    def _publish(self, view: View, members: Sequence[str]) -> None:
        assert self._machine.record is not None
        if self._planned is None:
            self._plan(self._machine.record, view)
        if self._tally is not None and not self._tally.counts(view.generation):
            if self._machine.handed_over:
                self._tally.hand_over(view.generation)
            else:
                self._tally.rewind(self._machine.furthest, view.generation)
        for member in members:
            self._send(member, NewView(view))
        self._announce_members(view)

    def _announce_members(self, view: View) -> None:
        busy = {worker for assignment in view.assignments for worker, own in assignment.replicas.items() if own}
        workers = [member.id for member in view.workers]
        now = Members(
            str(view.number), tuple(w for w in workers if w in busy), tuple(w for w in workers if w not in busy),
            tuple(member.id for member in view.servers), self._machine.exposed,
        )  # fmt: skip
        if now != self._announced:
            self._announced = now
            self._announce(now)

    def _tell_workers_to_capture(self) -> None:
        """Where workers own something that belongs to a snapshot: what their codecs remember."""
        record, view = self._machine.record, self._machine.view
        if self._capture is None or self._capture.version == 0 or view is None or record is None:
            return
        if record.sticky and not record.stateful_workers:  # (those have been told, if they are to write any)
            for worker in view.workers:
                self._send(worker.id, self._capture)

    def _run_snapshot_effect(self, effect: cluster_effects.Effect) -> None:
        keeper = self._keeper
        match effect:
            case cluster_effects.Capture(snapshot=snapshot, version=version, writers=writers) if keeper is not None:
                keeper.begin(snapshot)
                self._capture = Capture(snapshot, version, writers)
                for writer in writers:
                    self._send(writer, self._capture)
                self._tell_workers_to_capture()
            case cluster_effects.Commit(snapshot=snapshot, version=version) if keeper is not None:
                assert self._machine.record is not None
                keeper.commit(
                    snapshot, version, self._machine.record, dict(self._metrics),
                    origin=self._machine.view.origin if self._machine.view is not None else "",
                    done=lambda nbytes, seconds: self._inbox.put(
                        lambda: self._committed(Snapshotted(snapshot, version, nbytes, seconds))
                    ),
                    failed=lambda why: self._inbox.put(
                        lambda: self._handle(cluster_events.SnapshotLost(snapshot, why))
                    ),
                )  # fmt: skip
            case cluster_effects.FindSnapshot() if keeper is not None:
                keeper.find(
                    found=lambda id, version: self._inbox.put(lambda: self._handle(cluster_events.Found(id, version))),
                    failed=lambda why: self._inbox.put(lambda: self._run_effects([cluster_effects.Abort(why)])),
                )
            case cluster_effects.FindSnapshot():
                self._inbox.put(lambda: self._handle(cluster_events.Found("")))
            case _:
                raise AssertionError(f"an effect that nobody runs: {effect}")

    def _committed(self, snapshot: Snapshotted) -> None:
        self._announce(snapshot)
        self._handle(cluster_events.Committed(snapshot.snapshot))

    def _send(self, member: str, message: Message) -> None:
        if (channel := self._members.get(member)) is not None:
            channel.send_message(message)

    def _plan(self, record: JobRecord, view: View) -> None:
        config, layout = parse(record.config), record.layout
        self._config = config
        quorum = config.policy.quorum if isinstance(config.policy, Sync) else None
        self._tally = StepTally(config.replicas, quorum)
        self._tally.rewind(self._machine.furthest, view.generation)
        self._planned = Planned(
            steps=config.steps, replicas=config.replicas, item=config.item,
            words=layout.words + sum(table.numel for table in layout.tables),
            shards=len(layout.shards), workers=tuple(m.id for m in view.workers),
            servers=tuple(m.id for m in view.servers), steps_per_round=config.steps_per_round,
        )  # fmt: skip
        self._announce(self._planned)

    def _end(self, failure: str | None, lead: str = "") -> None:
        if self._last_word is not None:
            return
        self._failure = failure
        self._last_word = _message(cluster_effects.Finish(lead) if failure is None else cluster_effects.Abort(failure))
        try:
            for channel in self._members.values():
                channel.send_message(self._last_word)
            self._announce(self._last_word)
        finally:
            self._over.set()

    # ---- words ----

    def _say_later(self, text: str) -> None:
        self._inbox.put(lambda: self._announce(Say(text)))

    def _announce(self, message: Message) -> None:
        self._last_said = time.monotonic()
        if not isinstance(message, Say):  # a member that says what it waits for is no end of the waiting
            self._last_news = self._last_said
        self._log.write(message)
        for channel in self._observers:
            channel.send_message(message)

    def _say_what_we_wait_for(self) -> None:
        now = time.monotonic()
        if self._over.is_set() or now - self._last_said < SILENCE_S:
            return
        self._last_said = now
        what = self._machine.waiting_for() or self._who_is_late()
        waiting = Waiting(f"waiting for {what}, {now - self._last_news:.0f} s so far")
        self._log.write(waiting)
        for channel in self._observers:
            channel.send_message(waiting)

    def _who_is_late(self) -> str:
        view = self._machine.view
        if self._tally is None or view is None:
            return "its members to come back"
        if not view.assignments:
            return "the first weights to be stored"
        step, replicas = self._tally.missing()
        late = [worker for worker, own in view.assigned(step).items() if set(own) & set(replicas)]
        hosts = {member.id: member.host for member in view.workers}
        who = ", ".join(
            f"{worker} on {hosts.get(worker, '?')}{f' ({self._late.of(worker)})' if self._late.of(worker) else ''}"
            for worker in late
        )
        steps = self._config.steps_of(step)
        what = f"step {step}" if len(steps) < 2 else f"round {step} (steps {steps[0]} to {steps[-1]})"
        return f"{what}: replica {', '.join(map(str, replicas))} on {who or 'nobody yet'} has not reported"


def _message(last_word: cluster_effects.Finish | cluster_effects.Abort) -> Finished | Aborted:
    return Finished(last_word.lead) if isinstance(last_word, cluster_effects.Finish) else Aborted(last_word.reason)
