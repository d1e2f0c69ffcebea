"""The job's configuration: one typed tree, from the script, a file and dotted overrides; unknown keys are refused.

Precedence, the last one wins: defaults, what the script passes to `job.train`, the file (`--config job.toml`), dotted
overrides (`--set optimizer.lr.peak=1e-3`). The resolved tree is part of the job record: all members read that one.
"""

from __future__ import annotations

import fnmatch
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from rallypoint.codec.spec import DGC, Bf16, CodecSpec, Fp16, Int8, PowerSGD, Raw, remembers
from rallypoint.core.cadence import EVERY_TICK, TOGETHER, Cadence, Turn, cut_evenly, cycle, first_empty
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import SHARD_BYTES, Layout, Role, Shard
from rallypoint.core.optimizer import SGD, Adagrad, AdamW, Optimizer
from rallypoint.core.policy import (
    AllReduce,
    Async,
    BoundedStaleness,
    LocalSteps,
    Mode,
    ServerPolicy,
    Sync,
    server_policy,
)
from rallypoint.core.schedule import Constant, Schedule, StepDecay
from rallypoint.core.typed import build_now
from rallypoint.errors import ConfigError

_LONGEST_CYCLE = 1 << 12  # ticks
DownSpec = Raw | Fp16 | Bf16 | Int8


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters with settings of their own: those whose name matches any of `match` (shell patterns).

    `weight_decay` and `codec` are the job's where they are None.

    Under LocalSteps they may have a period of their own: they are synchronised after every n steps of the job where
    ``n % sync_every == sync_offset``. None: with everything else.
    """

    match: tuple[str, ...]
    weight_decay: float | None = None
    lr_scale: float = 1.0
    codec: CodecSpec | None = None
    sync_every: int | None = None
    sync_offset: int = 0


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides what a job computes.

    Attributes:
        replicas: R, the logical data-parallel replicas; the global batch is `replicas` * `batch` samples (I1).
        batch: samples of one replica at one step.
        steps: updates to make.
        optimizer: what the servers apply (under LocalSteps: what the workers do between two synchronisations; under
            AllReduce: what every worker does with the mean gradient).
        sync: how workers and servers keep in step.
        accumulate: micro-batches that `batch` is cut into; gradients are averaged over them.
        clip: global gradient norm at which to clip, or None.
        seed: of the sample order and of every replica's randomness.
        nonfinite: what a NaN or infinite loss or gradient does: "stop" the job, "skip" the step on all servers, or
            "continue" as plain PyTorch would.
        decay_1d: decay norms and biases (tensors of fewer than two dimensions) too.
        groups: parameters with settings of their own; the first match wins.
        codec: how gradients are written on their way up; a lossy one changes what is computed.
        down: how parameters are written on their way down, the last version excepted, which goes as it is. Without
            error feedback: what servers keep is exact, so no error adds up.
        table_std: standard deviation of the first values of tables (embeddings whose rows only the servers keep).
        shard_bytes: the largest shard.
        window: contributions that may be under way from one worker to one server.
        hold_bytes: bytes that a server holds back for their turn before it slows the senders down.
        in_flight_bytes: bytes that may be on their way to one machine at once, shared by its links; 0 leaves that to
            the kernel. Many links together overrun the queue of a slow port; about 8 ms of its rate cannot (256 KiB at
            200 Mbit/s, 1 MiB at 1 Gbit/s). Not for links with a round trip of more than a few ms.
        item, items_per_sample: what the progress line counts ("tokens", 128).
    """

    replicas: int = 1
    batch: int = 32
    steps: int = 100
    optimizer: Optimizer = AdamW()
    sync: Mode = Sync()
    accumulate: int = 1
    clip: float | None = None
    seed: int = 0
    nonfinite: Literal["stop", "skip", "continue"] = "stop"
    decay_1d: bool = False
    groups: tuple[Group, ...] = ()
    codec: CodecSpec = Raw()
    down: DownSpec = Raw()
    table_std: float = 1.0
    shard_bytes: int = SHARD_BYTES
    window: int = 4
    hold_bytes: int = 256 << 20
    in_flight_bytes: int = 0
    item: str = "samples"
    items_per_sample: int = 1

    @property
    def schedule(self) -> Schedule:
        """The learning rate of `optimizer`, over the job's steps."""
        return _schedule_of(self.optimizer)

    @property
    def policy(self) -> ServerPolicy:
        """When the servers apply contributions."""
        return server_policy(self.sync)

    @property
    def streaming(self) -> bool:
        """Does each replica have a clock of its own?"""
        return self.policy.streaming

    @property
    def stateful_workers(self) -> bool:
        """Do workers step the optimizer, each its own, and servers only average?"""
        return isinstance(self.sync, AllReduce)

    @property
    def own_optimizer(self) -> str:
        """The class of the optimizer that a worker steps in place of `optimizer`; "" if it steps that one, or none."""
        return self.sync.own if isinstance(self.sync, AllReduce) else ""

    @property
    def local(self) -> LocalSteps | None:
        """The local steps, if the worker makes any."""
        return self.sync if isinstance(self.sync, LocalSteps) else None

    @property
    def steps_per_round(self) -> int:
        """Steps of a replica between two of its contributions (to whatever shard)."""
        if self.local is None:
            return 1
        own = [n for group in self.groups if group.sync_every for n in (group.sync_every, group.sync_offset)]
        return math.gcd(self.local.steps // self.local.fragments, *own)

    @property
    def takes_turns(self) -> bool:
        """Under local steps: do replicas' own parameters go on from round to round? These are called ticks then.

        They do where a round is for some of the parameters only, or comes to its end later.
        """
        own = any(group.sync_every is not None for group in self.groups)
        return self.local is not None and (self.local.fragments > 1 or self.local.delay > 0 or own)

    def steps_ahead(self, round: int) -> int:
        """How many of this round's steps replicas make before they hear of its version."""
        return min(self.local.delay, len(self.steps_of(round)) - 1) if self.local is not None else 0

    @property
    def rounds(self) -> int:
        """Contributions that each replica makes; under an aligned policy the job's last version."""
        return -(-self.steps // self.steps_per_round)

    def steps_of(self, round: int) -> range:
        """The steps that a replica makes in this round: fewer in the last one, if they do not divide evenly."""
        return range(self.steps_at(round), self.steps_at(round + 1))

    def steps_at(self, version: int) -> int:
        """The steps of training behind a version; -1 before the first."""
        return min(version * self.steps_per_round, self.steps) if version >= 0 else -1

    @property
    def applied(self) -> Optimizer:
        """What the servers apply."""
        return self.local.outer if self.local is not None else self.optimizer

    @property
    def applied_schedule(self) -> Schedule:
        """The learning rate of what the servers apply, over the job's rounds."""
        return _schedule_of(self.applied)

    @property
    def clips_on_servers(self) -> bool:
        """Is the gradient clipped by the norm of the mean? Otherwise each replica clips its own."""
        return self.clip is not None and not self.streaming and self.local is None

    def contributors(self, role: Role) -> int:
        """How many replicas contribute to a shard: replica 0 alone to buffers, or (quorum) whoever comes first."""
        anybody = isinstance(self.policy, Sync) and self.policy.quorum is not None
        return self.replicas if role != "buffers" or anybody else 1

    @property
    def decides(self) -> bool:
        """Do servers take a decision together before they apply a round?

        Stopping needs none: a worker sees its own loss before it pushes anything of that replica.
        """
        return not self.streaming and (self.clips_on_servers or self.nonfinite == "skip")

    @property
    def sticky(self) -> bool:
        """Do replicas leave something of use on the worker that computes them: an optimizer's state, a residual?"""
        residuals = any(remembers(codec) for codec in self.codecs)
        return residuals or (self.local is not None and self.local.keep_inner)

    @property
    def codecs(self) -> tuple[CodecSpec, ...]:
        """The job's codec, and those that groups have of their own."""
        return (self.codec, *(group.codec for group in self.groups if group.codec is not None))


class Settings(TypedDict, total=False):
    """The keywords of `job.train`: the fields of JobConfig, for type checkers."""

    replicas: int
    batch: int
    steps: int
    optimizer: Optimizer
    sync: Mode
    accumulate: int
    clip: float | None
    seed: int
    nonfinite: Literal["stop", "skip", "continue"]
    decay_1d: bool
    groups: Sequence[Group]
    codec: CodecSpec
    down: DownSpec
    table_std: float
    shard_bytes: int
    window: int
    hold_bytes: int
    in_flight_bytes: int
    item: str
    items_per_sample: int


build_now(JobConfig)  # every member's proposal is parsed, each on its connection's own thread


class GroupSettings(msgspec.Struct, frozen=True):
    """What one optimizer group is trained with."""

    weight_decay: float
    lr_scale: float


def resolve(settings: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> JobConfig:
    """The configuration from the script's `settings` and the launcher's nested `overrides`.

    Raises ConfigError naming the key when one is unknown, has the wrong type, or makes no sense.
    """
    base = msgspec.to_builtins(JobConfig()) | {key: _as_data(key, value) for key, value in settings.items()}
    return parse(_merge(base, overrides or {}))


def parse(data: Mapping[str, Any]) -> JobConfig:
    """The configuration in a job record. ConfigError when it is none."""
    try:
        config = msgspec.convert(data, JobConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the job's configuration is wrong: {error}") from None
    _check(config)
    return config


def record_of(config: JobConfig, layout: Layout, frozen: Mapping[str, str] | None = None) -> JobRecord:
    """What the members of the job must agree on."""
    return JobRecord(
        msgspec.to_builtins(config), layout, config.rounds, dict(frozen or {}), config.steps_per_round, config.sticky,
        config.streaming, cadence_of(config, layout.shards), config.stateful_workers,
    )  # fmt: skip


def cadence_of(config: JobConfig, shards: Sequence[Shard]) -> Cadence:
    """Which shards each round is for: those of groups with a period of their own by that; of the others runs of
    consecutive ones, of about as many bytes each, take turns.

    Buffers take none, they are due in every round: they are small, and each of a replica's rounds begins with them.
    ConfigError when there are more fragments than shards, or nothing would be due at some tick.
    """
    if config.local is None or not config.takes_turns:
        return TOGETHER
    if config.local.delay and any(shard.role == "buffers" for shard in shards):
        raise ConfigError(
            "a delay is not supported for models with buffers in their state_dict (BatchNorm statistics): each tick "
            "would have to begin with those of the one before; use delay=0, or GroupNorm and the like"
        )
    fragments, size = config.local.fragments, config.steps_per_round
    own = {s.index: turn for s in shards if (turn := _own_turn(config, s.group)) is not None}
    taking = [shard for shard in shards if shard.role == "parameters" and shard.index not in own]
    if len(taking) < fragments and (fragments > 1 or not own):
        raise ConfigError(
            f"fragments={fragments}, but the parameters are only {len(taking)} shards: use fewer, or smaller shards "
            "(shard_bytes)"
        )
    every = config.local.steps // size
    for shard, fragment in zip(taking, cut_evenly([s.nbytes for s in taking], fragments), strict=True):
        own[shard.index] = Turn(every, (fragment + 1) * every // fragments - 1)
    turns = sorted(set(own.values()), key=lambda turn: (turn.every, turn.first))
    _check_turns(turns, config)
    indices = {turn: index for index, turn in enumerate(turns)}
    turn_of = tuple(indices[own[s.index]] if s.index in own else EVERY_TICK for s in shards)
    return Cadence(tuple(turns), config.rounds, turn_of)


def _own_turn(config: JobConfig, group: int) -> Turn | None:
    """When a group with a period of its own is due; None if it has none."""
    if group < 2 or (every := config.groups[group - 2].sync_every) is None:
        return None
    size = config.steps_per_round
    return Turn(every // size, (config.groups[group - 2].sync_offset // size - 1) % (every // size))


def _check_turns(turns: Sequence[Turn], config: JobConfig) -> None:
    size = config.steps_per_round
    periods = ", ".join(str(every * size) for every in sorted({turn.every for turn in turns}))
    if cycle(turns) > _LONGEST_CYCLE:
        raise ConfigError(
            f"periods of {periods} steps come together only every {cycle(turns) * size} steps: use multiples of each "
            "other (sync_every, and the local steps)"
        )
    if (tick := first_empty(turns)) is not None and tick < config.rounds - 1:
        raise ConfigError(
            f"nothing would be synchronised after step {(tick + 1) * size}, but with periods of {periods} steps and "
            f"these offsets there is a tick every {size} steps (their greatest common divisor): let some group have "
            f"sync_every={size}, or use periods that are multiples of the shortest, and offsets that are too"
        )


def overrides_from(file: Path | None, dotted: Sequence[str]) -> dict[str, Any]:
    """Nested overrides from a TOML file and `key.key=value` texts (values are TOML; a bare word is a string)."""
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            tree = tomllib.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the configuration file {file} cannot be read: {error}") from None
    for text in dotted:
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write it as key=value, such as steps=200 or optimizer.lr=1e-3")
        nested: Any = _toml_value(value)
        for key in reversed(path.strip().split(".")):
            nested = {key: nested}
        tree = _merge(tree, nested)
    return tree


def group_of(config: JobConfig, name: str, dimensions: int) -> int:
    """The optimizer group of a parameter: 0 decayed, 1 not decayed (norms, biases), 2 and up the user's own."""
    for index, group in enumerate(config.groups):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group.match):
            return 2 + index
    return 0 if config.decay_1d or dimensions >= 2 else 1


def settings_of(config: JobConfig, group: int) -> GroupSettings:
    """What the optimizer group is trained with."""
    if group == 0:
        return GroupSettings(config.optimizer.weight_decay, 1.0)
    if group == 1:
        return GroupSettings(0.0, 1.0)
    own = config.groups[group - 2]
    decay = config.optimizer.weight_decay if own.weight_decay is None else own.weight_decay
    return GroupSettings(decay, own.lr_scale)


def settings_applied(config: JobConfig, group: int) -> GroupSettings:
    """What the servers update the group with: under local steps the groups' settings are the workers' affair."""
    if config.local is not None:
        return GroupSettings(config.applied.weight_decay, 1.0)
    return settings_of(config, group)


def _schedule_of(optimizer: Optimizer) -> Schedule:
    return Constant(optimizer.lr) if isinstance(optimizer.lr, (int, float)) else optimizer.lr


def codec_of(config: JobConfig, group: int) -> CodecSpec:
    """How contributions to the shards of an optimizer group are written; buffers (group -1) go raw."""
    if group < 0:
        return Raw()
    own = config.groups[group - 2].codec if group >= 2 else None
    return config.codec if own is None else own


def ranks_of(config: JobConfig) -> dict[int, int]:
    """The rank of the factors in each optimizer group that goes as such; the layout is cut accordingly."""
    codecs = {group: codec_of(config, group) for group in range(2 + len(config.groups))}
    return {group: codec.rank for group, codec in codecs.items() if isinstance(codec, PowerSGD)}


def _as_data(key: str, value: Any) -> Any:
    try:
        return msgspec.to_builtins(value)
    except TypeError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ConfigError(f"{key} is a {kind}: use rallypoint's own, such as optimizer=rp.AdamW(lr=1e-3)") from None


def _check(config: JobConfig) -> None:
    for name in ("replicas", "batch", "steps", "accumulate", "window", "items_per_sample"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}: it must be at least 1")
    if config.batch % config.accumulate:
        raise ConfigError(f"a batch of {config.batch} cannot be cut into accumulate={config.accumulate} equal parts")
    _check_mode(config)
    _check_own_optimizer(config)
    if not (config.table_std >= 0 and math.isfinite(config.table_std)):
        raise ConfigError(f"table_std is {config.table_std}: use a finite number that is not negative")
    for name in ("hold_bytes", "in_flight_bytes"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} is {getattr(config, name)}: it cannot be negative")
    for optimizer in (config.optimizer, config.applied):
        _check_optimizer(optimizer)
    if config.clip is not None and not (config.clip > 0 and math.isfinite(config.clip)):
        raise ConfigError(f"clip is {config.clip}: use a positive norm, or None")
    if config.shard_bytes < 64 or config.shard_bytes % 64 or config.shard_bytes > 1 << 26:
        raise ConfigError(f"shard_bytes is {config.shard_bytes}: use a multiple of 64 up to 64 MiB")
    plain = isinstance(config.applied, SGD) and not config.applied.momentum
    if not plain and any(isinstance(codec, DGC) for codec in config.codecs):
        raise ConfigError("codec dgc has the momentum on the workers: use rp.SGD without momentum on the servers")


def _check_optimizer(optimizer: Optimizer) -> None:
    schedule = _schedule_of(optimizer)
    if not math.isfinite(schedule.peak):
        raise ConfigError(f"a learning rate of {schedule.peak} is impossible")
    if isinstance(schedule, StepDecay) and schedule.every < 1:
        raise ConfigError(f"step_decay(every={schedule.every}): it must be at least 1")
    if isinstance(optimizer, SGD) and optimizer.nesterov and optimizer.momentum <= 0:
        raise ConfigError("nesterov=True needs a momentum above 0")
    if isinstance(optimizer, Adagrad):
        _check_adagrad(optimizer)


def _check_adagrad(spec: Adagrad) -> None:
    for name in ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
        if not 0 <= getattr(spec, name) < math.inf:
            raise ConfigError(f"adagrad's {name} is {getattr(spec, name)}: use a finite number that is not negative")
    if spec.eps == spec.initial_accumulator_value == 0:
        raise ConfigError(
            "adagrad with eps=0 and initial_accumulator_value=0 would divide a gradient of 0 by 0, as every unused "
            "parameter has it: give one of them a small positive value"
        )


def with_own_optimizer(config: JobConfig, kind: str) -> JobConfig:
    """The configuration of a job whose script has an optimizer of its own, of this class; or ("") has none.

    ConfigError where workers step none, or the configuration says something else.
    """
    if kind and not isinstance(config.sync, AllReduce):
        raise ConfigError(
            "own_optimizer needs sync=rp.AllReduce(): in other modes it is the servers that step, with optimizer="
        )
    if config.own_optimizer not in ("", kind):
        raise ConfigError(f"sync.own is {config.own_optimizer}: leave it to job.train, which has own_optimizer")
    if not kind:
        return config
    assert isinstance(config.sync, AllReduce)
    return parse(msgspec.to_builtins(msgspec.structs.replace(config, sync=AllReduce(own=kind))))


def _check_own_optimizer(config: JobConfig) -> None:
    for group in config.groups if config.own_optimizer else ():
        if group.weight_decay is not None or group.lr_scale != 1.0:
            raise ConfigError(
                "groups cannot set a decay or a rate where own_optimizer steps: give them to its own param_groups"
            )


def _check_mode(config: JobConfig) -> None:
    match config.sync:
        case BoundedStaleness(staleness=staleness) if staleness < 0:
            raise ConfigError(f"a staleness of {staleness}: 0 is Sync, and more lets replicas run ahead")
        case LocalSteps(steps=steps) if steps < 1:
            raise ConfigError(f"{steps} local steps: it must be at least 1")
        case LocalSteps() as local:
            _check_fragments(config, local)
        case _:
            pass
    _check_periods(config)
    policy = config.policy
    if isinstance(policy, Sync) and policy.quorum is not None and not 1 <= policy.quorum <= config.replicas:
        raise ConfigError(f"a quorum of {policy.quorum} of {config.replicas} replicas: use 1 to replicas, or None")
    if isinstance(policy, Async) and (policy.fold < 1 or not policy.delay_compensation >= 0):
        raise ConfigError("async: fold must be at least 1, and delay_compensation cannot be negative")


def _check_fragments(config: JobConfig, local: LocalSteps) -> None:
    if local.fragments < 1 or local.steps % local.fragments:
        raise ConfigError(f"fragments={local.fragments}: it must divide the {local.steps} local steps")
    if local.delay < 0 or local.delay >= config.steps_per_round or not 0 < local.mix <= 1:
        raise ConfigError(
            f"delay={local.delay}, mix={local.mix}: the delay must be below the {config.steps_per_round} steps "
            "from one synchronisation to the next, and mix above 0 and at most 1"
        )
    if not config.takes_turns:
        return
    if not local.keep_inner:
        raise ConfigError(
            "keep_inner=False with fragments, sync_every or delay: what a replica has moved goes on from tick to tick, "
            "and so must its optimizer's state; leave keep_inner out, or synchronise everything at once"
        )
    if local.over != Sync():
        raise ConfigError("fragments, sync_every and delay need over=rp.Sync(), without a quorum")
    if config.nonfinite == "skip":
        raise ConfigError("nonfinite='skip' is not supported with fragments, sync_every or delay: use 'stop'")


def _check_periods(config: JobConfig) -> None:
    for group in config.groups:
        every, offset = group.sync_every, group.sync_offset
        if every is None and not offset:
            continue
        if config.local is None:
            raise ConfigError(f"group {', '.join(group.match)}: sync_every and sync_offset are for sync=rp.LocalSteps")
        if every is None or every < 1 or not 0 <= offset < every:
            raise ConfigError(
                f"group {', '.join(group.match)}: sync_every={every}, sync_offset={offset}: use a period of at least "
                "1 step, and an offset from 0 to below it"
            )


def _merge(base: Any, over: Any) -> dict[str, Any]:
    merged = dict(base)
    if "type" in over and over["type"] != merged.get("type"):
        merged = {}  # another kind of thing: the settings of the old one mean nothing to it
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _toml_value(text: str) -> Any:
    if text.strip().lower() == "none":
        return None  # TOML has no word for it
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
