"""The coordinator without I/O: connections and messages in, acts out. The service and the simulation use it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from rallypoint.coordinator import acts, inbox
from rallypoint.coordinator.acts import Act, AppendLog, SendMessage, failure_of
from rallypoint.coordinator.announcer import Announcer, Told
from rallypoint.coordinator.claims import Agreement, Claims, Early, event_of, own_part
from rallypoint.coordinator.inbox import AwakeTime, Connection
from rallypoint.coordinator.joining import Newcomers, TakeOver, Tickets, has_begun, late_view, needed, taken
from rallypoint.coordinator.operator import Orders, Sizes
from rallypoint.coordinator.progress import EVALUATED, EvaluationMetrics, agree
from rallypoint.core import protocol
from rallypoint.core.cluster import effects as cluster_effects
from rallypoint.core.cluster import events as cluster_events
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Origin, Resumed
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Aborted, AnyOrder, Capture, Finished, Hello, Message, Metrics, Resize, Say
from rallypoint.core.view import Member, View
from rallypoint.observe.lines import Once

# So many seconds, and at least half a heartbeat, a new coordinator waits for members to come back before it decides
# anything. Usually they do within a tenth of a second.
_RETURN_S, _RETURN = 3.0, 0.5


class CoordinatorShell:
    """Knows who is connected, and decides which messages go to whom, and in which order.

    `handle` takes one event of `coordinator.inbox` at the time `now` (seconds of a clock that never goes back) and
    returns the acts to do, in order. Only one thread may call it. A `Save` comes before the messages that depend on it:
    the next coordinator must know at least as much as the members (I7). `secret` is the job's: see `Journal.secret`.

    Attributes:
        machine: decides about views, snapshots and the end of the job.
        members: id -> connection of each worker and server that is connected.
        last_word: how the job ended; None while it goes on.
        announcer: makes the messages for observers and the event log.
        evaluations: the metrics of evaluations.
    """

    def __init__(
        self, terms: Terms, now: float, *, recovered: ClusterState | None = None,
        resume: Resumed | None = None, secret: bytes = b"",
    ) -> None:  # fmt: skip
        self.machine = ClusterMachine(terms, recovered, resume)
        self._tickets = Tickets(secret)
        self.members: dict[str, Connection] = {}
        self.last_word: Finished | Aborted | None = None
        self.announcer = Announcer(self.machine, now, self.members)
        self.evaluations, self._early, self._shown = EvaluationMetrics(), Early[Metrics](EVALUATED), Once(EVALUATED)
        for version, figures in self.machine.course.evaluations.results.items():
            self.evaluations.add(self.announcer.config.steps_at(version), figures or {})
        self._agreement, self._claims, self._newcomers = Agreement(), Claims(), Newcomers.of(terms, now)
        self._sizes, self._orders = Sizes(now), Orders(now)
        self._terms, self._now, self._awake = terms, now, AwakeTime(now, now, terms.heartbeat)
        self._written, self._end_at = 0, 0.0
        self._said = Once()
        self._capture: Capture | None = None  # the last snapshot that was asked for
        self._take_over: TakeOver | None = None
        self._kept = resume is None and recovered is not None and has_begun(recovered)
        if recovered is not None and resume is None and needed(recovered):
            self._take_over = TakeOver(recovered, max(_RETURN_S, terms.heartbeat * _RETURN))

    def start(self) -> list[Act]:
        """The acts to do before the first event."""
        todo = self._save()
        if self.machine.last_word is not None:  # the earlier coordinator may not have told all members
            self.last_word = self.machine.last_word
            self._end_at = self._now + self._terms.heartbeat
        if self.machine.record is not None and self.machine.view is not None:
            todo += self.announcer.plan(self.machine.record, self.machine.view, self._now, taking_over=True)
        return [*todo, *self.evaluations.judged(self.machine.course)]

    def handle(self, event: inbox.Event, now: float) -> list[Act]:
        """Take one event at time `now`; return the acts, to be done in order."""
        self._now = now
        if isinstance(event, inbox.Received) and isinstance(event.message, protocol.Knows):
            event = replace(event, message=self._tickets.proven(event.message))
        if self._take_over is None:
            return self._handle(event)
        kept_back = self._take_over.keeps(event)
        todo = self._taken_over(self._take_over) if self._take_over.is_over(now) else []
        return todo if kept_back or isinstance(event, inbox.Ticked) else [*todo, *self._handle(event)]

    def _taken_over(self, take_over: TakeOver) -> list[Act]:
        """Go on from what members know, with the events that waited for it."""
        self._take_over = None
        state = take_over.state()
        start = self._awake.seconds  # who does not come back has been silent since then
        todo = self._drive(cluster_events.TookOver(state, take_over.is_complete))
        for when in (start, self._awake.at(self._now)):
            todo += self._drive(cluster_events.Tick(when, self._newcomers.names))
        for event in take_over.waiting:
            todo += self._handle(event)
        return todo

    def _handle(self, event: inbox.Event) -> list[Act]:
        match event:
            case inbox.Ticked():
                return self._tick()
            case inbox.Opened():
                return self._opened(event)
            case inbox.Received(connection=connection, hello=hello, message=message):
                return self._received(connection, hello, message)
            case inbox.Closed():
                return self._closed(event)
            case protocol.Snapshotted():
                return [*self._announce(event), *self._drive(event)]
            case protocol.NotStored() | Origin():
                return self._drive(event)
            case Aborted():
                return self._end(event)
            case Say():
                return self._announce(event)

    # ---- connections ----

    def _opened(self, opened: inbox.Opened) -> list[Act]:
        connection, hello = opened.connection, opened.hello
        if self.last_word is not None or hello.role == "observer":
            return self.announcer.observe(connection, hello, self.last_word)
        if self.refuses(hello):
            return [acts.RefuseConnection(connection, taken(hello.id))]
        if (told := self._newcomers.keeps(opened, self.machine.course.members, self._now)) is not None:
            return self._announce(Say(told)) if told else []
        old = self.members.get(hello.id)  # the same process connected again before its old connection ended
        todo: list[Act] = [] if old is None else [acts.Close(old)]
        self.members[hello.id] = connection
        self._tickets.connected_anew(hello.id)
        member = Member(hello.id, hello.host, hello.address, hello.incarnation, hello.near, link_mbit=hello.link_mbit)
        return [*todo, *self._drive(cluster_events.Joined(member, hello.role, hello.process))]

    def refuses(self, hello: Hello) -> bool:
        """True if another process has this id. Any thread may ask; it changes nothing."""
        members = self.machine.course.members
        other_role = hello.id in members and not members.is_taken(hello.id, hello.role)
        if other_role or self._newcomers.waits_for(hello.id):
            return members.same(hello.id, hello.role, hello.incarnation, hello.process) is None
        return hello.id in self.members and not members.same(hello.id, hello.role, hello.incarnation, hello.process)

    def _closed(self, closed: inbox.Closed) -> list[Act]:
        id = closed.hello.id
        self._newcomers.closed(closed)
        if closed.connection in self.announcer.observers:
            self.announcer.observers.remove(closed.connection)
        if self.members.get(id) != closed.connection:
            return []
        del self.members[id]
        if closed.how is inbox.End.CLOSED:
            return self._drive(cluster_events.Left(id, closed.reason))
        return self._drive(cluster_events.Unlinked(id, closed.reason, closed.how is inbox.End.RESET))

    # ---- messages ----

    def _received(self, connection: Connection, hello: Hello, message: Message) -> list[Act]:
        if hello.role == "observer":
            if self.last_word is not None:
                return self._announce(protocol.Ordered(type(message).__name__, "the job is over", refused=True))
            if isinstance(message, Resize):
                return self._resized(self._sizes.take(message, self._now))
            if isinstance(message, AnyOrder):
                answer = self._orders.answer(message, self.machine.course, self._now)
                todo = [act for event in answer.events for act in self._drive(event)]
                todo += self._send(message, *answer.workers)
                return todo + [act for one in answer.news for act in self._announce(one)]
            return self._drive(message) if isinstance(message, protocol.Release | protocol.SnapshotWanted) else []
        if self.members.get(hello.id) != connection:
            return []  # this member was refused: ignore its messages
        if isinstance(message, protocol.Beat):
            return self._drive(cluster_events.From(hello.id, message))
        todo = self._drive(cluster_events.Heard(hello.id))
        if isinstance(message, protocol.Propose):
            self.announcer.comparable.propose(hello.id, message)
        match message:
            case protocol.Knows(view=view):
                return [*todo, *self._knows(hello, view)]
            case _ if not self._claims.may_say(hello.id, message, self.machine.course):
                return todo
            case protocol.Report():
                done = (hello.id, message.step, message.replica, message.seconds, message.generation)
                todo += self._drive(cluster_events.Computed(*done, now=self._awake.at(self._now)))
                todo += self.announcer.report(message, self._now)
                current = self.machine.course.is_current(message.generation)
                own = self.machine.course.strategies.pinned
                if current and (why := self._agreement.difference(hello.id, message, own_loop=own)) is not None:
                    todo += self._end(Aborted(why))
                return todo
            case protocol.Evaluated(version=version, generation=generation, values=values):
                known = self.machine.course.evaluations.results.get(version)
                if values and (known is None or agree(known, values)):  # the first figures count (I2)
                    step = self.announcer.config.steps_at(version)
                    self._early.keep(step, Metrics(step, values, generation), EVALUATED)
                return [*todo, *self._count_early(), *self._drive(event_of(hello.id, message))]
            case protocol.Applied():
                todo += self._drive(cluster_events.From(hello.id, message))
                return [*todo, *self.announcer.applied(message)]
            case _ if isinstance(message, Told):
                return [*todo, *self.announcer.told_by(hello.id, message, self._now)]
            case protocol.Stored():
                part = own_part(message, self.machine.shards_to_store(hello.id, message.snapshot))
                add = acts.AddPart(part, f"{hello.id} on {hello.host}")
                return [*todo, add, *self._drive(event_of(hello.id, part))]
            case _:
                logged = [AppendLog(message)] if isinstance(message, protocol.AuditFound) else []
                return [*todo, *logged, *self._drive(event_of(hello.id, message))]

    def _resized(self, size: Resize | None) -> list[Act]:
        resized = self._drive(size) if size is not None and size.workers > 0 else []
        return [] if size is None else [*resized, *self._announce(size)]  # the launcher acts on it: save it first (I7)

    def _knows(self, hello: Hello, view: View | None) -> list[Act]:
        """A member has come back, too late for the take-over."""
        late = late_view(hello, view, self.machine.course)
        if isinstance(late, cluster_events.Outrun):
            return self._drive(late)
        return [] if late is None or not self._said.is_new("another coordinator") else self._announce(late)

    def _count_early(self) -> list[Act]:
        """Count the reports and the metrics of versions that are known to be reached by now."""
        early = self._early.due(self.announcer.config.steps_at(self.machine.course.known + 1))
        return self.announcer.count_early(self._now) + [act for one in early for act in self._evaluated(one)]

    def _evaluated(self, message: Metrics) -> list[Act]:
        """Add metrics to the version that they are of, unless their generation is stale or they are a repeat.

        What an earlier coordinator has journalled, and perhaps not shown, is shown when its worker repeats it; readers
        of the log know repeats (`watch.state`).
        """
        tally = self.announcer.tally
        if tally is None or not tally.counts(message.generation):
            return []
        if not self._shown.is_new((message.step, message.generation, str(message.values))):
            return []
        figures = self.evaluations.add(message.step, message.values)
        return [*self._announce(message), acts.AddFigures(message.step, figures)]

    # ---- the machine ----

    def _drive(self, event: cluster_events.Event) -> list[Act]:
        effects = self.machine.handle(event)
        todo = [*self._save(), *self._count_early()]
        todo += [act for effect in effects for act in self._acts_of(effect)]
        caught_up = isinstance(event, cluster_events.From) and isinstance(event.message, protocol.CaughtUp)
        if caught_up and self.machine.view is not None:
            todo += self.announcer.members(self.machine.view, self._now)
        for newcomer in self._newcomers.due(self.machine.course.members):
            todo += self._opened(newcomer)
        return todo

    def _save(self) -> list[Act]:
        if self.machine.revision == self._written:
            return []
        self._written = self.machine.revision
        state = self.machine.state()
        first, self._kept = not self._kept, has_begun(state)
        return [acts.Save(state, needed=first and state.last_word is None)]

    def _acts_of(self, effect: cluster_effects.Effect) -> list[Act]:
        match effect:
            case cluster_effects.Refuse(member=member, reason=reason, final=final):
                connection = self.members.pop(member, None)
                return [] if connection is None else [acts.RefuseConnection(connection, reason, final)]
            case cluster_effects.SendTo(member=member, message=message):
                return self._send(message, member)
            case cluster_effects.Admit(member=member, incarnation=incarnation):
                admitted = self._tickets.admitted(member, incarnation, self.machine.course.members.role_of(member))
                return [*self._send(admitted, member), *self.announcer.ended_scripts(member)]
            case cluster_effects.PublishView(view=view, members=members):
                return self._publish(view, members)
            case Say() | protocol.Held() | protocol.SnapshotEvery():
                return self._announce(effect)
            case cluster_effects.Note(text=text):
                return [AppendLog(Say(text))]
            case Finished() | Aborted():
                return self._end(effect)
            case Capture(writers=writers):
                self._capture = effect
                self._claims.asked(effect)
                return [effect, *self._send(effect, *writers), *self._ask_workers_for_codec_states()]
            case cluster_effects.Commit(snapshot=snapshot, version=version):
                self._capture = None
                return [self._commit(snapshot, version)]
            case cluster_effects.FindSnapshot():
                return [effect]

    def _publish(self, view: View, members: Sequence[str]) -> list[Act]:
        assert self.machine.record is not None
        todo = self.announcer.plan(self.machine.record, view, self._now)
        self._claims.published(view)
        tally = self.announcer.tally
        if tally is not None and not tally.counts(view.generation):
            if self.machine.handed_over:
                tally.hand_over(view.generation)
            else:
                tally.rewind(self.machine.course.furthest, view.generation)
                self.evaluations.rewind(self.announcer.config.steps_at(self.machine.course.furthest + 1))
        news = self._tickets.news(view, [one for one in members if one in self.members])
        todo += [act for member, message in news for act in self._send(message, member)]
        return [*todo, *self.announcer.members(view, self._now), *self._ask_workers_for_codec_states()]  # the new ones

    def _ask_workers_for_codec_states(self) -> list[Act]:
        """Ask all workers for the codec states of the snapshot in progress; not under AllReduce."""
        view = self.machine.view
        if self._capture is None or self._capture.version == 0 or view is None:
            return []
        if not self.machine.course.strategies.workers_have_codec_states:
            return []
        return self._send(self._capture, *(worker.id for worker in view.workers))

    def _commit(self, snapshot: str, version: int) -> acts.CommitSnapshot:
        assert self.machine.record is not None
        step, course = self.announcer.config.steps_at(version), self.machine.course
        about = self.machine.record, self.evaluations.of(step), "" if course.view is None else course.view.origin
        known = (course.views.orders.stop, course.evaluations.told_by(version), course.kept)
        return acts.CommitSnapshot(snapshot, version, step, *about, *known)

    # ---- time and the end ----

    def _tick(self) -> list[Act]:
        if self.last_word is not None:
            return [acts.Over(failure_of(self.last_word))] if self._now >= self._end_at else []
        todo = [act for newcomer in self._newcomers.allowed(self._now) for act in self._opened(newcomer)]
        todo += self._resized(self._sizes.due(self._now))
        todo += self._drive(cluster_events.Tick(self._awake.at(self._now), self._newcomers.names))
        return todo if self.last_word is not None else [*todo, *self.announcer.waiting(self._now)]

    def _end(self, word: Finished | Aborted) -> list[Act]:
        if self.last_word is not None:
            return []
        self.last_word = word
        if isinstance(word, Aborted) and self.machine.last_word is None:
            self.machine.course.end(word)  # what comes later begins no other end
        told = [*self._save(), *self._send(word, *self.members), *self._announce(word)]
        told += [act for newcomer in self._newcomers.take_all() for act in self._opened(newcomer)]
        away = self._take_over is not None or self.machine.course.members.awaited
        return [*told, *(self._end_later() if away else [acts.Over(failure_of(word))])]

    def _end_later(self) -> list[Act]:
        """Members are about to come back: tell those who have come to be taken over, and for a while who comes."""
        connected = [] if self._take_over is None else self._take_over.connected
        self._take_over, self._end_at = None, self._now + _RETURN_S
        return [act for event in connected for act in self._handle(event)]

    def _send(self, message: Message, *members: str) -> list[Act]:
        return [SendMessage(self.members[member], message) for member in members if member in self.members]

    def _announce(self, message: Message) -> list[Act]:
        return self.announcer.announce(message, self._now)
