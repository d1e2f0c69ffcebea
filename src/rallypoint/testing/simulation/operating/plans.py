"""When a simulated operator orders something, and what else happens then."""

from __future__ import annotations

import random

# A kind of fault that is none: it is an order.
PAUSE = "the operator pauses"

Event = tuple[float, str, str, float]  # the fields of `simulation.plan.Fault`

# While the job is paused, most of all: what must not be forgotten, and what goes back.
_IN_A_PAUSE = (
    ("crash", "coordinator"), ("crash", "coordinator"), ("crash", "server"), ("crash", "server"), ("crash", "worker"),
    ("everything", "server"), ("resize", "launcher"), ("half said", "coordinator"), ("drop", "worker"),
    ("leave", "server"), ("join", "worker"),
)  # fmt: skip


def pauses(seed: int, *, kills: bool) -> list[Event]:
    """Up to three pauses; with `kills`, faults strike in them."""
    rng, events = random.Random(seed * 7919 + 14), list[Event]()
    for _ in range(rng.randint(1, 3)):
        at, seconds = rng.uniform(0.6, 3.5), rng.uniform(0.3, 5.0)
        events.append((at, PAUSE, "operator", seconds))
        for kind, role in rng.sample(_IN_A_PAUSE, rng.randint(0, 3)) if kills else ():
            events.append((at + rng.uniform(0.0, seconds), kind, role, rng.uniform(0.1, 5.0)))
    return events
