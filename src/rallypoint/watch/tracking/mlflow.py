"""MLflow's runs in an SQLite file, by mlflow-skinny (``pip install 'rallypoint[mlflow]'``)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rallypoint.watch.tracking.copying import Copying
from rallypoint.watch.tracking.tracker import RunFacts

EXPERIMENT = "rallypoint"
_TAG = "rallypoint.run"
_BATCH = 900  # figures in one transaction; MLflow takes 1000
_SETTING_CHARACTERS, _SETTINGS = 500, 100


def mlflow_tracker(folder: str, clean: Callable[[str], str] = str) -> Copying:
    """A `Tracker` that writes to ``folder/mlflow.db`` and ``folder/artifacts``: ``mlflow ui`` shows both."""
    return Copying(Path(folder), MLflowStore(Path(folder)), clean)


class MLflowStore:
    """A `Store`: the experiment "rallypoint" in ``folder/mlflow.db``. Hidden runs are marked as deleted, with a tag
    that says from which step on they are void; ``mlflow gc`` removes them."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves the machine
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # what it prints is printed by the run
        import mlflow.entities
        import mlflow.tracking

        self._entities: Any = mlflow.entities
        self._open: Any = mlflow.tracking.MlflowClient
        self._folder = folder.resolve()
        self._client: Any = None
        self._experiment = self._run = ""
        self._metrics: list[Any] = []
        self._events: list[str] = []
        self._told = 0  # of the events

    def hide(self, name: str, step: int) -> None:
        """See `Store`."""
        client = self._connected()
        which = f"tags.`{_TAG}` = '{_tag(name)}'"
        while runs := client.search_runs([self._experiment], which, max_results=100):
            for run in runs:
                client.set_tag(run.info.run_id, "rallypoint.void_from_step", str(step))
                client.delete_run(run.info.run_id)

    def begin(self, run: RunFacts) -> None:
        """See `Store`."""
        self._metrics, self._events, self._told = [], [], 0
        client = self._connected()
        self._run = client.create_run(self._experiment, tags={_TAG: _tag(run.name)}, run_name=run.name).info.run_id
        settings = {_named(name): value[:_SETTING_CHARACTERS] for name, value in run.settings.items()}
        parameters = [self._entities.Param(name, value) for name, value in settings.items()]
        client.log_batch(self._run, params=parameters[:_SETTINGS])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Store`. It keeps an infinite value as the largest number that there is."""
        now = int(time.time() * 1000)
        self._metrics += [self._entities.Metric(_named(name), value, now, step) for name, value in scalars.items()]
        if len(self._metrics) >= _BATCH:
            self._send()

    def event(self, step: int, text: str) -> None:
        """See `Store`."""
        self._events.append(f"{step}\t{text}\n")

    def flush(self) -> None:
        """See `Store`."""
        self._send()
        if self._told < len(self._events):
            self._client.log_text(self._run, "".join(self._events), "events.txt")
            self._told = len(self._events)

    def close(self) -> None:
        """See `Store`."""
        if self._client.get_run(self._run).info.lifecycle_stage == "active":  # not hidden by another process
            self.flush()
            self._client.set_terminated(self._run)

    def _send(self) -> None:
        for first in range(0, len(self._metrics), _BATCH):
            self._client.log_batch(self._run, metrics=self._metrics[first : first + _BATCH])
        self._metrics = []

    def _connected(self) -> Any:
        if self._client is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._client = self._open(tracking_uri=f"sqlite:///{self._folder / 'mlflow.db'}")
            known = self._client.get_experiment_by_name(EXPERIMENT)
            place = (self._folder / "artifacts").as_uri()
            self._experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT, place)
        return self._client


def _tag(name: str) -> str:
    return name.replace("'", "_")  # it stands in quotes in a search


def _named(name: str) -> str:
    """A name that MLflow takes: no other signs, and no path that leaves its folder."""
    parts = (part.strip(".") for part in re.sub(r"[^/\w.\- ]", "_", name).split("/"))
    return "/".join(part for part in parts if part)[:250] or "_"
