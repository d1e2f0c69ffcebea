"""Checks that settings make sense together. Each error names them, and what to write instead.

`config.values` has checked each by itself before.
"""

from __future__ import annotations

from rallypoint.codec.spec import DGC, CodecSpec, PowerSGD
from rallypoint.config.tree import JobConfig, optimizers_of
from rallypoint.core.layout import MOST_SHARD_BYTES, Layout, carried_in
from rallypoint.core.modes import Feature, refusal
from rallypoint.core.optimizer import SGD, Adagrad, Muon, Optimizer
from rallypoint.core.policy import LocalSteps, Sync
from rallypoint.core.schedule import Table
from rallypoint.errors import ConfigError

_SPARE_BYTES = 4096  # what a sparse payload has besides its numbers: a count for each 64 Ki words


def check(config: JobConfig) -> None:
    """Raise ConfigError for a setting that makes no sense, naming the setting and a valid value."""
    if config.batch % config.accumulate:
        raise ConfigError(f"a batch of {config.batch} cannot be cut into accumulate={config.accumulate} equal parts")
    _check_mode(config)
    _check_periods(config)
    if why := refusal(config.mode.name, config.features):
        raise ConfigError(why)
    if config.hold == "bf16" and config.precision != "bf16":
        raise ConfigError('hold="bf16" needs autocast, or layers would get two types: add precision="bf16"')
    if config.streamed and config.precision != "fp32":
        raise ConfigError(
            'parameters="streamed" needs precision="fp32": autocast would keep a bf16 copy of every parameter'
        )
    if config.precision == "fp16" and config.nonfinite == "continue":
        raise ConfigError('precision="fp16" skips steps that overflow: set nonfinite to "stop" or "skip"')
    if not config.keyed and any(group.optimizer is not None for group in config.groups):
        raise ConfigError("optimizer= of a group is set by job.store: give job.train one optimizer")
    for optimizer in optimizers_of(config):
        _check_optimizer(optimizer)
    plain = isinstance(config.applied, SGD) and not config.applied.momentum
    if not plain and any(isinstance(codec, DGC) for codec in config.codecs):
        raise ConfigError("codec dgc has the momentum on the workers: use rp.SGD without momentum on the servers")
    for codec in config.codecs:
        _check_payload(codec, config.shard_bytes)
    muon = any(isinstance(optimizer, Muon) for optimizer in optimizers_of(config))
    if muon and any(isinstance(codec, PowerSGD) for codec in config.codecs):
        raise ConfigError("codec powersgd cuts matrices by rows, and rp.Muon steps whole ones: use another codec")


def _check_payload(codec: CodecSpec, shard_bytes: int) -> None:
    """Other codecs leave a shard raw that they would make larger; DGC's momentum is on the worker."""
    if isinstance(codec, DGC) and 1.5 * codec.ratio * shard_bytes > MOST_SHARD_BYTES - _SPARE_BYTES:
        raise ConfigError(
            f"codec dgc takes 1.5 bytes for each of ratio={codec.ratio} of a shard's, and of shard_bytes={shard_bytes} "
            f"that is more than the {MOST_SHARD_BYTES >> 20} MiB that go in one piece: give a smaller one"
        )


def _check_optimizer(optimizer: Optimizer) -> None:
    if isinstance(optimizer.lr, Table) and (problem := optimizer.lr.problem):
        raise ConfigError(f"the table of rates cannot be used: {problem}; make it with rp.tabulated")
    if isinstance(optimizer, SGD) and optimizer.nesterov and optimizer.momentum <= 0:
        raise ConfigError("nesterov=True needs a momentum above 0")
    if isinstance(optimizer, Adagrad) and optimizer.eps == optimizer.initial_accumulator_value == 0:
        raise ConfigError(
            "adagrad with eps=0 and initial_accumulator_value=0 would divide a gradient of 0 by 0, as every unused "
            "parameter has it: give one of them a small positive value"
        )


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
    """Raise ConfigError for settings that a worker of several ranks does not support. `carries`: replicas carry state.
    """
    further = {Feature.CARRY} if carries else set()
    if why := refusal(config.mode.name, {*config.features, *further, Feature.RANKS}):
        raise ConfigError(why)
    if config.precision == "fp16":
        raise ConfigError(
            'precision="fp16" is for a worker of one process, as other ranks do not know its loss scale: use bf16'
        )
    if config.hold != "fp32":
        raise ConfigError(
            f'hold="{config.hold}" is for a worker of one process: with ranks, give fully_shard a '
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )


def _check_mode(config: JobConfig) -> None:
    if config.local is not None:
        _check_fragments(config, config.local)
    policy = config.policy
    if isinstance(policy, Sync) and policy.quorum is not None and policy.quorum > config.replicas:
        raise ConfigError(f"a quorum of {policy.quorum} of {config.replicas} replicas: use 1 to replicas, or None")


def _check_fragments(config: JobConfig, local: LocalSteps) -> None:
    if local.steps % local.fragments:
        raise ConfigError(f"fragments={local.fragments}: it must divide the {local.steps} local steps")
    if local.delay >= config.steps_per_round:
        raise ConfigError(
            f"delay={local.delay}: the delay must be below the {config.steps_per_round} steps from one "
            "synchronisation to the next"
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
