"""Several models in one job: the optimizer of each, and which of them a step updates.

Example: ``alternate=("discriminator", "generator")``. Steps 0, 2, 4, ... update the discriminator, the others the
generator: a pass through `alternate` is an *iteration*. Each model has an optimizer, and counts its own updates for its
schedule, as if it were trained alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rallypoint.config.tree import JobConfig
from rallypoint.core.cadence import Period
from rallypoint.errors import ConfigError, ModelError

_PLAIN = (str, int, float, list, tuple)


def models_of(config: JobConfig) -> tuple[str, ...]:
    """Return the names of the job's models, in the order of their groups; empty where it has one, without a name."""
    return tuple(sorted(config.optimizers))


def model_of(config: JobConfig, name: str) -> int:
    """Return the number of the model that a parameter belongs to; 0 where the job has one. Its name is a prefix."""
    if not config.optimizers:
        return 0
    model = name.partition(".")[0]
    if model not in config.optimizers:
        raise ModelError(f"parameter {name} is of the model {model!r}, which has no optimizer: give it one")
    return models_of(config).index(model)


def updated_at(config: JobConfig, step: int) -> tuple[str, ...]:
    """Return the names of the models that this step updates."""
    return _entries(config)[step % len(config.alternate)] if config.alternate else models_of(config)


def iteration_of(config: JobConfig, step: int) -> int:
    """Return the iteration of a step: the number of passes through `alternate` before it."""
    return step // max(1, len(config.alternate))


def batch_at(config: JobConfig, step: int) -> int:
    """Return the number of the global batch that a step uses."""
    return iteration_of(config, step) if config.batch_for == "iteration" else step


def period_of(config: JobConfig, model: int) -> Period:
    """Return the steps that update a model, of a job with `alternate`."""
    name = models_of(config)[model]
    first, *more = [place for place, names in enumerate(_entries(config)) if name in names]
    return Period(len(config.alternate), first, tuple(more))


def of_model(config: JobConfig, model: int) -> JobConfig:
    """Return the settings of one model, as if it were trained alone: its optimizer, and its updates as steps.

    Where a job has one model: `config` itself.
    """
    if not config.optimizers:
        return config
    name = models_of(config)[model]
    updates = period_of(config, model).before(config.steps) if config.alternate else config.steps
    return msgspec.structs.replace(
        config, optimizer=config.optimizers[name], optimizers={}, alternate=(), steps=max(1, updates)
    )


def shown(config: JobConfig, step: int) -> tuple[JobConfig, int]:
    """Return the settings of the first model that a step updates, and the number of that update of it."""
    if not config.optimizers:
        return config, step
    model = models_of(config).index(updated_at(config, step)[0])
    return of_model(config, model), period_of(config, model).before(step) if config.alternate else step


def optimizers_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a script gives as `optimizer` if it is one for each model, by name; else nothing."""
    given = settings.get("optimizer")
    if not isinstance(given, Mapping) or any(isinstance(value, _PLAIN) for value in given.values()):
        return {}  # one optimizer, as plain data
    return dict(given)


def by_model(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a script's settings with `optimizers` in place of an `optimizer` that is one for each model."""
    if not (optimizers := optimizers_in(settings)):
        return dict(settings)
    return {**{key: value for key, value in settings.items() if key != "optimizer"}, "optimizers": optimizers}


def check_models(config: JobConfig) -> None:
    """Raise ConfigError for an `alternate` that leaves out a model, or names one that is not there."""
    if not config.alternate:
        return
    if not config.optimizers:
        raise ConfigError(
            "alternate= says which of several models a step updates: give job.train a dict of models, such as "
            '{"generator": g, "discriminator": d}'
        )
    named = {name for names in _entries(config) for name in names}
    models = ", ".join(models_of(config))
    if unknown := sorted(named - config.optimizers.keys()):
        raise ConfigError(f"alternate names {unknown[0]!r}, which is no model of this job: there are {models}")
    if left := sorted(config.optimizers.keys() - named):
        raise ConfigError(
            f"alternate leaves out {left[0]}, so no step would update it: add it, or freeze its parameters "
            "(requires_grad=False) and give it no optimizer"
        )
    if not all(_entries(config)):
        raise ConfigError("alternate has an empty entry: a step updates at least one model")


def _entries(config: JobConfig) -> tuple[tuple[str, ...], ...]:
    return tuple((names,) if isinstance(names, str) else names for names in config.alternate)
