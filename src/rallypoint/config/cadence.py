"""The shards that each round updates, where rounds are staggered: by the periods of groups and by fragments."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.config.groups import own_group
from rallypoint.config.tree import JobConfig
from rallypoint.core.cadence import EVERY_ROUND, TOGETHER, Cadence, Period, cut_evenly, cycle, first_empty
from rallypoint.core.layout import Shard
from rallypoint.errors import ConfigError

_LONGEST_CYCLE = 1 << 12  # rounds


def cadence_of(config: JobConfig, shards: Sequence[Shard]) -> Cadence:
    """Return the shards that each round updates.

    A group with a `sync_every` has that period. All other parameters are cut into `fragments` runs of consecutive
    shards, of about equal size; each round updates one run.
    Buffers are updated in every round: they are small, and each of a replica's rounds starts with them. Raises
    ConfigError when there are more fragments than shards, or when a round would update nothing.
    """
    if config.local is None or not config.staggered:
        return TOGETHER
    fragments, size = config.local.fragments, config.steps_per_round
    own = {s.index: period for s in shards if (period := _own_period(config, s.group)) is not None}
    taking = [shard for shard in shards if shard.role == "parameters" and shard.index not in own]
    if len(taking) < fragments and (fragments > 1 or not own):
        raise ConfigError(
            f"fragments={fragments}, but the parameters are only {len(taking)} shards: use fewer, or smaller shards "
            "(shard_bytes)"
        )
    every = config.local.steps // size
    for shard, fragment in zip(taking, cut_evenly([s.nbytes for s in taking], fragments), strict=True):
        own[shard.index] = Period(every, (fragment + 1) * every // fragments - 1)
    periods = sorted(set(own.values()), key=lambda period: (period.every, period.first))
    _check_periods(periods, config)
    indices = {period: index for index, period in enumerate(periods)}
    period_of = tuple(indices[own[s.index]] if s.index in own else EVERY_ROUND for s in shards)
    return Cadence(tuple(periods), config.rounds, period_of)


def _own_period(config: JobConfig, group: int) -> Period | None:
    """When a group with a `sync_every` is due; None for the other groups."""
    own = own_group(config, group)
    if own is None or own.sync_every is None:
        return None
    size = config.steps_per_round
    return Period(own.sync_every // size, (own.sync_offset // size - 1) % (own.sync_every // size))


def _check_periods(periods: Sequence[Period], config: JobConfig) -> None:
    size = config.steps_per_round
    steps = ", ".join(str(every * size) for every in sorted({period.every for period in periods}))
    if cycle(periods) > _LONGEST_CYCLE:
        raise ConfigError(
            f"periods of {steps} steps come together only every {cycle(periods) * size} steps: use multiples of each "
            "other (sync_every, and the local steps)"
        )
    if (round := first_empty(periods)) is not None and round < config.rounds - 1:
        raise ConfigError(
            f"nothing would be synchronised after step {(round + 1) * size}, but with periods of {steps} steps and "
            f"these offsets there is a round every {size} steps (their greatest common divisor): let some group have "
            f"sync_every={size}, or use periods that are multiples of the shortest, and offsets that are too"
        )
