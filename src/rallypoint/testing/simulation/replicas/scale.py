"""The loss scale of a simulated job with fp16: a shard of its own, the last one of the buffers, as a number."""

from __future__ import annotations

import math

from rallypoint.core.optimizer import LossScaling

SCALING = LossScaling(init_scale=1024.0, growth_interval=3)
_APART = 100  # the content is this times the scale's exponent (of two, counted from -500), plus the steps applied
_LOWEST = -500
FIRST = _APART * (10 - _LOWEST)


def scale_of(content: int) -> float:
    """What the losses of a step are multiplied by, when this is the content of the scale's shard."""
    return math.ldexp(1.0, content // _APART + _LOWEST)


def after(content: int, *, skipped: bool) -> int:
    """The content of the scale's shard after a step."""
    scale, applied = SCALING.after(scale_of(content), content % _APART, skipped=skipped)
    return _APART * (math.frexp(scale)[1] - 1 - _LOWEST) + applied
