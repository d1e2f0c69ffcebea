"""What a worker uploads so that a job can begin: first values, or (AllReduce) a worker's whole state."""

from __future__ import annotations

from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.modes import Holder


class FirstValues:
    """Servers hold the state: the parameters' first values come, and the job begins at version 0."""

    def is_state(self, place: Shard) -> bool:
        """Does this shard come as a STATE frame, with its optimizer's state?"""
        return False

    def version(self, said: int) -> int:
        """The version that the job begins with when the worker that uploads it says `said`."""
        return 0


class WholeState(FirstValues):
    """Workers hold the state: one of them uploads what it has, which may be of a later version."""

    def is_state(self, place: Shard) -> bool:
        return place.role == "parameters"

    def version(self, said: int) -> int:
        return said


_BEGINNINGS = {Holder.SERVERS: FirstValues, Holder.WORKERS: WholeState}


def beginning_of(config: JobConfig) -> FirstValues:
    """What is uploaded in a job with these settings."""
    return _BEGINNINGS[config.mode.holder]()
