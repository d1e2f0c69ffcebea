"""What a server's machine needs to know of a job."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.config import JobConfig, audits_of, cadence_of
from rallypoint.core.layout import Shard, carried_in
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
