"""The job's configuration: one typed tree.

Also, the optimizer group of a parameter with its settings, its codec and its rounds; and the size of shards, with which
a job begins where nobody has said it (`tune="auto"`).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from typing import Annotated, Literal, TypedDict

import msgspec

from rallypoint.codec.spec import Bf16, CodecSpec, Fp16, Int8, PowerSGD, Raw, has_state
from rallypoint.core.audits import Audits
from rallypoint.core.cadence import EVERY_ROUND, TOGETHER, Cadence, Period, cut_evenly, cycle, first_empty
from rallypoint.core.decisions import ReduceOnPlateau
from rallypoint.core.layout import MOST_SHARD_BYTES, SHARD_BYTES, WORD_BYTES, Role, Shard, TensorSpec
from rallypoint.core.modes import Clock, Contribution, Feature, ModeTraits, Pace, StateHolder, describe
from rallypoint.core.optimizer import EMA, SWA, AdamW, LossScaling, Muon, Optimizer, Sum
from rallypoint.core.plan.tuning import shards_for, shards_on_one_host
from rallypoint.core.policy import AllReduce, Async, LocalSteps, Mode, ServerPolicy, Sync, server_policy
from rallypoint.core.protocol import Welcome
from rallypoint.core.schedule import Constant, Schedule, rate_at
from rallypoint.core.typed import AboveZero, CountFromOne, CountFromZero, FromZero, PartType, ShareOrZero, build_now
from rallypoint.errors import ConfigError, ModelError

DownSpec = Raw | Fp16 | Bf16 | Int8
_ShardBytes = Annotated[int, msgspec.Meta(
    ge=64, le=1 << 26, multiple_of=64, description="that is a multiple of 64, from 64 to 67108864 (64 MiB)",
)]  # fmt: skip


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the parameters whose name matches any of `match` (shell patterns).

    If `weight_decay` or `codec` is None, the job's applies.

    Under LocalSteps a group may have its own period: it is synchronised after n steps of the job, for each n with
    ``n % sync_every == sync_offset``. None: together with all other parameters.

    `optimizer`, of a key, is set by `job.store` only. None: the job's.
    """

    match: tuple[str, ...]
    weight_decay: FromZero | None = None
    lr_scale: float = 1.0
    codec: CodecSpec | None = None
    sync_every: int | None = None
    sync_offset: int = 0
    optimizer: Optimizer | None = None


class Network(msgspec.Struct, metaclass=PartType, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """How what is sent is cut, held and paced: ``network=rp.Network(shard_bytes=1 << 20)``, and in `--set` and files
    ``network.shard_bytes``.

    Attributes:
        shard_bytes: the largest shard, in bytes. A job on one host that does not say it has up to 4 MiB.
        window: contributions that may be on their way from one worker to one server.
        presum_bytes: bytes that a worker may take to add up its replicas' gradients before it sends them, in copies of
            the model: with n copies it adds up to 2^n replicas. 0: it sends each replica's.
        overlap: a step's forward pass may begin before all of its parameters are here; each module waits for its own.
            False: every worker waits for all of them first (code outside of Python that reads parameters in memory, a
            CUDA graph for instance, needs that).
        hold_bytes: bytes of early contributions that a server may keep; beyond that it slows the senders.
        in_flight_bytes: bytes that may be on their way to one machine at once, shared by its links; 0 leaves that to
            the kernel. Many links together overrun the queue of a slow port; about 8 ms of its rate cannot (256 KiB at
            200 Mbit/s, 1 MiB at 1 Gbit/s). Not for links with a round trip of more than a few ms.
        pace_mbit: Mbit/s that a worker or a server sends at most, in equal parts on its links; 0: see `pacing`. Of
            flows that share a port TCP gives some more than others, and a shard's sum waits for the last of them. A
            little less than the rate of the links: 970 for 1 Gbit/s. Linux only; not used where there are aggregators.
        pacing: "auto": where there are at least as many servers as workers, and no aggregators, each worker measures
            what its port carries and paces its links at their parts of that, unless `pace_mbit` says what; where there
            are equally many and no backups, servers do so too.
    """

    shard_bytes: _ShardBytes = SHARD_BYTES
    window: CountFromOne = 4
    presum_bytes: CountFromZero = 8 << 30
    overlap: bool = True
    hold_bytes: CountFromZero = 256 << 20
    in_flight_bytes: CountFromZero = 0
    pace_mbit: FromZero = 0.0
    pacing: Literal["auto", "off"] = "auto"


class Memory(msgspec.Struct, metaclass=PartType, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """How much workers keep of parameters and activations.

    Written ``memory=rp.Memory(hold="bf16")``, and ``memory.hold`` in `--set`.

    Attributes:
        parameters: "streamed": parameters stay on the servers; a worker pulls those of a module when it runs, forward
            and backward, and frees them after use. It never holds the whole model.
        prefetch_bytes: bytes of streamed parameters that a worker asks for before they are needed.
        hold: "bf16": workers hold parameters of two or more dimensions in bf16 (with ``precision="bf16"``), servers in
            fp32. The last version is installed in fp32. `codec` and `down` are then bf16 by default.
        recompute: "blocks": blocks of the model run their forward pass again in the backward pass, and keep less.
    """

    parameters: Literal["local", "streamed"] = "local"
    prefetch_bytes: CountFromZero = 32 << 20
    hold: Literal["fp32", "bf16"] = "fp32"
    recompute: Literal["none", "blocks"] = "none"


class Audit(msgspec.Struct, metaclass=PartType, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Results that are computed twice or recorded, so that wrong ones are found.

    Written ``audit=rp.Audit(share=0.1)``, and ``audit.share`` in `--set`.

    Attributes:
        share: the share of steps (0 to 1) whose contributions a second worker computes too. Servers use none of those
            before two workers agree on its bytes.
        action: what happens to a worker whose contribution two others have proved wrong: "drain" gives it up,
            "stop" ends the job, "tell" only says so. None of them uses that contribution.
        fingerprints: every N steps digests of each replica's contribution and of each parameter are kept in the
            run's folder, for `rallypoint replay`; 0: never.
    """

    share: ShareOrZero = 0.0
    action: Literal["drain", "stop", "tell"] = "drain"
    fingerprints: CountFromZero = 0


class Evaluation(msgspec.Struct, metaclass=PartType, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """How figures of evaluations change the training and the snapshots that are kept.

    Written ``evaluation=rp.Evaluation(keep_best="loss")``, and ``evaluation.keep_best`` in `--set`.

    Attributes:
        plateau: rp.ReduceOnPlateau: the rates are reduced when a figure of the evaluations no longer improves; or None.
        keep_best: a figure of the evaluations: a snapshot is taken at each evaluation, and the one with the best figure
            is kept, whatever else is deleted; "" for none.
        best_is: whether the smallest or the largest value is the best.
    """

    plateau: ReduceOnPlateau | None = None
    keep_best: str = ""
    best_is: Literal["min", "max"] = "min"


class Reading(msgspec.Struct, metaclass=PartType, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """In which order samples are read, and what the progress line counts.

    Written ``reading=rp.Reading(order="sequential")``, and ``reading.order`` in `--set`.

    Attributes:
        order: "shuffled": every pass over the data set has its own order; "sequential": the data set's; "windowed":
            shards (files, row groups) are shuffled, and samples in a few at a time; "own": the script's (`rp.wrap`);
            "stream": an iterator's (`rp.Stream`).
        passes: of a stream: the job ends after so many passes over it; 0: `steps` counts.
        mixed_shards: from how many shards the replicas together read at a time with ``order="windowed"``: each reads
            from ``mixed_shards // replicas`` of them, and at least from one.
        item, items_per_sample: what the progress line counts ("tokens", 128).
    """

    order: Literal["shuffled", "sequential", "windowed", "own", "stream"] = "shuffled"
    passes: CountFromZero = 0
    mixed_shards: CountFromOne = 16
    item: str = "samples"
    items_per_sample: CountFromOne = 1


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Everything that decides what a job computes.

    Attributes:
        replicas: R, the logical data-parallel replicas; the global batch is `replicas` * `batch` samples (I1).
        batch, steps: samples of one replica at one step; updates to make.
        optimizer: the optimizer on the servers (under LocalSteps: the workers' between two synchronisations; under
            AllReduce: every worker's, which steps with the mean gradient).
        sync: the mode: how workers and servers synchronise.
        accumulate: micro-batches that `batch` is cut into; gradients are averaged over them.
        clip: global gradient norm at which to clip, or None.
        average: rp.EMA or rp.SWA: an average of the parameters that servers keep beside them, for export; or None.
        seed: seed of the sample order and of every replica's randomness.
        precision: "bf16" or "fp16" computes forward passes and evaluations in `torch.autocast`; parameters stay fp32.
            "fp16" scales losses, and a step whose gradients overflow is skipped.
        loss_scale: how the loss scale of "fp16" begins and changes.
        nonfinite: what a NaN or infinite loss or gradient does: "stop" the job, "skip" the step on all servers, or
            "continue" as plain PyTorch would.
        decay_1d: decay norms and biases (tensors of fewer than two dimensions) too.
        groups: parameters with their own settings; the first match wins.
        codec: how workers encode gradients; a lossy codec changes the result.
        down: how servers encode parameters for workers (from exact values: no error accumulates). The last is fp32.
        table_std: standard deviation of the initial values of tables (embeddings whose rows only the servers keep).
        memory: what workers keep of parameters and activations.
        audit: which results are computed twice or recorded, so that wrong ones are found.
        evaluation: how figures of evaluations change the training and the snapshots that are kept.
        reading: in which order samples are read, and what the progress line counts.
        network: how payloads are cut, held and paced.
        keyed: the job is a store (`job.store`): keys that are pushed and pulled one by one.
        tune: "auto": while the job runs, `network`'s `in_flight_bytes` and `pace_mbit` are tried, and kept where steps
            get shorter. Where nobody says them, `shard_bytes` and how often snapshots are taken are chosen too. The
            bytes are the same.
    """

    replicas: CountFromOne = 1
    batch: CountFromOne = 32
    steps: CountFromOne = 100
    optimizer: Optimizer = AdamW()
    sync: Mode = Sync()
    accumulate: CountFromOne = 1
    clip: AboveZero | None = None
    average: EMA | SWA | None = None
    seed: int = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: LossScaling = LossScaling()
    nonfinite: Literal["stop", "skip", "continue"] = "stop"
    decay_1d: bool = False
    groups: tuple[Group, ...] = ()
    codec: CodecSpec = Raw()
    down: DownSpec = Raw()
    table_std: FromZero = 1.0
    memory: Memory = Memory()
    audit: Audit = Audit()
    evaluation: Evaluation = Evaluation()
    reading: Reading = Reading()
    network: Network = Network()
    keyed: bool = False
    tune: Literal["off", "auto"] = "off"

    @cached_property
    def schedule(self) -> Schedule:
        """The learning rate of `optimizer`, over the job's steps."""
        return schedule_of(self.optimizer)

    @cached_property
    def policy(self) -> ServerPolicy:
        """When the servers apply contributions."""
        return server_policy(self.sync)

    @cached_property
    def features(self) -> frozenset[Feature]:
        """The features that these settings need beside the mode."""
        return features_of(self)

    @cached_property
    def mode(self) -> ModeTraits:
        """The description of the mode."""
        return describe(self.sync, self.features)

    @property
    def own_optimizer(self) -> str:
        """The class of the user's optimizer that workers step in place of `optimizer`; "" if there is none."""
        return self.sync.own if isinstance(self.sync, AllReduce) else ""

    @property
    def local(self) -> LocalSteps | None:
        """The local-steps mode, if the worker makes local steps; else None."""
        return self.sync if isinstance(self.sync, LocalSteps) else None

    @property
    def steps_per_round(self) -> int:
        """Steps of a replica between two of its contributions (to any shard)."""
        if self.local is None:
            return 1
        own = [n for group in self.groups if group.sync_every for n in (group.sync_every, group.sync_offset)]
        return math.gcd(self.local.steps // self.local.fragments, *own)

    @property
    def staggered(self) -> bool:
        """True if replicas' own parameters continue from round to round (fragments, periods or a delay)."""
        return self.mode.clock is Clock.STAGGERED

    def steps_ahead(self, round: int) -> int:
        """Steps of this round that replicas make before its version is mixed in."""
        return min(self.local.delay, len(self.steps_of(round)) - 1) if self.local is not None else 0

    @property
    def rounds(self) -> int:
        """Contributions that each replica makes; under an aligned policy also the job's last version."""
        return -(-self.steps // self.steps_per_round)

    def steps_of(self, round: int) -> range:
        """The steps that a replica makes in this round: fewer in the last one, if they do not divide evenly."""
        return range(self.steps_at(round), self.steps_at(round + 1))

    def steps_at(self, version: int) -> int:
        """Steps of training in a version; -1 before the first."""
        return min(version * self.steps_per_round, self.steps) if version >= 0 else -1

    @property
    def applied(self) -> Optimizer:
        """The optimizer that the servers apply."""
        return self.local.outer if self.local is not None else self.optimizer

    @property
    def applied_schedule(self) -> Schedule:
        """The learning rate of the servers' optimizer, over the job's rounds."""
        return schedule_of(self.applied) if self.local is not None else self.schedule

    @property
    def clips_on_servers(self) -> bool:
        """True if servers clip by the norm of the mean gradient. Otherwise each replica clips its own gradient."""
        of_mean = self.mode.pace is Pace.ROUNDS and self.mode.contribution is Contribution.GRADIENT
        return self.clip is not None and of_mean

    def contributors(self, role: Role) -> int:
        """How many replicas may contribute to a shard: all R; to buffers only replica 0, except with a quorum."""
        return self.replicas if role != "buffers" or self.mode.drops else 1

    def clocks(self, role: Role) -> int:
        """Replicas that have a clock in a shard: its contributors, or 0 where all begin a round together."""
        return self.policy.clocks(self.contributors(role))

    @property
    def quorum(self) -> int | None:
        """The number of contributions that complete a round; None: all of them."""
        return self.policy.quorum if isinstance(self.policy, Sync) else None

    @property
    def compensation(self) -> float:
        """The lambda of delay compensation; 0: late gradients are applied unchanged."""
        return self.policy.delay_compensation if isinstance(self.policy, Async) else 0.0

    @property
    def decides(self) -> bool:
        """True if servers decide together before they apply a round. Stopping needs no decision: a worker sees its own
        loss before it pushes anything of that replica."""
        return self.mode.pace is Pace.ROUNDS and (self.clips_on_servers or self.skips)

    @property
    def skips(self) -> bool:
        """True if servers may skip a step, all of them together."""
        return self.nonfinite == "skip" or self.precision == "fp16"

    @property
    def streamed(self) -> bool:
        """True if parameters stay on the servers."""
        return self.memory.parameters == "streamed"

    @property
    def overlaps(self) -> bool:
        """True if a step's forward pass may begin before all of its version is here, as far as these settings say.

        It needs replicas that read nothing but that version, which servers hold: no parameters or optimizers of their
        own, no clocks of their own, no codec states that may still be sent to a worker.
        """
        mode, states = self.mode, any(has_state(codec) for codec in self.codecs)
        gradients = mode.contribution is Contribution.GRADIENT and mode.pace is Pace.ROUNDS
        here = self.network.overlap and not self.streamed  # those are pulled at a version that exists everywhere
        return here and gradients and mode.holder is StateHolder.SERVERS and not states

    @property
    def codecs(self) -> tuple[CodecSpec, ...]:
        """The job's codec, and the groups' own codecs."""
        return (self.codec, *(group.codec for group in self.groups if group.codec is not None))


build_now(JobConfig)  # build now: every member's proposal is parsed on its connection's thread


def audits_of(config: JobConfig) -> Audits | None:
    """Return the audits of a job with these settings; None: there are none."""
    return Audits(config.seed, config.audit.share, config.replicas) if config.audit.share > 0 else None


def paces_by_port(config: JobConfig) -> bool:
    """True if links may be paced by what ports are measured to carry: not where little is sent to few at a time."""
    return config.network.pacing == "auto" and not (config.keyed or config.streamed or config.staggered)


def steps_plainly(config: JobConfig) -> bool:
    """True if each version is one step of `config.optimizer` with the mean gradient of all replicas.

    Then a snapshot has what a checkpoint of plain training has: parameters, and that optimizer's state.
    """
    rounds = config.mode.pace is Pace.ROUNDS and config.mode.contribution is Contribution.GRADIENT
    return rounds and config.quorum is None and not config.own_optimizer


def step_by_step(config: JobConfig) -> bool:
    """True if no replica begins a step before all have made the one before."""
    return config.mode.clock is Clock.STEP


def optimizers_of(config: JobConfig) -> tuple[Optimizer, ...]:
    """Return all optimizers of the job, on workers or servers."""
    own = (group.optimizer for group in config.groups)
    return (config.optimizer, config.applied, *(optimizer for optimizer in own if optimizer is not None))


def features_of(config: JobConfig) -> frozenset[Feature]:
    """Return the features that the settings need beside the mode."""
    local, policy, groups = config.local, config.policy, config.groups
    asked = {
        Feature.CLIP: config.clip is not None, Feature.DECIDES: config.evaluation.plateau is not None,
        Feature.AVERAGE: config.average is not None,
        Feature.SKIP: config.nonfinite == "skip",
        Feature.ACCUMULATE: config.accumulate > 1,
        Feature.GROUPS: any(group.weight_decay is not None or group.lr_scale != 1.0 for group in groups),
        Feature.SUMS: any(isinstance(optimizer, Sum) for optimizer in optimizers_of(config)),
        Feature.MUON: any(isinstance(optimizer, Muon) for optimizer in optimizers_of(config)),
        Feature.CODEC: any(codec != Raw() for codec in config.codecs),
        Feature.CODEC_STATE: any(has_state(codec) for codec in config.codecs),
        Feature.DOWN: config.down != Raw(), Feature.FP16: config.precision == "fp16",
        Feature.HOLD: config.memory.hold != "fp32", Feature.STREAMED: config.streamed,
        Feature.OWN_OPTIMIZER: bool(config.own_optimizer),
        Feature.OWN_LOOP: config.reading.order == "own",
        Feature.STREAM: config.reading.order == "stream", Feature.PASSES: config.reading.passes > 0,
        Feature.FRESH_INNER: local is not None and not local.keep_inner,
        Feature.PARTS: (local is not None and local.fragments > 1)
        or any(group.sync_every is not None or group.sync_offset for group in groups),
        Feature.DELAY: local is not None and local.delay > 0,
        Feature.FOLD: isinstance(policy, Async) and policy.fold > 1,
        Feature.COMPENSATION: config.compensation > 0,
        Feature.FINGERPRINTS: config.audit.fingerprints > 0, Feature.KEYED: config.keyed,
        Feature.AUDIT: config.audit.share > 0,
    }
    return frozenset(feature for feature, is_asked in asked.items() if is_asked)


def rate_of(config: JobConfig, update: int, reductions: int = 0) -> float:
    """Return the rate of the servers' update with that number, after so many reductions (`plateau`)."""
    rate = rate_at(config.applied_schedule, update, config.rounds)
    return rate if config.evaluation.plateau is None else config.evaluation.plateau.reduced(rate, reductions)


def schedule_of(optimizer: Optimizer) -> Schedule:
    """Return the learning rate of an optimizer, over the steps that it makes."""
    return Constant(optimizer.lr) if isinstance(optimizer.lr, (int, float)) else optimizer.lr


class Settings(TypedDict, total=False):
    """The keywords of `job.train`: the fields of JobConfig, for type checkers."""

    replicas: int
    batch: int
    steps: int
    optimizer: Optimizer
    sync: Mode
    accumulate: int
    clip: float | None
    average: EMA | SWA | None
    seed: int
    precision: Literal["fp32", "bf16", "fp16"]
    loss_scale: LossScaling
    nonfinite: Literal["stop", "skip", "continue"]
    decay_1d: bool
    groups: Sequence[Group]
    codec: CodecSpec
    down: DownSpec
    table_std: float
    memory: Memory
    audit: Audit
    evaluation: Evaluation
    reading: Reading
    network: Network
    tune: Literal["off", "auto"]


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
            "(network.shard_bytes)"
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


_BY_WORD = Raw | Fp16 | Bf16  # each word by itself, wherever its shard begins


def with_start_values(config: JobConfig, given: Container[str], nbytes: int, cluster: Welcome) -> tuple[JobConfig, str]:
    """Choose `network.shard_bytes` for a model of which `nbytes` are trained, if it is not among the settings that are
    `given`. With 0 bytes nothing new is chosen. `cluster` is what the coordinator has said of the job's members.

    Returns the configuration, and a sentence that says why; "": nothing was chosen. A job that has shards keeps them:
    a worker that comes later, and a run that is resumed, have the same. Every worker chooses the same.
    """
    if "network.shard_bytes" in given:
        return config, ""
    if cluster.shard_bytes >= 0:
        return _cut_in(config, cluster.shard_bytes), ""
    if not nbytes or not _free(config):
        return config, ""
    if cluster.one_host:
        return _cut_in(config, shards_on_one_host(nbytes, cluster.servers)), ""
    if config.tune != "auto" or config.clip is not None:
        return config, ""
    size, why = shards_for(nbytes, cluster.workers, cluster.servers, cluster.link_mbit)
    return _cut_in(config, size), why


def _cut_in(config: JobConfig, size: int) -> JobConfig:
    return msgspec.structs.replace(config, network=msgspec.structs.replace(config.network, shard_bytes=size))


def _free(config: JobConfig) -> bool:
    """True if the bytes of the result do not depend on where shards are cut: every word is treated by itself, or (for a
    norm) each 1 MiB."""
    whole = config.keyed or config.streamed
    by_word = isinstance(config.sync, Sync | AllReduce) and not isinstance(config.optimizer, Muon | Sum)
    return by_word and not whole and all(isinstance(codec, _BY_WORD) for codec in (*config.codecs, config.down))
