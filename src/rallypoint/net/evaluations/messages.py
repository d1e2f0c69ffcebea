"""Control messages about evaluations, from a worker to the coordinator."""

from __future__ import annotations

from typing import Annotated

import msgspec

from rallypoint.core.deciding.decisions import StopWhen
from rallypoint.core.typed import MOST_METRICS, Index, Name
from rallypoint.core.view import ViewNumber
from rallypoint.net.greetings import AnyMessage

Figures = Annotated[dict[Name, float], msgspec.Meta(max_length=MOST_METRICS)]
MOST_RULES = 100
Period = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]


class Metrics(AnyMessage, frozen=True):
    """The result of an evaluation after `step` steps of training, in that generation."""

    step: Index
    values: Figures
    generation: ViewNumber = ViewNumber()


class Evaluates(AnyMessage, frozen=True):
    """The evaluations of this worker's script: see `core.cluster.events.Evaluates`."""

    periods: Annotated[tuple[Period, ...], msgspec.Meta(max_length=100)]
    high: bool = False
    stops: Annotated[tuple[StopWhen, ...], msgspec.Meta(max_length=MOST_RULES)] = ()


class Evaluated(AnyMessage, frozen=True):
    """This worker has run all evaluations that are due with `version`; `values` are all their figures."""

    version: Index
    generation: ViewNumber
    values: Figures


class NotKept(AnyMessage, frozen=True):
    """This worker was to evaluate `version`, and no server has it any more."""

    version: Index
    generation: ViewNumber
