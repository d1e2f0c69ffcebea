"""The trackers that can be named in a command: ``--track KIND:FOLDER``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from rallypoint.errors import UsageError, to_install
from rallypoint.watch.tracking.tracker import Tracker

_NEEDS = {
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
KINDS = tuple(_NEEDS)


def parse_target(text: str) -> str:
    """Return ``KIND:FOLDER`` with the whole path. UsageError if there is no such tracker, or its package is missing."""
    kind, colon, folder = text.partition(":")
    if kind not in _NEEDS or not colon or not folder:
        raise UsageError(f"--track {text}: not KIND:FOLDER, KIND being one of {', '.join(KINDS)}")
    for name in _NEEDS[kind]:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"tracking with {kind} needs {name}: {to_install(kind)}")
    return f"{kind}:{os.path.abspath(folder)}"


def targets_of(named: Iterable[str] | None, tensorboard: str | Path | None) -> tuple[str, ...]:
    """Return the targets of ``--track`` and ``--tensorboard``, each once. Raises as `parse_target` does."""
    more = () if tensorboard is None else (f"tensorboard:{tensorboard}",)
    return tuple(dict.fromkeys(parse_target(text) for text in (*(named or ()), *more)))


def open_tracker(target: str, clean: Callable[[str], str] = str) -> Tracker:
    """Return the tracker that writes to a target of `parse_target`.

    `clean` takes out of the texts of events what others must not see.
    """
    kind, _, folder = target.partition(":")
    if kind == "wandb":
        from rallypoint.watch.tracking.wandb import wandb_tracker

        return wandb_tracker(folder, clean)
    if kind == "mlflow":
        from rallypoint.watch.tracking.mlflow import mlflow_tracker

        return mlflow_tracker(folder, clean)
    from rallypoint.watch.tracking.tensorboard import TensorBoard

    return TensorBoard(folder, clean)
