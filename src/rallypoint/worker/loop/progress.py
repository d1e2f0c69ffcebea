"""How far a run is, for whoever tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, as one worker knows it.

    Attributes:
        step: steps of training that the model has.
        steps: those that it will have.
        lead: this worker evaluates, or saves: it is the one to tell.
        metrics: of the last evaluation that it made.
    """

    step: int
    steps: int
    lead: bool
    metrics: Mapping[str, float]
