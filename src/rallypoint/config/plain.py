"""Whether a job's state is one that plain PyTorch training has too."""

from __future__ import annotations

from rallypoint.config.tree import JobConfig
from rallypoint.core.modes import Contribution, Pace


def steps_plainly(config: JobConfig) -> bool:
    """True if each version is one step of `config.optimizer` with the mean gradient of all replicas.

    Then a snapshot has what a checkpoint of plain training has: parameters, and that optimizer's state.
    """
    rounds = config.mode.pace is Pace.ROUNDS and config.mode.contribution is Contribution.GRADIENT
    return rounds and config.quorum is None and not config.own_optimizer
