"""A member's link to the coordinator: joins, sends heartbeats, passes messages on, and reconnects after a loss."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rallypoint.core import protocol
from rallypoint.core.protocol import Beat, Hello, Message, NewView, Refused
from rallypoint.core.view import Member, View, WrongBase, apply, canonical
from rallypoint.errors import AccessDenied, CorruptFrame, LinkError, ProtocolError, RallypointError, UnprovenPeer
from rallypoint.net.channel import Backlog, Channel
from rallypoint.net.frames import Kind
from rallypoint.net.handshake import COORDINATOR, Credentials, Identity, introduce
from rallypoint.net.places import Whereabouts, advertised
from rallypoint.net.sampling import Pacing, sampler_for, traffic_of
from rallypoint.net.transport import Transport

log = logging.getLogger("rallypoint")

JOIN_TIMEOUT_S = 30.0
_CONNECT_S = 1.0  # for one attempt: in a longer one TCP waits longer and longer before it tries again
_RETRY_S = 0.05
_SLOW_RETRY_S = 1.0  # the longest pause between attempts while somebody else listens there
NEWCOMER_TIMEOUT_S = 5.0  # so long a newcomer waits while somebody else listens there: its token may be wrong
_MOST_WAITING = 64 << 20  # bytes for a coordinator that does not read (it is paused): reports of very many steps
_NAME_BYTES = 16  # of a process's random name
_FAREWELL_S = 2.0  # so long a link that is closed waits for what was said last to be sent
_REPORTED_STEPS = 2  # the coordinator remembers which replicas of so many steps were reported
_BEATS = 4  # heartbeats in the time after which a silent member is given up


@dataclass(frozen=True, slots=True)
class Handlers:
    """The functions that a link to the coordinator calls, all from the link's own thread.

    Attributes:
        on_message: called with each message of the coordinator.
        on_lost: called once, with the reason, when the link cannot or must not be made again; not after `close`.
        on_admitted: called after each joining. True: this process is new to the coordinator (the first time, or
            after the coordinator had given it up).
        beat: returns the next heartbeat; called from a thread of its own.
        waited: returns the seconds that the script has waited for data until now; called from a thread of its own too.
        on_link: called with False when an observer's link breaks, and with True when it is made again, maybe to another
            coordinator, which knows nothing of what was asked before.
    """

    on_message: Callable[[Message], None]
    on_lost: Callable[[RallypointError], None]
    on_admitted: Callable[[bool], None] | None = None
    beat: Callable[[], Beat] = Beat
    waited: Callable[[], float] = lambda: 0.0
    on_link: Callable[[bool], None] = lambda whole: None


class LinkState:
    """What a member's link to the coordinator keeps from one connection to the next, the simulation's links too.

    Attributes:
        credentials: those of this member, for its links to servers too.
        admitted: a coordinator knows it now.
    """

    _channel: Channel  # the connection

    def __init__(self, me: Identity, on_admitted: Callable[[bool], None] | None) -> None:
        self.credentials, self.admitted, self._on_admitted = Credentials(me), me.role == "observer", on_admitted
        self._knows, self._views = protocol.Knows(), ViewReceiver()  # the newest view; those of the connection
        self._unsent: deque[Message] = deque()
        self._reports = LastReports()
        self._lock = threading.Lock()

    @property
    def incarnation(self) -> int:
        """The incarnation that the coordinator gave this member; 0 before that."""
        return self._me.incarnation

    @property
    def _me(self) -> Identity:
        return self.credentials.me

    def send(self, message: Message) -> None:
        """Send a message now, or as soon as the coordinator is back. Any thread may call it."""
        with self._lock:
            self._reports.note(message)
            if self.admitted:
                self._channel.send_message(message)
            else:
                self._unsent.append(message)

    def _connected(self, channel: Channel) -> None:
        if self._me.role != "observer" and self.incarnation:
            channel.send_message(self._knows)  # before anything else: the coordinator may be another one
        self._channel, self._views = channel, ViewReceiver()

    def _lost(self) -> None:
        with self._lock:
            self.admitted = False

    def _take(self, message: Message) -> Message:
        """The message; a difference to a view has become the view. CorruptFrame: see `ViewReceiver`."""
        if isinstance(message, protocol.ViewChange | NewView):
            message = self._views.take(message)
            self.credentials.given(message.view, message.tickets)
            if self._knows.view is None or message.view.number > self._knows.view.number:
                self._knows = protocol.Knows(message.view, message.proof)
        return message

    def _take_admission(self, admitted: protocol.Admitted) -> None:
        before, incarnation = self.incarnation, admitted.incarnation
        self.credentials.admitted(incarnation, admitted.secret)
        with self._lock:
            if before and before != incarnation:
                self._knows = protocol.Knows()
                self._unsent.clear()  # sent by an incarnation that was given up
                self._reports.forget()
            # First, because they are older than what waits
            self._unsent.extendleft(reversed(self._reports.again({id(message) for message in self._unsent})))
        if self._on_admitted is not None:
            self._on_admitted(before != incarnation)
        self._say_the_rest()

    def _say_the_rest(self) -> None:
        with self._lock:
            self.admitted = True
            while self._unsent:
                self._channel.send_message(self._unsent.popleft())


class CoordinatorLink(LinkState):
    """A member's link to the coordinator. The constructor joins as `me`; `start` begins to receive messages.

    `address` says where the coordinator may be (see `Whereabouts`): each attempt tries each place in turn. The
    constructor waits up to `patience` seconds (default 30) for a coordinator. `listening_at` is a server's own address;
    if it is a wildcard, the coordinator is told that of the interface that leads to it. The constructor raises
    AccessDenied when the coordinator refuses, or when nobody there has proved in time that it knows the token;
    LinkError when there is no coordinator in time.

    When the link breaks, its thread connects again, to the same or a restarted coordinator, at the same or another
    place. Messages sent meanwhile wait, and the last reports are sent again. Both are dropped if the coordinator has
    given this member up and admits it as a new one. Nothing is believed of whoever listens at one of the places and
    does not prove that it knows the token (and, once this member is admitted, its secret): the link tries again.
    """

    def __init__(
        self, *, transport: Transport, address: str, me: Identity, handlers: Handlers, listening_at: str = "",
        patience: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(me, handlers.on_admitted)
        self._transport, self._places, self._handlers = transport, Whereabouts(address), handlers
        self._listening_at = listening_at
        self._process = secrets.token_bytes(_NAME_BYTES)
        self._corrupt: Channel | None = None
        self._said_that_it_waits = self._said_that_beats_fail = False
        self._sampler, self._pacing = sampler_for(transport, handlers.waited), Pacing(traffic_of(transport))
        self._closed = threading.Event()
        self._channel = self._join_patiently(JOIN_TIMEOUT_S if patience is None else patience)
        self._thread = threading.Thread(target=self._receive_all, name="from the coordinator", daemon=True)
        self._beat_thread = threading.Thread(target=self._beat, name="signs of life", daemon=True)
        # A thread of its own: psutil takes its time to be loaded, and a GPU's driver may never answer
        self._sample_thread = threading.Thread(target=self._sample, name="samples of this machine", daemon=True)

    @property
    def peer(self) -> str:
        """The address of the coordinator, as this member is connected to it."""
        return self._channel.connection.peer

    def start(self) -> None:
        """Begin to receive messages and to send heartbeats."""
        self._thread.start()
        if self._me.role != "observer":
            self._beat_thread.start()
            self._sample_thread.start()

    def close(self) -> None:
        """Send what is queued (for at most 2 seconds), then end the link.

        If the coordinator is away, it waits so long for it to come back and hear why this member gives up.
        """
        deadline = time.monotonic() + _FAREWELL_S
        while self._has_to_explain() and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
        self._channel.flush(max(0.0, deadline - time.monotonic()))
        self._closed.set()
        # A stream that is closed while it has unread bytes is reset, and what was sent last is lost: read to its end.
        self._channel.connection.finish()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._channel.close()
        for thread in (self._thread, self._beat_thread):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        if self._sample_thread.is_alive():  # it says nothing any more, and may be stuck
            self._sample_thread.join(max(_RETRY_S, deadline - time.monotonic()))

    def _has_to_explain(self) -> bool:
        with self._lock:
            unsaid = any(isinstance(message, protocol.GiveUp) for message in self._unsent)
        return unsaid and threading.current_thread() is not self._thread

    # ---- joining ----

    def _join(self, place: str, patience: float) -> Channel:
        connection = self._transport.connect(place, timeout=min(_CONNECT_S, max(0.1, patience)))
        try:
            me = self._me
            if self._listening_at:  # once it is known, it stays: the first coordinator has told others
                self._listening_at = advertised(self._listening_at, towards=place)
            hello = Hello(
                me.role, me.id, socket.gethostname(), self._listening_at, me.incarnation, to=COORDINATOR,
                process=self._process, near=me.near, link_mbit=me.link_mbit,
            )  # fmt: skip
            self.welcome, keys = introduce(connection, hello, me.token, me.secret)
        except BaseException:
            connection.close()
            raise
        return Channel(connection, "the coordinator", keys, backlog=Backlog(_MOST_WAITING, _MOST_WAITING))

    def _join_somewhere(self, deadline: float) -> Channel | list[LinkError]:
        """Join at the first place where a coordinator is. If there is none: why, for each place."""
        try:
            places = self._places.now()
        except LinkError as error:
            return [error]
        failed = list[LinkError]()
        for place in places:
            try:
                return self._join(place, deadline - time.monotonic())
            except LinkError as error:
                failed.append(error)
            if self._closed.is_set():
                break
        return failed

    def _join_patiently(self, patience: float) -> Channel:
        """Join. A coordinator that dies meanwhile, or that has not proved itself, is waited for like an absent one.

        LinkError if there is none in time; AccessDenied if it refuses, or has not proved itself in time.
        """
        deadline, warned, pause = time.monotonic() + patience, False, _RETRY_S
        while isinstance(failed := self._join_somewhere(deadline), list):
            answers = [error for error in failed if isinstance(error, UnprovenPeer)]
            error = failed[0] if len(failed) == 1 else LinkError("; ".join(dict.fromkeys(map(str, failed))))
            if unproven := bool(answers):
                pause = min(2 * pause, _SLOW_RETRY_S)
                # One of several places may be silent because the coordinator was never there, or is there no more.
                refused = len(answers) == len(failed) or any(error.refuses for error in answers)
                if refused and not self.incarnation:
                    deadline = min(deadline, time.monotonic() + NEWCOMER_TIMEOUT_S)
            if time.monotonic() >= deadline or self._closed.is_set():
                raise AccessDenied(str(error)) if unproven else error
            left = deadline - time.monotonic()
            if unproven and not warned:
                log.warning("%s; trying again for %.0f s", error, left)
                warned = True
            elif not (unproven or self.incarnation or self._me.role == "observer" or self._said_that_it_waits):
                self._said_that_it_waits = True
                why = "the coordinator may not have been started yet, or its job is over"
                log.warning("%s; trying again for %.0f s: %s", error, left, why)  # nobody is there to ask which
            self._closed.wait(min(pause, max(0.0, left)))
        return failed

    def _rejoin(self) -> None:
        """Connect again. LinkError if no coordinator answers in time, AccessDenied if it refuses."""
        if self._closed.is_set():
            return
        self._connected(channel := self._join_patiently(self.welcome.living))
        if self._me.role == "observer":
            self._forget()
            self._handlers.on_link(True)
            self._say_the_rest()
        if self._closed.is_set():
            channel.close()

    def _forget(self) -> None:
        """Close the connection on which a corrupt frame came, if there is one."""
        if self._corrupt is not None:
            self._corrupt.close()
            self._corrupt = None

    def _take_admission(self, admitted: protocol.Admitted) -> None:
        self._forget()
        super()._take_admission(admitted)

    # ---- threads ----

    def _beat(self) -> None:
        while not self._closed.wait(self.welcome.heartbeat / _BEATS):
            if self.admitted:
                self._channel.send_message(self._next_beat())

    def _next_beat(self) -> Beat:
        """The next sign of life. It does not stay away for an error in what it would tell: this member lives."""
        try:
            beat = self._handlers.beat()
            paced = self._pacing.since_last(self._knows.view, self._me.id, time.monotonic())
        except Exception as error:
            if not self._said_that_beats_fail:
                log.error("the signs of life tell nothing more", exc_info=error)
            self._said_that_beats_fail = True
            return Beat()
        return msgspec.structs.replace(beat, paced=paced) if paced else beat

    def _sample(self) -> None:
        failed = False
        while not self._closed.wait(self.welcome.heartbeat / _BEATS):
            try:
                sample = self._sampler.sample(time.monotonic()) if self.admitted else None
            except Exception as error:  # no free file descriptor for /proc, say: that passes
                if not failed:
                    log.warning("this machine cannot be sampled: %r", error)
                failed = True
                continue
            if sample is not None:
                self._channel.send_message(sample)

    def _receive_all(self) -> None:
        try:
            self._receive_and_rejoin()
        except Exception as fault:  # else this thread would end unseen: a member that lives and hears nothing
            log.error("the link to the coordinator has failed", exc_info=fault)
            self._lost()
            self._forget()
            self._channel.close()
            if not self._closed.is_set():
                self._handlers.on_lost(ProtocolError(f"the link to it has failed: {fault!r}"))

    def _receive_and_rejoin(self) -> None:
        while True:
            try:
                self._receive_some()
            except RallypointError as error:
                self._lost()
                self._forget()
                if isinstance(error, CorruptFrame):
                    log.warning("%s; connecting again", error)
                    self._corrupt = self._channel  # closed once it is admitted again: a member that closes has left
                else:
                    self._channel.close()
                if self._closed.is_set():
                    self._forget()
                    return
                if isinstance(error, ProtocolError):
                    self._handlers.on_lost(error)
                    return
                if self._me.role == "observer":
                    self._handlers.on_link(False)
            self._closed.wait(_RETRY_S)
            try:
                self._rejoin()
            except RallypointError as error:
                if not self._closed.is_set():
                    self._handlers.on_lost(error)
                self._forget()
                return

    def _receive_some(self) -> None:
        while True:
            header = self._channel.receive_header()
            if header.kind not in (Kind.CONTROL, Kind.REFUSE):
                raise ProtocolError(f"a {header.kind.name} frame from the coordinator")
            message = self._channel.receive_message(header)
            if self._closed.is_set():
                continue  # it is read for the stream's end, and nobody acts on it
            match message := self._take(message):
                case protocol.Admitted():
                    self._hand_over(message, lambda message=message: self._take_admission(message))  # type: ignore[misc]
                case Refused(reason=reason, final=False) if self.incarnation:
                    raise LinkError(reason)  # given up by mistake: join again as a new member
                case _:
                    self._hand_over(message, lambda message=message: self._handlers.on_message(message))  # type: ignore[misc]

    def _hand_over(self, message: Message, handle: Callable[[], None]) -> None:
        """Call `handle`. Any error becomes a ProtocolError: heartbeats must not hide that nobody handles messages."""
        try:
            handle()
        except ProtocolError:
            raise
        except Exception as error:
            log.error("a %s message could not be acted on", type(message).__name__, exc_info=error)
            raise ProtocolError(f"its {type(message).__name__} message could not be acted on: {error!r}") from error


class LastReports:
    """The reports of the last two steps of the newest generation. Not thread-safe.

    The worker says them again: some may have been sent into a link that was broken already.
    """

    def __init__(self) -> None:
        self._reports: list[protocol.Report] = []

    def note(self, message: object) -> None:
        """The worker says this; what is no report is passed over."""
        if isinstance(message, protocol.Report) and all(one.generation <= message.generation for one in self._reports):
            same, first = message.generation, message.step - _REPORTED_STEPS + 1
            self._reports = [one for one in self._reports if one.generation == same and one.step >= first]
            self._reports.append(message)

    def again(self, waiting: set[int]) -> list[protocol.Report]:
        """The reports to say again, marked as such; not those that have not been sent yet: `waiting` are their ids."""
        return [msgspec.structs.replace(one, repeated=True) for one in self._reports if id(one) not in waiting]

    def forget(self) -> None:
        self._reports = []


class ViewReceiver:
    """The views that come on one connection to the coordinator, and this member's tickets. One thread only.

    A new connection needs a new one: its first view comes whole.
    """

    def __init__(self) -> None:
        self._last: NewView | None = None

    def take(self, message: protocol.OfViews) -> NewView:
        """The whole view, with all tickets that count.

        CorruptFrame if it is a difference that does not lead from the view before to another one: then make the
        connection anew, and the whole view comes.
        """
        if isinstance(message, NewView):
            self._last = NewView(canonical(message.view), message.tickets, message.proof)
            return self._last
        if self._last is None:
            raise CorruptFrame("a difference to a view came, and no view before it")
        before = self._last
        try:
            view = apply(message.change, before.view)
        except WrongBase as error:
            raise CorruptFrame(str(error)) from None
        tickets = {**_kept(before, view), **message.tickets}
        self._last = NewView(view, tickets, message.proof)
        return self._last


def _kept(before: NewView, view: View) -> dict[str, bytes]:
    """The tickets for servers and aggregators that were in the view before and still are."""
    was = {one.id: one.incarnation for one in listeners(before.view)}
    here = {one.id: one.incarnation for one in listeners(view)}
    return {id: ticket for id, ticket in before.tickets.items() if here.get(id, -1) == was.get(id, -2)}


def listeners(view: View) -> tuple[Member, ...]:
    """The members for which others have tickets."""
    return (*view.servers, *view.aggregators)
