"""Steps a learning-rate schedule up to where the job is, in a process that is started again."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rallypoint.errors import ConfigError


class Replay:
    """Remembers the rates with which `schedule` begins; `to` steps it from them.

    A torch schedule computes a rate from the one before, and the optimizer of a process that is started again already
    has the rate of the step in progress. Raises ConfigError for a schedule whose steps need a metric.
    """

    def __init__(self, schedule: LRScheduler) -> None:
        if isinstance(schedule, ReduceLROnPlateau):
            raise ConfigError(
                f"the schedule is a {type(schedule).__qualname__}, whose steps depend on metrics that a process that "
                "is started again has not seen: use a schedule by steps"
            )
        self._schedule = schedule
        self._groups = [_settings(group) for group in schedule.optimizer.param_groups]

    def to(self, steps: int) -> None:
        """Step the schedule so many times, from its start."""
        if steps == 0:
            return
        for group, first in zip(self._schedule.optimizer.param_groups, self._groups, strict=True):
            group.update(first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the optimizer has not stepped in this process
            for _ in range(steps):
                self._schedule.step()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
