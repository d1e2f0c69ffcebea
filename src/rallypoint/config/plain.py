"""Whether a job's state is one that plain PyTorch training has too, and whether it goes step by step as that does."""

from __future__ import annotations

from rallypoint.config.tree import JobConfig
from rallypoint.core.modes import Clock, Contribution, Pace


def steps_plainly(config: JobConfig) -> bool:
    """True if each version is one step of `config.optimizer` with the mean gradient of all replicas.

    Then a snapshot has what a checkpoint of plain training has: parameters, and that optimizer's state.
    """
    rounds = config.mode.pace is Pace.ROUNDS and config.mode.contribution is Contribution.GRADIENT
    return rounds and config.quorum is None and not config.own_optimizer


def step_by_step(config: JobConfig) -> bool:
    """True if no replica begins a step before all have made the one before."""
    return config.mode.clock is Clock.STEP
