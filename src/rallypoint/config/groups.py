"""The optimizer group of a parameter, the group's settings and codec, and the rounds that update its shards."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import msgspec

from rallypoint.codec.spec import CodecSpec, PowerSGD, Raw
from rallypoint.config.tree import Group, JobConfig
from rallypoint.core.cadence import EVERY_ROUND, TOGETHER, Cadence, Period, cut_evenly, cycle, first_empty
from rallypoint.core.layout import MOST_SHARD_BYTES, WORD_BYTES, Shard, TensorSpec
from rallypoint.core.optimizer import Muon
from rallypoint.errors import ConfigError, ModelError

_LONGEST_CYCLE = 1 << 12  # rounds


class GroupSettings(msgspec.Struct, frozen=True):
    """The settings that one optimizer group is trained with."""

    weight_decay: float
    lr_scale: float


def group_of(config: JobConfig, name: str, dimensions: int) -> int:
    """Return a parameter's optimizer group: 0 decayed, 1 not decayed (norms, biases), 2 and up the user's own."""
    for index, group in enumerate(config.groups):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group.match):
            return 2 + index
    return 0 if config.decay_1d or dimensions >= 2 else 1


def of_group(config: JobConfig, group: int) -> JobConfig:
    """Return the job's settings with the group's own optimizer, if it has one: a key of a store may."""
    own = own_group(config, group)
    if own is None or own.optimizer is None:
        return config
    return msgspec.structs.replace(config, optimizer=own.optimizer)


def own_group(config: JobConfig, group: int) -> Group | None:
    """Return the user's own group that this optimizer group is of; None for the others."""
    return config.groups[group - 2] if group >= 2 else None


def settings_of(config: JobConfig, group: int) -> GroupSettings:
    """Return the settings that the optimizer group is trained with."""
    decay = of_group(config, group).optimizer.weight_decay
    if (own := own_group(config, group)) is not None:
        return GroupSettings(decay if own.weight_decay is None else own.weight_decay, own.lr_scale)
    return GroupSettings(decay if group == 0 else 0.0, 1.0)


def settings_applied(config: JobConfig, group: int) -> GroupSettings:
    """Return the settings of the group on the servers.

    Under local steps the groups' settings apply on the workers only.
    """
    if config.local is not None:
        return GroupSettings(config.applied.weight_decay, 1.0)
    return settings_of(config, group)


def codec_of(config: JobConfig, group: int) -> CodecSpec:
    """Return the codec for contributions to the shards of an optimizer group; buffers (group -1) go raw."""
    if group < 0:
        return Raw()
    own = own_group(config, group)
    return config.codec if own is None or own.codec is None else own.codec


def matrices_of(config: JobConfig, specs: Iterable[TensorSpec]) -> frozenset[str]:
    """Return the names of the parameters that Muon steps, each of which is a shard of its own.

    Raises ModelError for one that is larger than the largest shard, and for a pattern that matches no parameter.
    """
    muon = config.optimizer
    if not isinstance(muon, Muon):
        return frozenset()
    specs = [spec for spec in specs if spec.group >= 0]
    for pattern in muon.adamw:
        if not any(fnmatch.fnmatchcase(spec.name, pattern) for spec in specs):
            names = ", ".join(spec.name for spec in specs[-3:])
            raise ModelError(
                f"rp.Muon(adamw=...): no trained parameter's name matches {pattern!r}. Of tied parameters the first "
                f"name counts, as in model.named_parameters(); the last ones here are {names}"
            )
    matrices = [spec for spec in specs if len(spec.shape) == 2]
    found = [spec for spec in matrices if not any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in muon.adamw)]
    for spec in found:
        if spec.numel * WORD_BYTES > MOST_SHARD_BYTES:
            raise ModelError(
                f"{spec.name} has {spec.numel * WORD_BYTES >> 20} MiB, and rp.Muon steps a matrix of at most "
                f'{MOST_SHARD_BYTES >> 20} MiB: give it to AdamW, rp.Muon(adamw=("{spec.name}",))'
            )
    return frozenset(spec.name for spec in found)


def ranks_of(config: JobConfig) -> dict[int, int]:
    """Return the PowerSGD rank of each optimizer group that uses it. The layout is cut accordingly."""
    codecs = {group: codec_of(config, group) for group in range(2 + len(config.groups))}
    return {group: codec.rank for group, codec in codecs.items() if isinstance(codec, PowerSGD)}


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
