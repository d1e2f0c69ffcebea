"""One job, as its servers need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rallypoint.codec.build import ShardCodecStates
from rallypoint.codec.spec import has_state
from rallypoint.config import JobConfig, audits_of, cadence_of
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Shard, carried_in
from rallypoint.core.modes import StateHolder
from rallypoint.core.policy import Sync
from rallypoint.core.shard.clip import Rule
from rallypoint.core.shard.server import ServerPlan
from rallypoint.net.pool import BufferPool, BufferPools
from rallypoint.optim import InPlace

# ---- What a server's machine needs to know of a job ----


def plan_of(config: JobConfig, shards: Sequence[Shard]) -> ServerPlan:
    """The plan of a job with this configuration and these shards."""
    parameters = frozenset(s.index for s in shards if s.role != "buffers")
    waiting = frozenset(s.index for s in shards) if config.skips else parameters
    rule = Rule(
        config.clip if config.clips_on_servers else None, skips=config.nonfinite == "skip",
        stops=config.nonfinite == "stop", scaled=config.precision == "fp16",
    )  # fmt: skip
    return ServerPlan(
        policy=config.policy, expected=[config.contributors(s.role) for s in shards], measured=parameters,
        decides=waiting if config.decides else frozenset(), rule=rule, rounds=config.rounds,
        buffer_policy=Sync(quorum=1) if config.contributors("buffers") > 1 else None,
        compensates=config.compensation > 0, cadence=cadence_of(config, shards),
        audits=audits_of(config), carried=carried_in(shards), keyed=config.keyed,
    )  # fmt: skip


# ---- One job, as its servers need it ----


@dataclass
class ServerJob:
    """The record and the settings of a job, and the buffers for its payloads."""

    record: JobRecord
    config: JobConfig
    in_place: InPlace = field(default_factory=InPlace)  # what a worker of this process shares with it
    pools: BufferPools = field(default_factory=BufferPools)  # for tables, whose payloads have any length

    @cached_property
    def pool(self) -> BufferPool:
        """Buffers of one dense shard each."""
        return BufferPool(self.record.layout.largest_shard)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(self.record.layout.shards)

    @cached_property
    def plan(self) -> ServerPlan:
        return plan_of(self.config, self.shards)

    @cached_property
    def codec_states(self) -> ShardCodecStates | None:
        """The formats of codec states. None if no codec of the job has a state."""
        return ShardCodecStates(self.config) if any(map(has_state, self.config.codecs)) else None

    @property
    def most_waiting(self) -> tuple[int, int]:
        """The bytes that may wait for one worker, and for all: far more than workers ask for at once.

        A worker has asked for at most the parameters, or a whole state, and the codec states of its replicas.
        """
        model = sum(shard.nbytes for shard in self.shards)
        most = (64 << 20) + model * (8 if self.codec_states is None else 8 + 4 * self.config.replicas)
        return most, 4 * most + 2 * model * self.config.replicas

    @cached_property
    def versions_are_common(self) -> bool:
        """Do all workers get the same versions of a shard?"""
        return not self.followers_ask

    @cached_property
    def followers_ask(self) -> bool:
        """Do workers ask for parameters, for one replica at a time, instead of following every version?"""
        return self.config.clocks("parameters") > 0

    @cached_property
    def begins_whole(self) -> bool:
        """Do workers hold the state? Then one of them uploads all of it, with the optimizer's, in STATE frames, of any
        version. Else a worker uploads the initial parameters, of version 0."""
        return self.config.mode.holder is StateHolder.WORKERS

    def round_named(self, round: int) -> str:
        """Name a round in the user's words: a step, or the steps of the round."""
        steps = self.config.steps_of(round)
        return f"step {round}" if self.config.steps_per_round == 1 else f"steps {steps[0]} to {steps[-1]}"

    @cached_property
    def accounts(self) -> bool:
        """May contributions be folded or dropped? Then the servers report their counts."""
        return self.config.mode.accounts
