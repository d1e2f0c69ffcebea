"""A clock that is turned by hand, processes that crash and freeze, their threads, links that carry messages in order or
break, and machines that are checked after every call."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from rallypoint.coordinator.inbox import End
from rallypoint.core.view import ViewNumber
from rallypoint.observe.observed import RECORD, watched
from rallypoint.observe.recording import Recorder

LATENCY_S = (0.0002, 0.004)
SLOW_S = 0.05  # now and then a message takes so long
DEAD_AFTER_S = 3.0  # a link that carries nothing for so long breaks
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.1  # until a link that has broken is made again
HELD_UP = 0.05  # how often the system lets others run when a thread has left its lock

Call = Callable[[], None]
Machine = TypeVar("Machine")


class Node:
    """A process: what it was going to do dies with it; while it is paused, things wait."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.paused = True, False
        self.sending = 0  # payloads that may not change yet
        self.wires: list[Wire] = []
        self.threads: list[PlayedThread] = []
        self._backlog: list[tuple[int, Call]] = []  # with their causes
        world.nodes[name] = self

    def later(self, seconds: float, call: Call) -> None:
        """Run `call` in this process after `seconds`, if it still lives then."""
        self.world.at(seconds, lambda: self.run(call))

    def run(self, call: Call) -> None:
        """Run `call` now, or when the process goes on."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((self.world.cause, call))
        else:
            call()

    def kill(self) -> None:
        """SIGKILL."""
        if not self.alive:
            return
        self.alive = False
        self._backlog.clear()
        for wire in list(self.wires):
            wire.cut()
        for thread in self.threads:
            thread.kill()
        if self.world.nodes.get(self.name) is self:
            del self.world.nodes[self.name]

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for self.world.cause, call in backlog:
            self.run(call)  # one of them may end the process


class Wire:
    """A connection: two directions, each in order. `ends` are the two processes, the connecting one first."""

    def __init__(self, world: World, a: Node, b: Node) -> None:
        self.world, self.ends, self.number = world, (a, b), world.number()
        self.open, self.ended = True, End.CLOSED
        self.malformed: Any = None  # the header of a frame that nobody may send (for the coordinator: a message)
        self._free = [0.0, 0.0]  # when each direction can deliver next
        self._cut = float("inf")
        self._sent, self._newest = 0, dict[Hashable, int]()  # messages, and the last one of each place
        self.on_message: list[Callable[[Any], None]] = [_ignore, _ignore]
        self.on_close: list[Call] = [_nothing, _nothing]
        a.wires.append(self)
        b.wires.append(self)

    def send(self, end: int, message: Any, *, read: Callable[[Any], Any] | None = None, place: Hashable = None) -> None:
        """From end 0 or 1 to the other; `read` turns the message into what is sent when it leaves.

        A message replaces the one of the same `place` that is still on its way (as `net/channel.py` does it).
        """
        if not self.open:
            return
        world = self.world
        arrival = max(self._free[end], world.now + world.latency()) + 1e-6
        arrival = max(arrival, world.healed_at(self.ends))
        self._free[end] = arrival
        content = message if read is None else read(message)
        self._sent += 1
        number, place = self._sent, (end, place)
        self._newest[place] = number
        world.at(
            arrival - world.now,
            lambda: self._deliver(1 - end, content) if place[1] is None or self._newest[place] == number else None,
            why=(self.ends[end].name, self.ends[1 - end].name, content),
        )

    def _deliver(self, end: int, message: Any) -> None:
        if self.world.now <= self._cut:
            self.ends[end].run(lambda: self.on_message[end](message))

    def hold(self, end: int, seconds: float) -> None:
        """What this end sends arrives after that time at the earliest."""
        self._free[end] = max(self._free[end], self.world.now + seconds)

    def cut(self, how: End = End.CLOSED) -> None:
        """The connection breaks; what is under way arrives in part."""
        if not self.open:
            return
        self.open, self.ended = False, how
        self._cut = self.world.now + self.world.random.random() * LATENCY_S[1]
        for end, node in enumerate(self.ends):
            node.wires.remove(self)
            self.world.at(self._cut - self.world.now + 1e-5, lambda n=node, e=end: n.run(lambda: self._tell(e)))  # type: ignore[misc]

    def _tell(self, end: int) -> None:
        on_close, self.on_close[end] = self.on_close[end], _nothing
        self.on_message[end] = _ignore
        on_close()

    def refuse(self, end: int, reason: str) -> None:
        """This end ends it because of what has come, which must be malformed."""
        assert self.malformed is not None, f"{self.ends[end].name} refuses {self.ends[1 - end].name}: {reason}"
        self.on_message[end] = _ignore
        self.cut()

    def close(self, end: int) -> None:
        """This end wants no more of it: it hears nothing from now on."""
        self.on_close[end], self.on_message[end] = _nothing, _ignore
        self.cut()


class Cause(NamedTuple):
    """Something that happens, and the number of what it follows from."""

    number: int
    of: int
    at: float
    what: Any


class Noted(NamedTuple):
    """Somebody does something with a version of a shard. `history` says which words there are for `what`.

    `number`: of the view in which it is done, or sent. `cause`: the number of what is happening.
    """

    at: float
    cause: int
    what: str
    who: str
    shard: int
    version: int
    number: ViewNumber
    other: str
    more: Any


class Fault(NamedTuple):
    """Something that happens at `at` seconds to a member of `role`."""

    at: float
    kind: str
    role: str
    seconds: float = 0.0


class Tokens:
    """Numbers of 8 bytes for things that travel as bytes in the product, and are stored."""

    def __init__(self) -> None:
        self._known: list[Any] = []

    def bytes_of(self, thing: Any) -> memoryview:
        """The 8 bytes that stand for it."""
        self._known.append(thing)
        return memoryview(len(self._known).to_bytes(8, "little"))

    def of(self, data: Any) -> Any:
        """What these 8 bytes stand for."""
        return self._known[int.from_bytes(bytes(data), "little") - 1]


class World:
    """Time, chance and who can reach whom.

    Attributes:
        uneven: links of servers are not alike: see `member.with_paces`.
        history: what members do with versions, as it happens; None: nobody looks.
        acceptors: who listens, by address. `accept(wire, hello)` returns "" to take the connection, else why not; it
            sets `wire.on_message` and `wire.on_close` for its end.
        cause: the number of what is happening now. `causes`: everything that was to happen, by number; None: nobody
            asks why. `told`: when, in what, and what happened, for people.
    """

    def __init__(self, seed: int, *, uneven: bool = False) -> None:
        self.random, self.uneven = random.Random(seed), uneven
        self.now = 0.0
        self.history: list[Noted] | None = None
        self.cause = -1
        self.causes: dict[int, Cause] | None = None
        self.told: list[tuple[float, int, str]] = []
        self.nodes: dict[str, Node] = {}
        self.acceptors: dict[str, Any] = {}
        self._events: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()
        self._partitions: dict[frozenset[str], float] = {}
        self._traps: set[str] = set()
        self.tokens = Tokens()

    def at(self, seconds: float, call: Call, why: Any = None) -> None:
        """Run `call` after `seconds`. `why`: whose message is heard then by whom, and the message."""
        when, number = self.now + max(0.0, seconds), next(self._numbers)
        if self.causes is not None:
            self.causes[number] = Cause(number, self.cause, when, why)
        heapq.heappush(self._events, (when, number, call))

    def tell(self, text: str) -> None:
        """What happens now, in a person's words."""
        if self.causes is not None:
            self.told.append((self.now, self.cause, text))

    def remember(self) -> None:
        """From now on somebody asks why."""
        self.causes = {-1: Cause(-1, -1, 0.0, None)}

    def note(
        self, what: str, who: str, shard: int, version: int, number: ViewNumber, other: str = "", more: Any = None
    ) -> None:
        """Somebody does something with a version: see `history`."""
        if self.history is not None:
            self.history.append(Noted(self.now, self.cause, what, who, shard, version, number, other, more))

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Turn the clock until `over()`, or nothing is left to happen, or it is `until`."""
        while self._events and not over():
            when, number, call = heapq.heappop(self._events)
            if when > until:
                return
            self.now, self.cause = when, number
            call()

    def close(self) -> None:
        for node in self.nodes.values():
            for thread in node.threads:
                thread.kill()

    def number(self) -> int:
        """A number above all before it."""
        return next(self._numbers)

    def latency(self) -> float:
        return SLOW_S if self.random.random() < 0.01 else self.random.uniform(*LATENCY_S)

    def trap(self, name: str) -> None:
        """Let something happen the next time that somebody comes by."""
        self._traps.add(name)

    def spring(self, name: str) -> bool:
        """Was a trap of this name waiting?"""
        waiting = name in self._traps
        self._traps.discard(name)
        return waiting

    def partition(self, name: str, other: str, seconds: float) -> None:
        """These two cannot reach each other for a while; with "" as the other one: nobody can reach this one."""
        apart = frozenset((name, other)) - {""}
        self._partitions[apart] = self.now + seconds
        if seconds >= DEAD_AFTER_S:
            self.at(DEAD_AFTER_S, lambda: self._break(name, apart))

    def _break(self, name: str, apart: frozenset[str]) -> None:
        for wire in list(self.nodes[name].wires) if name in self.nodes else ():
            if apart <= {end.name for end in wire.ends}:
                wire.cut(End.LOST)

    def healed_at(self, ends: tuple[Node, Node]) -> float:
        """When these two can reach each other (again)."""
        a, b = (end.name for end in ends)
        return max(self._partitions.get(frozenset(apart), 0.0) for apart in ((a,), (b,), (a, b)))

    def connect(
        self, node: Node, address: str, hello: Any, up: Callable[[Wire], None], failed: Callable[[str], None]
    ) -> None:
        """Connect to whoever listens at `address`; exactly one of `up` and `failed` is called, in `node`."""
        acceptor = self.acceptors.get(address)
        if acceptor is None or not acceptor.node.alive or self.healed_at((node, acceptor.node)) > self.now:
            node.later(self.latency(), lambda: failed("nobody answers"))
            return
        wire = Wire(self, node, acceptor.node)
        answered = [False]

        def accept() -> None:
            if not wire.open or answered[0]:
                return
            when = self.latency()
            wire.hold(1, when)  # what the acceptor says comes after its answer
            reason = acceptor.accept(wire, hello)
            self.at(when, lambda: node.run(lambda: answer(reason)))

        def answer(reason: str) -> None:
            if answered[0]:
                return
            answered[0] = True
            if wire.open and not reason:
                up(wire)
            else:
                wire.close(0)
                failed(reason or "the link broke")

        self.at(self.latency(), lambda: acceptor.node.run(accept))
        self.at(CONNECT_TIMEOUT_S, lambda: node.run(lambda: answer("no answer")))


def _ignore(message: Any) -> None:
    """Nobody listens any more."""


def _nothing() -> None:
    """Nobody wants to know."""


# ---- threads, for real code that blocks: one runs at a time, and the seed says which ----


class Killed(BaseException):
    """The thread's process is no more."""


class PlayedThread:
    """Runs `body`, from `play` until it waits: the world stands still meanwhile."""

    def __init__(self, node: Node, body: Call) -> None:
        self.node, self._body = node, body
        self._goes, self._waits = threading.Lock(), threading.Lock()
        self._goes.acquire()
        self._waits.acquire()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.runs = self._over = self._killed = False
        node.threads.append(self)

    def play(self) -> None:
        """Go on until it waits, or is over."""
        if self._over:
            return
        self.runs = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._goes.release()
        self._waits.acquire()
        self.runs = False
        if (error := self._error) is not None:
            self._error = None
            raise error

    def kill(self) -> None:
        """Unwind it, unless it is itself that ends its process: then it is about to return."""
        self._killed = True
        if self._thread is None:
            self._over = True
        elif not self.runs:
            self.play()

    # ---- what it calls itself ----

    def wait(self) -> None:
        """Until somebody plays it; whose process was killed meanwhile, or by its own call, is unwound."""
        if not self._killed:
            self._waits.release()
            self._goes.acquire()
        if self._killed:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Compute, copy or write for so long."""
        self.node.later(seconds, self.play)
        self.wait()

    def _run(self) -> None:
        try:
            self._body()
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        self._over = True
        self._waits.release()


class PlayedCondition:
    """What `threading.Condition` is to real threads. `check` is called whenever the lock is free again; without one
    the thread that leaves it is never held up."""

    def __init__(self, thread: PlayedThread, check: Call | None = None) -> None:
        self._thread, self._check = thread, check
        self._depth = 0
        self._ready: Callable[[], bool] | None = None  # what the thread waits for

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._depth -= 1
        if self._depth or kind is not None or self._check is None:
            return
        self._check()
        world = self._thread.node.world
        if self._thread.runs and world.random.random() < HELD_UP:
            self._thread.sleep(world.latency() / 4)

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """No time-out: who was not woken waits for ever. Others than the thread wait as long as it runs."""
        while not ready():
            depth, self._depth = self._depth, 0
            if not self._thread.runs:
                self._ready = None
                self._thread.play()
                self._depth = depth
                return ready()
            self._ready = ready
            if self._check is not None:
                self._check()
            self._thread.wait()
            self._depth = depth
        return True

    def notify_all(self) -> None:
        """Wake the thread, if what it waits for is there."""
        if self._ready is not None:
            self._thread.node.later(0.0, self._wake)

    def _wake(self) -> None:
        if self._ready is not None and self._ready():
            self._ready = None
            self._thread.play()


# ---- machines ----


def watch(machine: Machine, name: str) -> Machine:
    """`machine`, whose every call ends with its `validate()`: what that says fails the run. It is recorded where
    `RALLYPOINT_RECORD` is set."""
    folder = os.environ.get(RECORD, "")
    return watched(machine, name, Recorder(Path(folder), name) if folder else None, _fail)


def _fail(sentence: str) -> NoReturn:
    raise AssertionError(sentence)
