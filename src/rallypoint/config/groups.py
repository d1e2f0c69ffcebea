"""The optimizer group of a parameter, and the group's settings and codec."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import msgspec

from rallypoint.codec.spec import CodecSpec, PowerSGD, Raw
from rallypoint.config.tree import Group, JobConfig
from rallypoint.core.layout import MOST_SHARD_BYTES, WORD_BYTES, TensorSpec
from rallypoint.core.optimizer import Muon
from rallypoint.errors import ModelError


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
