"""The record of a job that goes on: as a snapshot or a journal has it, and with the settings that may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rallypoint.config.keys import GONE, MOVED
from rallypoint.config.resolve import merged, parse, record_of
from rallypoint.config.tree import JobConfig
from rallypoint.core.job import JobRecord
from rallypoint.errors import ConfigError

_SAMPLES = "it decides which samples every step takes, and the steps before the snapshot have taken theirs"
_LAYOUT = "the snapshot's shards are cut by it"
_MODE = "a snapshot can only go on in the mode in which it was taken"
_FIXED = {
    "replicas": _SAMPLES, "batch": _SAMPLES, "seed": _SAMPLES, "reading.order": _SAMPLES,
    "network.shard_bytes": _LAYOUT, "groups": _LAYOUT, "decay_1d": _LAYOUT, "optimizer.adamw": _LAYOUT,
    "precision": "the loss scale of fp16 is in the snapshot, or is not",
    "loss_scale.init_scale": "it is for the first step, which the job has made",
    "codec": "what workers have not sent yet is in the snapshot, as this codec keeps it",
    "sync": _MODE, "sync.outer.type": _MODE, "keyed": _MODE,
    "optimizer.type": "the snapshot holds the state of this optimizer",
    "optimizer.initial_accumulator_value": "it is for the first step, which the job has made",
    "average.type": "the snapshot holds the other average: leave it out first (average=none)",
    "average.start": "it is for the first version of the mean; set it when the average begins",
    "table_std": "it is for the tables' first values, which the job has made",
}  # fmt: skip
_SHOWN = 8  # values of a list that are named in a sentence
_FREE = ("sync.outer",)  # within a fixed part
_UNUSED: tuple[Any, ...] = (None, 0, "", "none", "iteration", [], (), {})  # what settings that are gone were by default


class Change(msgspec.Struct, frozen=True):
    """A setting that differs from the one in the snapshot: ``Change("optimizer.lr", 0.001, 0.0001)``."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} is {_shown(self.after)} (it was {_shown(self.before)})"


def kept_record(data: Mapping[str, Any], source: str) -> JobRecord:
    """Return the record in `data`, which is plain data.

    `source` says where it was stored; error messages begin with it.

    A record from before modes had descriptions has none, and would be read as one of `rp.Sync()`. So everything that
    follows from its configuration and its layout is computed again. Raises msgspec.ValidationError when `data` is no
    record, ConfigError when such an old job cannot continue: in its mode, or with a setting that is `GONE`.
    """
    record = msgspec.convert(data, JobRecord)
    record = msgspec.structs.replace(record, config=_without_gone(_in_groups(record.config), source))
    return record if "mode" in data else _completed(record, source)


def _in_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, those that earlier versions had by themselves in their groups."""
    tree = {name: value for name, value in config.items() if name not in MOVED or isinstance(value, Mapping)}
    for name, value in config.items():
        if name not in tree:
            group, _, inner = MOVED[name].partition(".")
            tree = merged(tree, {group: {inner: value}})
    return tree


def _without_gone(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The settings without those that this version has no more. ConfigError if the job used one of them."""
    if used := sorted(name for name in GONE.keys() & config.keys() if config[name] not in _UNUSED):
        raise ConfigError(f"{source} is of a job with {used[0]}, which is gone: {GONE[used[0]]}")
    return {name: value for name, value in config.items() if name not in GONE}


def _completed(record: JobRecord, source: str) -> JobRecord:
    try:
        new = _with(parse(record.config), record)
    except ConfigError as error:
        raise ConfigError(f"{source} is of a job that cannot go on: {error}") from None
    if new.rounds != record.rounds:
        raise ConfigError(
            f"{source} is of a job of {record.rounds} rounds, and this version of Rallypoint makes {new.rounds} of its "
            "settings: use the version that wrote it"
        )
    return new


def _with(config: JobConfig, record: JobRecord) -> JobRecord:
    """The record with these settings, as if it came from a worker (lists for tuples): members compare settings."""
    new = record_of(config, record.layout, record.frozen, data=record.data, tied=record.tied, threads=record.threads)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=JobRecord)


def changed_record(record: JobRecord, overrides: Mapping[str, Any], version: int) -> tuple[JobRecord, list[Change]]:
    """Return the record of a job that goes on from a snapshot of `version` with these settings, and what they change.

    `overrides` are nested, as `overrides_from` returns them; those that say what the record says change nothing. Raises
    ConfigError for a setting that cannot change any more, or that makes no sense.
    """
    # An earlier version of the package may have known fewer settings. Workers propose all that there are today, so the
    # record must have them too
    before = parse(merged(msgspec.to_builtins(JobConfig()), record.config))
    config = parse(merged(msgspec.to_builtins(before), overrides))
    changes = list(_differences(msgspec.to_builtins(before), msgspec.to_builtins(config)))
    for change in changes:
        if why := _why_not(change, config):
            was, wanted = _shown(change.before), _shown(change.after)
            raise ConfigError(f"{change.key} is {was} and cannot become {wanted}: {why}")
    steps = before.steps_at(version)
    if changes and config.rounds <= version:
        raise ConfigError(f"steps is {config.steps}, but the job has made {steps} already: use a higher number")
    if config.steps_at(version) != steps:
        raise ConfigError(
            f"steps is {before.steps} and cannot become {config.steps}: the last round ended with it, after "
            f"{steps % config.steps_per_round} of {config.steps_per_round} steps, and the others would never be "
            "computed; begin a new job with the model (rallypoint export)"
        )
    if not changes and not _fewer(record.config, msgspec.to_builtins(config)):
        return record, []
    return _with(config, record), changes


def _why_not(change: Change, config: JobConfig) -> str:
    """Return why a setting cannot change when a job goes on; "" if it can."""
    if config.own_optimizer and change.key.startswith("optimizer"):
        return "workers step the script's own optimizer, so this setting has no effect: change it in the script"
    if change.key.startswith("optimizer") and any(group.optimizer is not None for group in config.groups):
        return "each key of the store has an optimizer of its own, which the script says"
    if change.key == "steps" and config.staggered:
        return "rounds are staggered, and which shards the snapshot has at which version depends on it"
    parts = change.key.split(".")
    path = [".".join(parts[: n + 1]) for n in range(len(parts))]
    if change.key == "precision" and "fp16" not in (change.before, change.after):
        return ""
    reasons = [_FIXED[key] for key in path if key in _FIXED]
    free = any(key in _FREE for key in path) and change.key not in _FIXED
    return "" if free or not reasons else reasons[-1]


def _differences(before: Any, after: Any, path: str = "") -> Iterator[Change]:
    """Yield the changes, each as deep as both sides have parts: ``optimizer.lr``, not all of ``optimizer``."""
    if isinstance(before, Mapping) and isinstance(after, Mapping) and before.get("type") == after.get("type"):
        for key in sorted(before.keys() | after.keys()):
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif isinstance(before, Mapping) and isinstance(after, Mapping) and not path.endswith(".lr"):
        yield Change(f"{path}.type", before.get("type"), after.get("type"))
    elif _plain(before) != _plain(after):
        yield Change(path, before, after)


def _fewer(settings: Any, full: Any) -> bool:
    """True if `full` has settings, at any depth, that `settings` lacks."""
    if not isinstance(settings, Mapping) or not isinstance(full, Mapping):
        return False
    return bool(full.keys() - settings.keys()) or any(_fewer(settings[key], full[key]) for key in full)


def _plain(value: Any) -> Any:
    """Return the value with lists for tuples: one side may have come over the network."""
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping) and "type" in value:
        rest = ", ".join(f"{key}={_shown(part)}" for key, part in value.items() if key != "type")
        return f"{value['type']}({rest})"
    if isinstance(value, list | tuple) and len(value) > _SHOWN:
        return f"{len(value)} values, {value[0]} to {value[-1]}"
    return str(value)
