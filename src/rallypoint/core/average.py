"""Averages of the weights as data: servers keep one beside the parameters, for evaluation and export."""

from __future__ import annotations

import msgspec

from rallypoint.core.settings import Settings


class EMA(msgspec.Struct, metaclass=Settings, frozen=True, tag="ema", forbid_unknown_fields=True):
    """An exponential moving average: average = decay * average + (1 - decay) * parameters, after every update.

    The bytes are those of torch's AveragedModel with ``get_ema_multi_avg_fn(decay)``, updated after every step: the
    first update copies the parameters.
    """

    decay: float = 0.999


class SWA(msgspec.Struct, metaclass=Settings, frozen=True, tag="swa", forbid_unknown_fields=True):
    """The mean of the parameters after updates `start`, `start` + `every`, ... (Izmailov et al., 2018).

    The bytes are those of torch's AveragedModel, as it is by default on a CPU, updated after these steps.
    """

    start: int = 0
    every: int = 1


Average = EMA | SWA


def takes(average: Average, version: int) -> bool:
    """Does the average take the parameters of this version? It counts updates: 1 after the first."""
    if isinstance(average, EMA):
        return True
    first = max(1, average.start)
    return version >= first and (version - first) % average.every == 0
