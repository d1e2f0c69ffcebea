"""What a server's machine needs to know of a job."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.config import JobConfig, audits_of, cadence_of
from rallypoint.core.layout import Shard, carried_in
from rallypoint.core.modes import Holder
from rallypoint.core.policy import Sync
from rallypoint.core.shard.clip import Rule
from rallypoint.core.shard.server import Plan


def plan_of(config: JobConfig, shards: Sequence[Shard]) -> Plan:
    """The plan of a job with this configuration and these shards."""
    parameters = frozenset(s.index for s in shards if s.role != "buffers")
    waiting = frozenset(s.index for s in shards) if config.skips else parameters
    rule = Rule(
        config.clip if config.clips_on_servers else None, skips=config.nonfinite == "skip",
        stops=config.nonfinite == "stop", scaled=config.precision == "fp16",
    )  # fmt: skip
    return Plan(
        policy=config.policy, expected=[config.contributors(s.role) for s in shards], measured=parameters,
        decides=waiting if config.decides else frozenset(), rule=rule, rounds=config.rounds,
        buffer_policy=Sync(quorum=1) if config.contributors("buffers") > 1 else None,
        compensates=config.compensation > 0, cadence=cadence_of(config, shards),
        audits=audits_of(config), carried=carried_in(shards), keyed=config.keyed,
    )  # fmt: skip


# ---- What a worker uploads so that a job can begin: parameters, or (AllReduce) a worker's whole state ----


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
