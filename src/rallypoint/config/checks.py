"""Checks the values of settings: each by itself, and that they make sense together. Each error says what to write.

`wrong_value` serves the command line, before anything starts, and the complete tree on every member.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import msgspec

from rallypoint.codec.spec import DGC, CodecSpec, PowerSGD
from rallypoint.config.tree import Group, JobConfig, optimizers_of
from rallypoint.core.layout import MOST_SHARD_BYTES, Layout, carried_in
from rallypoint.core.modes import Feature
from rallypoint.core.modes.table import refusal
from rallypoint.core.optimizer import SGD, Adagrad, Average, Muon, Optimizer, Sum
from rallypoint.core.policy import Mode, Sync
from rallypoint.core.schedule import Table
from rallypoint.core.typed import EXAMPLES, hints_of, written
from rallypoint.errors import ConfigError

_SPARE_BYTES = 4096  # what a sparse payload has besides its numbers: a count for each 64 Ki words


def check(config: JobConfig) -> None:
    """Raise ConfigError for a setting that makes no sense, naming the setting and a valid value."""
    if config.batch % config.accumulate:
        raise ConfigError(f"a batch of {config.batch} cannot be cut into accumulate={config.accumulate} equal parts")
    if (local := config.local) is not None:
        if local.steps % local.fragments:
            raise ConfigError(f"fragments={local.fragments}: it must divide the {local.steps} local steps")
        if local.delay >= config.steps_per_round:
            raise ConfigError(
                f"delay={local.delay}: the delay must be below the {config.steps_per_round} steps from one "
                "synchronisation to the next"
            )
    policy = config.policy
    if isinstance(policy, Sync) and policy.quorum is not None and policy.quorum > config.replicas:
        raise ConfigError(f"a quorum of {policy.quorum} of {config.replicas} replicas: use 1 to replicas, or None")
    _check_periods(config)
    if why := refusal(config.mode.name, config.features):
        raise ConfigError(why)
    if config.memory.hold == "bf16" and config.precision != "bf16":
        raise ConfigError('memory.hold="bf16" needs autocast, or layers would get two types: add precision="bf16"')
    if config.streamed and config.precision != "fp32":
        raise ConfigError(
            'memory.parameters="streamed" needs precision="fp32": autocast would keep a bf16 copy of every parameter'
        )
    if config.precision == "fp16" and config.nonfinite == "continue":
        raise ConfigError('precision="fp16" skips steps that overflow: set nonfinite to "stop" or "skip"')
    if not config.keyed and any(group.optimizer is not None for group in config.groups):
        raise ConfigError("optimizer= of a group is set by job.store: give job.train one optimizer")
    for optimizer in optimizers_of(config):
        if isinstance(optimizer.lr, Table) and (problem := optimizer.lr.problem):
            raise ConfigError(f"the table of rates cannot be used: {problem}; make it with rp.tabulated")
        if isinstance(optimizer, SGD) and optimizer.nesterov and optimizer.momentum <= 0:
            raise ConfigError("nesterov=True needs a momentum above 0")
        if isinstance(optimizer, Adagrad) and optimizer.eps == optimizer.initial_accumulator_value == 0:
            raise ConfigError(
                "adagrad with eps=0 and initial_accumulator_value=0 would divide a gradient of 0 by 0, as every unused "
                "parameter has it: give one of them a small positive value"
            )
    plain = isinstance(config.applied, SGD) and not config.applied.momentum
    if not plain and any(isinstance(codec, DGC) for codec in config.codecs):
        raise ConfigError("codec dgc has the momentum on the workers: use rp.SGD without momentum on the servers")
    for codec in config.codecs:
        # Other codecs leave a shard raw that they would make larger; DGC's momentum is on the worker
        nbytes = config.network.shard_bytes
        if isinstance(codec, DGC) and 1.5 * codec.ratio * nbytes > MOST_SHARD_BYTES - _SPARE_BYTES:
            raise ConfigError(
                f"codec dgc takes 1.5 bytes for each of ratio={codec.ratio} of a shard's, and of "
                f"network.shard_bytes={nbytes} that is more than the {MOST_SHARD_BYTES >> 20} MiB that go in one "
                "piece: give a smaller one"
            )
    muon = any(isinstance(optimizer, Muon) for optimizer in optimizers_of(config))
    if muon and any(isinstance(codec, PowerSGD) for codec in config.codecs):
        raise ConfigError("codec powersgd cuts matrices by rows, and rp.Muon steps whole ones: use another codec")


def features_with(config: JobConfig, layout: Layout) -> frozenset[Feature]:
    """Return the features that the job needs beside its mode, by its settings and its model.

    Raises ConfigError where they do not fit.
    """
    own = [shard for shard in layout.shards if shard.replica is None]
    found = {Feature.BUFFERS} if any(shard.role == "buffers" for shard in own) else set()
    found |= {Feature.CARRY} if carried_in(layout.shards) else set()
    found |= {Feature.TABLES} if layout.tables else set()
    features = config.features | found
    if why := refusal(config.mode.name, features):
        raise ConfigError(why)
    return features


def check_ranks(config: JobConfig, *, carries: bool = False) -> None:
    """Raise ConfigError for settings that a worker of several ranks lacks. `carries`: replicas carry state."""
    further = {Feature.CARRY} if carries else set()
    if why := refusal(config.mode.name, {*config.features, *further, Feature.RANKS}):
        raise ConfigError(why)
    if config.precision == "fp16":
        raise ConfigError(
            'precision="fp16" is for a worker of one process, as other ranks do not know its loss scale: use bf16'
        )
    if config.memory.hold != "fp32":
        raise ConfigError(
            f'memory.hold="{config.memory.hold}" is for a worker of one process: with ranks, give fully_shard a '
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )


def _check_periods(config: JobConfig) -> None:
    for group in config.groups:
        every, offset = group.sync_every, group.sync_offset
        if every is None and not offset:
            continue
        if every is None or every < 1 or not 0 <= offset < every:
            raise ConfigError(
                f"group {', '.join(group.match)}: sync_every={every}, sync_offset={offset}: use a period of at least "
                "1 step, and an offset from 0 to below it"
            )


_BY_NAME = {part for kinds in (Mode, CodecSpec, Optimizer, Average) for part in typing.get_args(kinds)}  # as rp.Sync()
_LARGEST = 2**63 - 1  # what a message can carry
_Structs = Sequence[type[msgspec.Struct]]


# What follows the sentence about a wrong value of these settings
_WHY = {
    "audit": ", such as rp.Audit(share=0.1): --set audit.share=0.1",
    "tune": ". What changes a job's results (codec, sync) is never tried: set it yourself; auto tries "
    "network.in_flight_bytes and network.pace_mbit"
}


def wrong_value(settings: Mapping[str, Any], *, partial: bool = False) -> str:
    """Return the sentence about the first value in `settings` that its setting cannot have; "" if there is none.

    `settings` is plain data. With `partial`, what is missing comes from elsewhere, and a part without a `type` has the
    settings of any type that the script may have chosen. Unknown names are not looked at.
    """
    return _in_struct(settings, [JobConfig], "", partial)


def _in_struct(given: Mapping[str, Any], kinds: _Structs, path: str, partial: bool) -> str:
    tags = [str(kind.__struct_config__.tag) for kind in kinds if kind.__struct_config__.tag]
    if tags and "type" in given and given["type"] not in tags:
        return f"{path}type is {_shown(given['type'])}: it must be one of {', '.join(tags)}"
    if len(tags) > 1 and "type" not in given and not partial:
        first = f"{path}type={tags[0]}"
        return f"{path.rstrip('.')} has no type: add it, such as {first} (there are {', '.join(tags)})"
    chosen = [kind for kind in kinds if kind.__struct_config__.tag == given.get("type")] or kinds
    needed = [field.name for field in msgspec.structs.fields(chosen[0]) if field.required]
    missing = next((name for name in needed if name not in given), None)
    if not partial and len(chosen) == 1 and missing is not None:
        such = f", such as --set {path}{missing}={EXAMPLES[missing]}" if missing in EXAMPLES else ""
        return f"{path}{missing} is missing, and {given.get('type', path.rstrip('.'))} needs it: add it{such}"
    for name, value in given.items():
        verdicts = [
            _in_value(value, hints_of(kind)[name], path + name, partial)
            for kind in chosen if name in kind.__struct_fields__
        ]  # fmt: skip
        if verdicts and all(verdicts):
            return verdicts[0]
    return ""


def _in_value(value: Any, hint: Any, path: str, partial: bool) -> str:
    structs = structs_in(hint)
    if isinstance(value, Mapping) and structs:
        return _in_struct(value, structs, f"{path}.", partial)
    if isinstance(value, Mapping) and typing.get_origin(hint) is dict:
        of = typing.get_args(hint)[1]
        found = (_in_value(one, of, f"{path}.{name}", partial) for name, one in value.items())
        return next(filter(None, found), "")
    if isinstance(value, list | tuple) and hint == tuple[Group, ...]:
        groups = [(n, group) for n, group in enumerate(value) if isinstance(group, Mapping)]
        wrong = (_in_struct(group, [Group], f"{path}[{n}].", False) for n, group in groups)
        if first := next(filter(None, wrong), ""):
            return first
    named = [kind for kind in structs if kind is not Sum]  # that one is not for users
    if isinstance(value, str) and named and all(kind in _BY_NAME for kind in named):  # a mode, a codec, an optimizer
        plain = re.sub("[^a-z0-9]", "", value.lower())
        meant = [kind for kind in named if plain == kind.__name__.lower()]
        ways = [f"{written(kind)} (--set {path}.type={kind.__struct_config__.tag})" for kind in meant or named]
        return f"{path} is {_shown(value)}: write {', or '.join(ways)}"
    if _fits(value, hint):
        return ""
    return f"{path} is {_shown(value)}: it must be {_described(hint)}{_WHY.get(path, '')}"


def _fits(value: Any, hint: Any) -> bool:
    if not all(_is_finite(number) for number in (value if isinstance(value, list | tuple) else [value])):
        return False
    try:
        converted = msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return isinstance(value, list | tuple) and all(isinstance(part, Mapping) for part in value)  # seen by msgspec
    allows = (((range_ := _range(hint)) and range_.extra) or {}).get("allows")
    return converted is None or allows is None or allows(converted)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, int | float) or (math.isfinite(value) and abs(value) <= _LARGEST)


# ---- words ----


def _range(hint: Any) -> msgspec.Meta | None:
    """What limits the numbers of a type hint; None if nothing does."""
    if typing.get_origin(hint) is Annotated:
        return next((one for one in hint.__metadata__ if isinstance(one, msgspec.Meta)), None)
    return next(filter(None, map(_range, typing.get_args(hint))), None)


def _limits(range_: msgspec.Meta) -> str:
    """The range, as words that follow a type: ``of at least 0``."""
    least, most = range_.ge, range_.le
    if range_.description is not None:
        return range_.description
    if range_.gt is not None:
        return f"above {range_.gt}" + ("" if most is None else f", of at most {most}")
    if range_.lt is not None:
        return f"from {least} to below {range_.lt}"
    return f"of at least {least}" if most is None else f"from {least} to {most}"


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, or the hint itself, without ranges."""
    if typing.get_origin(hint) is Annotated:
        hint = hint.__origin__
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        for part in typing.get_args(hint):
            yield from _parts(part)
    else:
        yield hint


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_PLURALS: dict[Any, str] = {float: "numbers", str: "texts", str | tuple[str, ...]: "names, or of lists of names"}


def _described(hint: Any) -> str:
    """Return ``a number above 0, or none``."""
    parts, structs = list(_parts(hint)), structs_in(hint)
    said = [_kind(part) for part in parts if part is not NoneType and part not in structs]
    if said and (range_ := _range(hint)) is not None and range_.max_length is None:
        said[-1] += f" {_limits(range_)}"
    tags = [str(part.__struct_config__.tag) for part in structs if part.__struct_config__.tag and part is not Sum]
    said += [f"a part with a type ({', '.join(tags)})"] if tags else []
    said += [f"rp.{part.__name__}(...)" for part in structs if not part.__struct_config__.tag]
    return ", or ".join([*said, *(["none"] if NoneType in parts else [])])


def structs_in(hint: Any) -> list[type[msgspec.Struct]]:
    """The struct types in a type hint, such as those of a union."""
    return [part for part in _parts(hint) if isinstance(part, type) and issubclass(part, msgspec.Struct)]


def _kind(part: Any) -> str:
    arguments = typing.get_args(part)
    if typing.get_origin(part) is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if typing.get_origin(part) is tuple:
        what = _PLURALS.get(getattr(arguments[0], "__origin__", arguments[0]), "parts")
        return f"a list of {what}" if arguments[-1] is Ellipsis else f"a list of {len(arguments)} {what}"
    return _KINDS.get(part, "a value")


def _shown(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case _:
            return repr(value)
