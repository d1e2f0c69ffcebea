"""W&B's offline runs, by wandb (``pip install 'rallypoint[wandb]'``)."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rallypoint.watch.tracking.copying import Copying
from rallypoint.watch.tracking.tracker import RunFacts

PROJECT = "rallypoint"
STEP = "rallypoint/step"  # W&B's own step can only rise: events and evaluations are of earlier steps


def wandb_tracker(folder: str, clean: Callable[[str], str] = str) -> Copying:
    """A `Tracker` that writes ``folder/wandb/offline-run-*``: ``wandb sync`` sends that, when its user wants it."""
    return Copying(Path(folder), WandbStore(Path(folder)), clean)


class WandbStore:
    """A `Store`: offline runs of W&B. Hidden ones are moved to ``folder/void``, where ``wandb sync`` does not look."""

    _ended = 0  # how often W&B's process was ended

    def __init__(self, folder: Path) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # it would send its own errors and counts, offline too
        import wandb

        self._wandb: Any = wandb
        self._folder = folder.resolve()
        self._run: Any = None
        self._of = 0  # `_ended` when the run began

    def hide(self, name: str, step: int) -> None:
        """See `Store`."""
        for run in self._folder.glob(f"wandb/offline-run-*-{_mark(name)}*"):
            place = self._folder / "void"
            place.mkdir(exist_ok=True)
            run.rename(place / f"{run.name}-from-step-{step}")

    def begin(self, run: RunFacts) -> None:
        """See `Store`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # Offline, and nothing but what `log` is given: not the command line, the host, git, the code or what is printed
        quiet = self._wandb.Settings(
            mode="offline", console="off", silent=True, disable_git=True, disable_code=True, save_code=False,
            disable_job_creation=True, x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
            x_save_requirements=False,
        )  # fmt: skip
        notes = f"goes on from step {run.step}: from there on, earlier runs of this name are void" if run.step else None
        self._run = self._wandb.init(
            project=PROJECT, name=run.name, id=_mark(run.name) + secrets.token_hex(4), dir=str(self._folder),
            config=dict(run.settings), notes=notes, settings=quiet, reinit="create_new",
        )  # fmt: skip
        self._of = WandbStore._ended
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Store`."""
        self._run.log({**scalars, STEP: step})

    def event(self, step: int, text: str) -> None:
        """See `Store`."""
        self._run.log({"event": text, STEP: step})

    def flush(self) -> None:
        """See `Store`. W&B has a process of its own that writes, soon, and also when this one is killed."""

    def close(self) -> None:
        """See `Store`."""
        if self._of == WandbStore._ended:  # else another one's end was also the end of this run
            self._run.finish()
            WandbStore._ended += 1
            self._wandb.teardown()  # only now everything is in the file


def _mark(name: str) -> str:
    """What the numbers of all W&B runs of this run begin with."""
    return hashlib.sha256(name.encode()).hexdigest()[:8]
