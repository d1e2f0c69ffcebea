"""What moves in a simulated job in place of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Content = Any  # an int; in a streaming job the frozenset of the contributions that made it
GARBAGE: Content = -1


@dataclass(frozen=True)
class State:
    """Under AllReduce a shard's whole state, as a worker has brought it."""

    content: Content


@dataclass(frozen=True)
class Mean:
    """Under AllReduce the mean of a step's contributions; None: the step changes nothing."""

    content: Content
