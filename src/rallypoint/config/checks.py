"""Checks that a configuration makes sense. Each error names the setting, and what to write instead."""

from __future__ import annotations

import math

from rallypoint.codec.spec import DGC
from rallypoint.config.tree import JobConfig, schedule_of
from rallypoint.core.layout import Layout
from rallypoint.core.modes import Feature, refusal
from rallypoint.core.optimizer import SGD, Adagrad, Optimizer
from rallypoint.core.policy import Async, BoundedStaleness, LocalSteps, Sync
from rallypoint.core.schedule import StepDecay
from rallypoint.errors import ConfigError


def check(config: JobConfig) -> None:
    """Raise ConfigError for a setting that makes no sense, naming the setting and a valid value."""
    for name in ("replicas", "batch", "steps", "accumulate", "window", "items_per_sample"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}: it must be at least 1")
    if config.batch % config.accumulate:
        raise ConfigError(f"a batch of {config.batch} cannot be cut into accumulate={config.accumulate} equal parts")
    _check_mode(config)
    _check_periods(config)
    if why := refusal(config.mode.name, config.features):
        raise ConfigError(why)
    if not (config.table_std >= 0 and math.isfinite(config.table_std)):
        raise ConfigError(f"table_std is {config.table_std}: use a finite number that is not negative")
    for name in ("presum_bytes", "hold_bytes", "in_flight_bytes"):
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
    schedule = schedule_of(optimizer)
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


def features_with(config: JobConfig, layout: Layout) -> frozenset[Feature]:
    """Return the features that the job needs beside its mode, by its settings and its model.

    Raises ConfigError where they do not fit.
    """
    found = {Feature.BUFFERS} if any(shard.role == "buffers" for shard in layout.shards) else set()
    found |= {Feature.TABLES} if layout.tables else set()
    features = config.features | found
    if why := refusal(config.mode.name, features):
        raise ConfigError(why)
    return features


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
