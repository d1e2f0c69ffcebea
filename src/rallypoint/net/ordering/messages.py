"""An operator's orders, from an observer to the coordinator, and its answers. (Sizes, snapshots: `messages.py`.)"""

from __future__ import annotations

from rallypoint.core.typed import Name
from rallypoint.net.greetings import AnyMessage, Shown


class Order(AnyMessage, frozen=True):
    """Something that an operator orders. The coordinator answers all observers with `Ordered`."""


class Pause(Order, frozen=True):
    """Compute no further step for now; with ``on=False``: go on."""

    on: bool = True


class StopWanted(Order, frozen=True):
    """End the job with the step that is being computed, as a script's ``run.stop(reason)`` does. To workers too."""

    reason: Name = ""


class Drain(Order, frozen=True):
    """Tell a worker or a server to leave. The coordinator passes it on to all observers: the launcher tells it."""

    member: Name


AnyOrder = Pause | StopWanted | Drain


class Ordered(Shown, frozen=True):
    """What has come of an order of this kind, as a sentence; `refused`: nothing."""

    kind: Name
    text: str
    refused: bool = False


OfOrders = AnyOrder | Ordered
