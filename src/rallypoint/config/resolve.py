"""Merges the script's settings, a file and dotted overrides into a configuration, and makes the record of a job."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.config.checks import check, features_with, wrong_value
from rallypoint.config.keys import GONE, GROUPS, check_keys
from rallypoint.config.tree import JobConfig, cadence_of
from rallypoint.core.job import DataIdentity, JobRecord
from rallypoint.core.layout import Layout
from rallypoint.core.modes import Feature
from rallypoint.core.modes.table import of_another_mode, refusal
from rallypoint.core.policy import AllReduce
from rallypoint.core.typed import said, written
from rallypoint.errors import ConfigError, Explained, meant


def resolve(settings: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> JobConfig:
    """Return the configuration from the script's `settings` and the launcher's nested `overrides`.

    Raises ConfigError naming the key when one is unknown, has the wrong type, or makes no sense.
    """
    tree = msgspec.to_builtins(JobConfig())
    for key, value in settings.items():
        nested = _nested(key, value)
        tree = merged(tree, nested) if key.partition(".")[0] in GROUPS else tree | nested
    tree = merged(tree, overrides or {})
    if tree["memory"]["hold"] == "bf16":
        chosen = {*settings, *(overrides or {})}
        tree |= {key: {"type": "bf16"} for key in ("codec", "down") if key not in chosen}
    return parse(tree)


def names_of(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the settings that are given, and of those in groups: ``network`` and ``network.window``."""
    nested = [(key, _nested(key, value)) for key, value in settings.items()]
    inner = {f"{group}.{name}" for _, tree in nested for group, part in tree.items() if isinstance(part, Mapping)
             for name in part}
    return {*(key.partition(".")[0] for key in settings), *inner}


def _nested(key: str, value: Any) -> dict[str, Any]:
    """A setting of a script as nested data. One of a group may be given alone, under ``network.window``; of a group
    (``network=rp.Network(window=8)``) those count that the script has said."""
    group, _, name = key.partition(".")
    if name:
        check_keys({group: {name: value}})
        return {group: {name: _as_data(key, value)}}
    if key in GROUPS and isinstance(value, Mapping):
        check_keys({key: value})
    return {key: _as_data(key, said(value) if type(value) in GROUPS.values() else value)}


def parse(data: Mapping[str, Any]) -> JobConfig:
    """Return the configuration in a job record. Raises ConfigError when it is invalid."""
    sync = data.get("sync")
    if isinstance(sync, Mapping) and (why := of_another_mode(sync)):
        raise ConfigError(why)
    if sentence := wrong_value(data):
        raise ConfigError(sentence)
    try:
        config = msgspec.convert(data, JobConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the job's configuration is wrong: {error}") from None
    check(config)
    return config


def record_of(
    config: JobConfig, layout: Layout, frozen: Mapping[str, str] | None = None, *,
    data: DataIdentity | None = None, tied: Mapping[str, str] | None = None, threads: int = 0,
) -> JobRecord:  # fmt: skip
    """Return what the members of the job must agree on. Raises ConfigError when the model does not fit the settings."""
    features = tuple(sorted(features_with(config, layout), key=list(Feature).index))
    return JobRecord(
        msgspec.to_builtins(config), layout, config.rounds, dict(frozen or {}), config.steps_per_round,
        cadence_of(config, layout.shards).written, config.mode, features, data or DataIdentity(), dict(tied or {}),
        threads,
    )  # fmt: skip


def with_own_optimizer(config: JobConfig, kind: str, overrides: Mapping[str, Any] | None = None) -> JobConfig:
    """Return the configuration of a job whose script has its own optimizer of class `kind`; "": it has none.

    Raises ConfigError where workers step no optimizer, the configuration says something else, or the launcher's
    `overrides` set something that the job's own optimizer would have: it is not stepped. Raises it too for what is set
    by other calls than `job.train`.
    """
    if config.keyed:
        raise ConfigError("keyed is set by job.store: leave it out of job.train")
    if Feature.SUMS in config.features:
        raise ConfigError("optimizer.type=sum is for loops of a script's own (bridges): use another optimizer")
    if kind and (why := refusal(config.mode.name, {Feature.OWN_OPTIMIZER})):
        raise ConfigError(why)
    if config.own_optimizer not in ("", kind):
        raise ConfigError(f"sync.own is {config.own_optimizer}: leave it to job.train, which has own_optimizer")
    if not kind:
        return config
    if "optimizer" in (overrides or {}):
        raise ConfigError(
            f"{_first_key(overrides or {}, 'optimizer')} is set, and workers step the script's own_optimizer= instead: "
            "change it in the script, or leave the setting out"
        )
    assert isinstance(config.sync, AllReduce)
    return parse(msgspec.to_builtins(msgspec.structs.replace(config, sync=AllReduce(own=kind))))


def _first_key(settings: Mapping[str, Any], key: str) -> str:
    """The whole name of the first setting below `key`, as ``optimizer.lr``."""
    inner = settings[key]
    return f"{key}.{_first_key(inner, next(iter(inner)))}" if isinstance(inner, Mapping) and inner else key


def overrides_from(file: Path | None, dotted: Sequence[str]) -> dict[str, Any]:
    """Return nested overrides from a TOML file and `key.key=value` texts (values are TOML; a bare word is a string)."""
    tree: dict[str, Any] = {}
    if file is not None:
        with Explained(ConfigError, f"the configuration file {file} cannot be read", of=(OSError, ValueError)):
            tree = tomllib.loads(file.read_text())
    for text in dotted:
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write it as key=value, such as steps=200 or optimizer.lr=1e-3")
        nested: Any = _toml_value(value)
        for key in reversed(path.strip().split(".")):
            nested = {key: nested}
        tree = merged(tree, nested)
    return tree


_INSTEAD = {
    "batch_size": "a replica's samples at a step are batch=",
    "betas": "give it to the optimizer, optimizer=rp.AdamW(betas=(0.9, 0.99))",
    "device": "the job trains where the model is: move that there first",
    "drop_last": "there is no last batch: epochs run into one another",
    "epochs": "give steps=; an epoch is len(dataset) / (replicas * batch) of them",
    "gradient_accumulation_steps": "give accumulate=",
    **dict.fromkeys(("grad_clip", "max_grad_norm"), "give clip="),
    **dict.fromkeys(("learning_rate", "lr"), "give it to the optimizer, optimizer=rp.AdamW(lr=1e-3)"),
    "loss_fn": "the loop computes the loss, and gives it to micro.backward",
    "momentum": "give it to the optimizer, optimizer=rp.SGD(lr=0.1, momentum=0.9)",
    "num_workers": "give loader=rp.Loader(workers=4), or a DataLoader in place of the data set",
    "scheduler": "give the optimizer a schedule, optimizer=rp.AdamW(lr=rp.cosine(1e-3, warmup=100))",
    "shuffle": "the order is shuffled, by seed=; reading.order=\"sequential\" is the data set's own",
    "weight_decay": "give it to the optimizer, optimizer=rp.AdamW(weight_decay=0.1)",
}


_OWN = "with sync=rp.AllReduce() give it as own_optimizer="
_NO_SPEC = {
    "Adafactor": f"it needs the rows and columns of a whole matrix, and a server has a piece of one; {_OWN}",
    "LBFGS": "one step of it computes the loss and the whole gradient several times; use rp.AdamW",
    "Muon": f'they have their own, rp.Muon(lr=1e-3, adamw=("*embed*", "head.*")); or, {_OWN}',
    "Rprop": "it follows the signs of the whole data set's gradient, and those of one batch are noise; use rp.RMSprop",
    "SparseAdam": "tables (embeddings with sparse=True) are stepped by it where the job has optimizer=rp.Adam()",
}


def _as_data(key: str, value: Any) -> Any:
    if key in GONE:
        raise ConfigError(f"{key} is gone: {GONE[key]}")
    if key.partition(".")[0] not in JobConfig.__struct_fields__:
        close = _INSTEAD.get(key) or meant(key, JobConfig.__struct_fields__).removeprefix(": ")
        hint = close or "docs/settings.md has a table of its settings"
        raise ConfigError(f"job.train has an unknown field `{key}`: {hint}")
    try:
        return msgspec.to_builtins(value)
    except TypeError:
        raise ConfigError(_not_data(key, value)) from None


def _not_data(key: str, value: Any) -> str:
    """The error message for a setting that is a live object. Settings must be data, because servers and other workers
    read them."""
    for place, inner in _inside(value):
        try:
            msgspec.to_builtins(inner)
        except TypeError:
            return _not_data(f"{key}{place}", inner)
    if isinstance(value, type):
        return _a_class(key, value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if key.endswith(".lr"):
        return (
            f"{key} is a {kind}: servers run schedules, so they are data: rp.cosine(1e-3, warmup=100), rp.linear, "
            "rp.step_decay, rp.constant, or of any function rp.tabulated(lambda step: ..., steps=1000); or, with "
            "sync=rp.AllReduce(), job.train(own_optimizer=, own_schedule=)"
        )
    if key == "optimizer" and (why := _NO_SPEC.get(type(value).__name__)):
        return f"optimizer is a {kind}, which servers cannot step: {why}"
    if key == "optimizer":
        return (
            f"optimizer is a {kind}: use rallypoint's own, such as optimizer=rp.AdamW(lr=1e-3), which the servers "
            "step; or, with sync=rp.AllReduce(), give it as own_optimizer="
        )
    return f"{key} is a {kind}: settings are data, such as numbers, texts, and rallypoint's own rp.Sync() or rp.AdamW()"


def _inside(value: Any) -> list[tuple[str, Any]]:
    """The values in a setting, each with its place: ``.lr``, ``[0]``."""
    if isinstance(value, list | tuple):
        return [(f"[{n}]", inner) for n, inner in enumerate(value)]
    fields = msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
    return [(f".{name}", inner) for name, inner in fields.items()] if isinstance(fields, Mapping) else []


def _a_class(key: str, kind: type) -> str:
    """The error message for a setting that is a class: the parentheses were forgotten, or it is another library's."""
    if issubclass(kind, msgspec.Struct):
        return f"{key} is the class {kind.__name__}: write {key}={written(kind)}, with parentheses"
    if key == "optimizer":
        return (
            f"optimizer is the class {kind.__module__}.{kind.__qualname__}: write optimizer=rp.AdamW(lr=1e-3), which "
            "the servers step; or, with sync=rp.AllReduce(), give a torch optimizer that is built as own_optimizer="
        )
    return f"{key} is the class {kind.__module__}.{kind.__qualname__}: settings are data, such as numbers and texts"


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings: those of `base`, replaced by those of `over` where it has any."""
    # If the kind changes, the old kind's settings mean nothing for it
    tree = {} if "type" in over and over["type"] != base.get("type") else dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(tree.get(key), Mapping)
        tree[key] = merged(tree[key], value) if both else value
    return tree


def _toml_value(text: str) -> Any:
    if text.strip().lower() == "none":
        return None  # TOML has no word for None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
