"""Links to the simulated coordinator: a member's, which joins, beats, comes back, and keeps what it could not say; and
an observer's, which says one order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from rallypoint.core.protocol import (
    Admitted,
    Assist,
    Beat,
    Capture,
    CaughtUp,
    Done,
    Hello,
    Knows,
    Leaving,
    Message,
    NewView,
    NotStored,
    Prepare,
    Propose,
    Report,
    Resize,
    Stored,
    ViewChange,
    decode,
    encode,
)
from rallypoint.core.view import View
from rallypoint.net.member import LastReports, ViewReceiver
from rallypoint.testing.simulation.network import Node, Wire
from rallypoint.testing.simulation.operating.links import with_paces

COORDINATOR = "coordinator"
RETRY_S = 0.1
BEAT_S = 0.5


class SimulatedMembership:
    """Hands every message that comes to `on_message`; `on_admitted(new)` says whether we are somebody new."""

    def __init__(
        self, node: Node, role: str, on_message: Callable[[Any], None], on_admitted: Callable[[bool], None],
        address: str = "", beat: Callable[[], Beat] = Beat,
    ) -> None:  # fmt: skip
        self._say_beat = beat
        self.node, self.role, self.address, self.incarnation = node, role, address, 0
        self._on_message, self._on_admitted = on_message, on_admitted
        self._wire: Wire | None = None
        self._admitted = False
        self._knows, self._views = Knows(), ViewReceiver()  # the newest view that came; those of the connection
        self._unsent: deque[Message] = deque()
        self._reports = LastReports()
        self._connect()
        self._beat()

    def send(self, message: Any) -> None:
        """Say something, now or when the coordinator can hear it."""
        said = to_coordinator(message)
        self._reports.note(said)
        if self._wire is not None and self._admitted:
            self._wire.send(0, said)
        else:
            self._unsent.append(said)

    def close(self) -> None:
        """Leave."""
        if self._wire is not None:
            self._wire.close(0)

    def _beat(self) -> None:
        if self._wire is not None and self._admitted:
            self._wire.send(0, with_paces(self._say_beat(), self.node, self.role))
        self.node.later(BEAT_S, self._beat)

    def _connect(self) -> None:
        name = self.node.name  # no other process has it
        hello = Hello(self.role, name, "host", self.address, self.incarnation, process=name.encode())
        self.node.world.connect(self.node, COORDINATOR, hello, self._up, self._failed)

    def _failed(self, reason: str) -> None:
        if reason != "the job is over":
            self.node.later(RETRY_S, self._connect)

    def _up(self, wire: Wire) -> None:
        self._wire, self._admitted, self._views = wire, False, ViewReceiver()
        wire.on_message[0] = self._receive
        wire.on_close[0] = self._lost
        if self.incarnation:
            wire.send(0, self._knows)

    def _lost(self) -> None:
        self._wire, self._admitted = None, False
        self.node.later(RETRY_S, self._connect)

    def _receive(self, message: Any) -> None:
        if isinstance(message, NewView | ViewChange):
            arrived = decode(encode(message))  # as from a socket: where a float belongs, a whole number becomes one
            assert isinstance(arrived, NewView | ViewChange), arrived
            message = self._views.take(arrived)
        if isinstance(message, NewView) and _is_newer(message.view, self._knows.view):
            self._knows = Knows(message.view, message.proof)
        match message:
            case Admitted(incarnation=incarnation):
                new, self.incarnation = incarnation != self.incarnation, incarnation
                self._admitted = True
                if new:
                    self._knows = Knows()
                    self._unsent.clear()  # said by somebody who was given up
                    self._reports.forget()
                assert self._wire is not None
                for report in self._reports.again({id(message) for message in self._unsent}):
                    self._wire.send(0, report)
                self._on_admitted(new)
                while self._unsent:
                    self._wire.send(0, self._unsent.popleft())
            case _:
                self._on_message(from_coordinator(message))


def _is_newer(view: View, known: View | None) -> bool:
    return known is None or view.number > known.number


class ResizeOrder:
    """`rallypoint resize`: says it to the coordinator until that has announced it. Then `heard` is called, once."""

    def __init__(self, node: Node, order: Resize, heard: Callable[[], None]) -> None:
        self.node, self._order, self._heard = node, order, heard
        self._connect()

    def _connect(self) -> None:
        hello = Hello("observer", self.node.name, "host", "", 0)
        self.node.world.connect(self.node, COORDINATOR, hello, self._up, self._failed)

    def _failed(self, reason: str) -> None:
        self.node.later(RETRY_S, self._connect)

    def _up(self, wire: Wire) -> None:
        wire.on_message[0] = lambda message: self._receive(wire, message)
        wire.on_close[0] = lambda: self._failed("")
        wire.send(0, self._order)

    def _receive(self, wire: Wire, message: Any) -> None:
        if message == self._order:
            wire.close(0)
            self.node.kill()
            self._heard()


class SimulatedOrders:
    """Gives the coordinator one order after the other; calls `heard(order)` when it has announced it.

    An order waits until the one before it is announced: each has a link of its own, two links might announce them in
    another order, and the real launcher has one.
    """

    def __init__(self, new_node: Callable[[], Node], heard: Callable[[Resize], None]) -> None:
        self._new_node, self._heard = new_node, heard
        self._waiting: deque[Resize] = deque()  # the first is being given

    def give(self, order: Resize) -> None:
        """Give this order, after those before it."""
        self._waiting.append(order)
        if len(self._waiting) == 1:
            self._give_first()

    def _give_first(self) -> None:
        ResizeOrder(self._new_node(), self._waiting[0], self._announced)

    def _announced(self) -> None:
        self._heard(self._waiting.popleft())
        if self._waiting:
            self._give_first()


# The simulated worker and server speak in tuples; the coordinator's shell in the real messages.


def to_coordinator(said: Any) -> Message:
    """What a simulated member says, as the message that a real one sends."""
    match said:
        case ("propose", record):
            return Propose(record)
        case ("progress", step, replica, seconds, generation):
            return Report(step, replica, 0.0, 1.0, 1, seconds, generation)
        case ("in step", backups):
            return CaughtUp(backups)
        case ("leaving",):
            return Leaving()
        case ("done", generation, version):
            return Done(generation, version)
        case ("captured", id, indices):
            return Stored(id, {}, dict.fromkeys(indices, ("", 0, 0, "")))
        case ("snapshot lost", id, reason, passed):
            return NotStored(id, reason, passed)
        case _:
            assert isinstance(said, Message), f"a member says {said}"
            return said


def from_coordinator(message: Message) -> Any:
    """What a simulated member hears."""
    match message:
        case NewView(view=view):
            return ("view", view)
        case Prepare(record=record):
            return ("prepare", record)
        case Assist(step=step, replica=replica):
            return ("assist", step, replica)
        case Capture(snapshot=id, version=version, writers=writers):
            return ("capture", id, version, writers)
        case _:
            return message
