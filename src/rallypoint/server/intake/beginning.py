"""What a worker uploads so that a job can begin: parameters, or (AllReduce) a worker's whole state."""

from __future__ import annotations

from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.modes import Holder


class FirstValues:
    """Servers hold the state: a worker uploads the initial parameters, and the job begins at version 0."""

    def is_state(self, place: Shard) -> bool:
        """Is this shard uploaded as a STATE frame, with its optimizer state?"""
        return False

    def version(self, said: int) -> int:
        """The version that the job begins with, when the uploading worker says that it has version `said`."""
        return 0


class WholeState(FirstValues):
    """Workers hold the state: one of them uploads its state, which may be of a later version than 0."""

    def is_state(self, place: Shard) -> bool:
        return place.role == "parameters"

    def version(self, said: int) -> int:
        return said


_BEGINNINGS = {Holder.SERVERS: FirstValues, Holder.WORKERS: WholeState}


def beginning_of(config: JobConfig) -> FirstValues:
    """What is uploaded in a job with these settings."""
    return _BEGINNINGS[config.mode.holder]()
