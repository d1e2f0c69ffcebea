"""Checks the names of settings before anything starts: a misspelt one would only be noticed by the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rallypoint.config.checks import structs_in, wrong_value
from rallypoint.config.tree import JobConfig
from rallypoint.core.typed import PartType, hints_of
from rallypoint.errors import ConfigError, meant

_SEVERAL = "models that take turns, each with its own optimizer, are keys of job.store: see examples/gan.py"


def _moved(group: str, name: str) -> str:
    kind = GROUPS[group].__name__
    return f"it is {group}=rp.{kind}({name}=...) now, or --set {group}.{name}=..."


GROUPS: dict[str, type[msgspec.Struct]] = {
    name: kind for name, kind in hints_of(JobConfig).items() if isinstance(kind, PartType)
}
_NAMES = {"audit.share": "audit", "audit.action": "audit_action"}
MOVED = {  # settings that earlier versions had by themselves: where each is now
    _NAMES.get(f"{group}.{name}", name): f"{group}.{name}"
    for group, kind in GROUPS.items() for name in kind.__struct_fields__
}
GONE = {  # settings that earlier versions had: what to do instead
    **dict.fromkeys(("alternate", "batch_for", "optimizers"), _SEVERAL),
    **dict.fromkeys(("scale_lr", "base_batch"), "give the rate, optimizer=rp.SGD(lr=rp.scaled_lr(0.1, 512, base=64))"),
    "audit_servers": "servers' memory is not audited any more: with --replication 2 a primary and its backup compare "
    "digests at each version; use memory with ECC",
    "offload": "wrap the forward pass in torch.autograd.graph.save_on_cpu()",
    **{name: _moved(*place.split(".")) for name, place in MOVED.items() if name not in GROUPS},
}


def check_keys(given: Mapping[str, Any], kinds: Sequence[type[msgspec.Struct]] = (JobConfig,), path: str = "") -> None:
    """Raise ConfigError for a name that no setting has, at any depth: ``stpes``, ``optimizer.learning_rate``.

    A part with a `type` (``optimizer.type=sgd``) has the settings of that type; without one, those of any type that the
    script may have chosen. `kinds`, `path`: of the part that is looked at.
    """
    chosen = [kind for kind in kinds if kind.__struct_config__.tag == given.get("type")] or kinds
    fields: dict[str, list[type[msgspec.Struct]]] = {}
    for kind in chosen:
        for name, hint in hints_of(kind).items():
            if name in kind.__struct_fields__:
                fields.setdefault(name, []).extend(structs_in(hint))
    known = {*fields, *(["type"] if any(kind.__struct_config__.tag for kind in kinds) else [])}
    for name, value in given.items():
        if not path and name in GONE:
            raise ConfigError(f"{name} is gone: {GONE[name]}")
        if name not in known:
            where = f" of {path.rstrip('.')}" if path else ""
            inner = [f"{part}.{name}" for part in fields if any(name in k.__struct_fields__ for k in fields[part])]
            hint = f": did you mean {' or '.join(inner)}?" if inner else meant(name, sorted(known))
            hint = hint or f": there are {', '.join(sorted(known))}"
            raise ConfigError(f"{path}{name} is no setting{where}{hint}")
        if isinstance(value, Mapping) and fields.get(name):
            check_keys(value, fields[name], f"{path}{name}.")


def check_settings(overrides: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that no setting has, or a value that no setting of that name can have."""
    check_keys(overrides)
    if sentence := wrong_value(overrides, partial=True):
        raise ConfigError(sentence)
