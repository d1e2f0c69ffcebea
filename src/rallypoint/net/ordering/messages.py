"""An operator's orders, from an observer to the coordinator, and its answers. (Sizes, snapshots: `messages.py`.)"""

from __future__ import annotations

from typing import Annotated

import msgspec

from rallypoint.core.typed import Count, Index, Name, Seconds
from rallypoint.core.view import ViewNumber
from rallypoint.net.greetings import AnyMessage, Shown

Factor = Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)]
Product = Annotated[float, msgspec.Meta(gt=0.0, le=1e12)]  # of factors, rounded


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


class SnapshotEvery(Order, frozen=True):
    """Take a snapshot every so many steps of training, and every so many seconds; 0: not by that. The coordinator tells
    all observers the period that counts."""

    steps: Count = 0
    seconds: Seconds = 0.0


class LearningRate(Order, frozen=True):
    """Multiply the learning rate by `factor` from now on: from one version on, which `RateScaled` says."""

    factor: Factor


AnyOrder = Pause | StopWanted | Drain | SnapshotEvery | LearningRate


class Ordered(Shown, frozen=True):
    """What has come of an order of this kind, as a sentence; `refused`: nothing."""

    kind: Name
    text: str
    refused: bool = False


class RateAwaited(AnyMessage, frozen=True):
    """From a server, under view `number`, which changes the learning rate: see `core.shard.ordering.hold`."""

    number: ViewNumber
    at: Index


class RateScaled(Shown, frozen=True):
    """To observers: from `step` on the learning rate is multiplied by `factor`, and with earlier orders by `scale`."""

    text: str
    step: Index
    factor: Factor
    scale: Product


OfOrders = AnyOrder | Ordered | RateAwaited | RateScaled
