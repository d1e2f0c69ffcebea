"""`rallypoint pause`, `snapshot` and `continue`, given to a simulated coordinator, and when."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from rallypoint.core.protocol import Hello, Ordered, Pause, SnapshotWanted
from rallypoint.testing.simulation.member import COORDINATOR, Given
from rallypoint.testing.simulation.network import Fault, Node

_LOOK_S = 20.0  # how often an operator looks whether the job is paused though it was let go on
# A kind of fault that is none: it is an order.
PAUSE = "the operator pauses"

# While the job is paused, most of all: what must not be forgotten, and what goes back.
_IN_A_PAUSE = (
    ("crash", "coordinator"), ("crash", "coordinator"), ("crash", "server"), ("crash", "server"), ("crash", "worker"),
    ("everything", "server"), ("resize", "launcher"), ("half said", "coordinator"), ("drop", "worker"),
    ("leave", "server"), ("join", "worker"),
)  # fmt: skip


def pauses(seed: int, *, kills: bool) -> tuple[Fault, ...]:
    """Up to three pauses; with `kills`, faults strike in them."""
    rng, events = random.Random(seed * 7919 + 14), list[Fault]()
    for _ in range(rng.randint(1, 3)):
        at, seconds = rng.uniform(0.6, 3.5), rng.uniform(0.3, 5.0)
        events.append(Fault(at, PAUSE, "operator", seconds))
        for kind, role in rng.sample(_IN_A_PAUSE, rng.randint(0, 3)) if kills else ():
            events.append(Fault(at + rng.uniform(0.0, seconds), kind, role, rng.uniform(0.1, 5.0)))
    return tuple(events)


class Operators:
    """Pause the job, and let it go on, one after the other. They add each answer to `told`.

    AssertionError if the coordinator has forgotten a pause (not where an order's answer was lost: it is given again).
    `forgets`: it may, because its journal's disk is full for a time.
    """

    def __init__(self, new_node: Callable[[], Node], told: list[str], *, forgets: bool) -> None:
        self._new_node, self._told, self._forgets = new_node, told, forgets
        self._waiting: deque[float] = deque()  # the first has begun

    def pause(self, seconds: float) -> None:
        """Pause the job, and let it go on so long after the coordinator has answered; after those before."""
        self._waiting.append(seconds)
        if len(self._waiting) == 1:
            self._begin()

    def _begin(self) -> None:
        node = self._new_node()

        def paused(answer: Ordered, _: bool) -> None:
            self._tell(node, answer)
            hello, ask = Hello("observer", node.name, "host", "", 0), lambda wire: wire.send(0, SnapshotWanted())
            node.world.connect(node, COORDINATOR, hello, ask, lambda _: None)
            node.later(self._waiting[0], lambda: order(Pause(on=False), lambda *said: goes_on(answer, *said)))

        def goes_on(before: Ordered, answer: Ordered, again: bool) -> None:
            self._tell(node, answer)
            kept = before.refused or again or not answer.refused
            assert kept or self._forgets, "a coordinator has forgotten that the job is paused"
            self._waiting.popleft()
            if self._waiting or not self._forgets:
                node.kill()
            else:
                node.later(_LOOK_S, lambda: order(Pause(on=False), looked))
            if self._waiting:
                self._begin()

        def looked(answer: Ordered, _: bool) -> None:
            """The coordinator may have forgotten that the job goes on: its journal is of a time when it was paused."""
            if not answer.refused:
                self._tell(node, answer)
            node.later(_LOOK_S, lambda: order(Pause(on=False), looked))

        def order(order: Pause, heard: Callable[[Ordered, bool], None]) -> None:
            Given(node, order, heard)

        order(Pause(), paused)

    def _tell(self, node: Node, answer: Ordered) -> None:
        self._told.append(f"{node.world.now:.3f} {answer.text}")
