"""Several models in one job, as one module whose parameters have the models' names as a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rallypoint.config import JobConfig
from rallypoint.config.models import optimizers_in
from rallypoint.core.optimizer import AdamW
from rallypoint.errors import ConfigError, ModelError

Model = torch.nn.Module | Mapping[str, torch.nn.Module]


def one_model(model: Model, settings: Mapping[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return what the job trains as one module, and the script's settings with an optimizer for each of several models.

    With one `optimizer` for models that are updated alternately, each of them has its own of that kind. Raises
    ModelError for what cannot be one of the models, ConfigError for optimizers of others.
    """
    by_name = optimizers_in(settings)
    if not isinstance(model, Mapping):
        if by_name:
            raise ConfigError(
                "optimizer is a dict, and there is one model: give job.train a dict of models with the same names, or "
                "one optimizer"
            )
        return model, dict(settings)
    one = torch.nn.ModuleDict()
    for name, part in sorted(model.items(), key=lambda item: str(item[0])):
        if not isinstance(part, torch.nn.Module):
            raise ModelError(f"the model {name!r} is a {type(part).__qualname__}: give a torch.nn.Module")
        try:
            one[name] = part
        except (KeyError, TypeError):
            raise ModelError(f"{name!r} cannot be the name of a model: use a word, such as generator") from None
    trained = {name for name, part in model.items() if any(p.requires_grad for p in part.parameters())}
    if by_name and (others := sorted(trained ^ by_name.keys())):
        what = "is not there, or is frozen" if others[0] in by_name else "has no optimizer"
        raise ConfigError(f"the model {others[0]!r} {what}: give each model that is trained an optimizer by its name")
    if settings.get("alternate") and not by_name:
        return one, {**settings, "optimizer": dict.fromkeys(sorted(trained), settings.get("optimizer", AdamW()))}
    return one, dict(settings)


def check_optimizers(model: torch.nn.Module, config: JobConfig) -> None:
    """Raise ModelError unless each trained parameter belongs to one model that has an optimizer."""
    if not config.optimizers:
        return
    first: dict[int, str] = {}
    trained: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        owner = name.partition(".")[0]
        other = first.setdefault(id(parameter), owner)
        if other != owner:
            raise ModelError(
                f"parameter {name} is one of the model {other!r} too, and each parameter has one optimizer: let one of "
                "them use the other's output, or freeze it there"
            )
        trained.add(owner)
    if others := sorted(trained ^ config.optimizers.keys()):
        what = "has no trained parameter" if others[0] in config.optimizers else "has no optimizer"
        raise ModelError(f"the model {others[0]!r} {what}, and each model of this job needs both")
