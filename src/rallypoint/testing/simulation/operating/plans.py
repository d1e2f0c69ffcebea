"""When a simulated operator orders something, and what else happens then."""

from __future__ import annotations

import random

# The kinds of faults that are none: they are orders.
PAUSE, RESCALE = "the operator pauses", "the operator changes the learning rate"
ORDERS = frozenset({PAUSE, RESCALE})

Event = tuple[float, str, str, float]  # the fields of `simulation.plan.Fault`

# While the job is paused, most of all: what must not be forgotten, and what goes back.
_IN_A_PAUSE = (
    ("crash", "coordinator"), ("crash", "coordinator"), ("crash", "server"), ("crash", "server"), ("crash", "worker"),
    ("everything", "server"), ("resize", "launcher"), ("half said", "coordinator"), ("drop", "worker"),
    ("leave", "server"), ("join", "worker"),
)  # fmt: skip

# While servers are asked from which version on a rate may change.
_AROUND_A_RATE = (
    ("crash", "coordinator"), ("crash", "coordinator"), ("half said", "coordinator"), ("crash", "server"),
    ("crash", "server"), ("pause", "server"), ("long pause", "server"), ("drop", "server"), ("partition", "server"),
    ("leave", "server"), ("join", "server"), ("everything", "server"), ("crash", "worker"), ("journal full", "server"),
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


def rates(seed: int, *, kills: bool, fills: bool) -> list[Event]:
    """Up to four changes of the learning rate. A server is often slow to answer, and the others are in the middle of a
    step; with `kills`, faults strike at about the same time, most of all; with `fills`, the journal is full too."""
    rng, events = random.Random(seed * 7919 + 15), list[Event]()
    for _ in range(rng.randint(1, 4)):
        at = rng.uniform(0.3, 4.0)
        events.append((at, RESCALE, "operator", 0.0))
        if rng.random() < 0.7:
            events.append((at, "pause", "server", rng.uniform(0.1, 1.5)))
        for kind, role in rng.sample(_AROUND_A_RATE, rng.randint(0, 3)) if kills else ():
            events.append((at + rng.uniform(-0.02, rng.choice([0.03, 0.5])), kind, role, rng.uniform(0.1, 5.0)))
    return [event for event in events if fills or event[1] != "journal full"]
