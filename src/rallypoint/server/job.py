"""One job, as its servers need it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from rallypoint.codec.spec import has_state
from rallypoint.codec.state import ShardCodecStates
from rallypoint.config import JobConfig
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Shard
from rallypoint.core.shard.server import Plan
from rallypoint.net.pool import BufferPool, BufferPools
from rallypoint.server.plan import FirstValues, beginning_of, plan_of


@dataclass
class ServerJob:
    """The record and the settings of a job, and the buffers for its payloads."""

    record: JobRecord
    config: JobConfig
    pools: BufferPools = field(default_factory=BufferPools)  # for tables, whose payloads have any length

    @cached_property
    def pool(self) -> BufferPool:
        """Buffers of one dense shard each."""
        return BufferPool(self.record.layout.largest_shard)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All shards of the layout."""
        return tuple(self.record.layout.shards)

    @cached_property
    def plan(self) -> Plan:
        """The plan for the server's machine."""
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
    def beginning(self) -> FirstValues:
        """What a worker uploads so that the job can begin."""
        return beginning_of(self.config)

    def round_named(self, round: int) -> str:
        """Name a round in the user's words: a step, or the steps of the round."""
        steps = self.config.steps_of(round)
        return f"step {round}" if self.config.steps_per_round == 1 else f"steps {steps[0]} to {steps[-1]}"

    @cached_property
    def accounts(self) -> bool:
        """May contributions be folded or dropped? Then the servers report their counts."""
        return self.config.mode.accounts
