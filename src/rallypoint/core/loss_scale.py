"""Dynamic loss scaling for fp16: how the scale follows from the steps that were applied and skipped.

The scale of step t is a part of version t, like a buffer of the model: two words beside the buffers, `ENTRY` in the
layout. So it has a primary and a backup, is in snapshots, and reaches every worker with the version, before the
backward pass that needs it. The server that holds it tells it to the others with its measure of the step's sums
(`shard/clip.py`).
"""

from __future__ import annotations

import math

import msgspec

ENTRY = "rallypoint.loss_scale"  # the layout's name for (scale, steps applied since it has changed)
_LARGEST, _SMALLEST = 2.0**127, 2.0**-126  # fp32 holds these, and all powers of two between them


class LossScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule and the defaults of torch.amp.GradScaler (Micikevicius et al., 2018, "Mixed Precision Training").

    A step whose gradients are not finite is skipped, and the scale is multiplied by `backoff_factor`. After
    `growth_interval` steps in a row that were applied, it is multiplied by `growth_factor`. `init_scale` and the
    factors are powers of two: then scaling rounds nothing.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def after(self, scale: float, applied: int, *, skipped: bool) -> tuple[float, int]:
        """Return the scale after a step, and the steps applied since it has changed."""
        if skipped:
            return max(_SMALLEST, scale * self.backoff_factor), 0
        if applied + 1 < self.growth_interval:
            return scale, applied + 1
        return min(_LARGEST, scale * self.growth_factor), 0


def is_power_of_two(value: float) -> bool:
    """True for 2, 65536 and 0.5; False for 3, 0 and -2, and for what fp32 does not hold."""
    return _SMALLEST <= value <= _LARGEST and math.frexp(value)[0] == 0.5
