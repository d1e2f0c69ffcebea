"""The trackers that can be named in a command (``--track KIND:FOLDER``): TensorBoard, W&B offline, MLflow."""

from __future__ import annotations

import hashlib
import html
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rallypoint.watch.tracking import RunFacts, Tracker

STEP = "rallypoint/step"  # W&B's own step can only rise: an evaluation is of an earlier step
_BATCH, _BATCH_S = 900, 2.0  # figures in one transaction of MLflow, which takes 1000; seconds between two
_SETTING_CHARACTERS, _SETTINGS = 500, 100


def open_tracker(target: str) -> Tracker:
    """Return the tracker that writes to a target of `parse_target`."""
    kind, _, folder = target.partition(":")
    kinds: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
    return kinds[kind](Path(folder))


class TensorBoard:
    """Event files in ``folder/NAME``, by tensorboardX. A run that goes back begins a new file, which says from which
    step on older ones are void: TensorBoard then shows no step twice."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2, summary_pb2

        self._open: Any = event_file_writer.EventsWriter
        self._text: Any = summary.text
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._folder = folder
        self._file: Any = None

    def start(self, run: RunFacts) -> None:
        """See `Tracker`."""
        self.close()
        place = self._folder / run.name
        place.mkdir(parents=True, exist_ok=True)
        count = len(list(place.glob("events.out.tfevents.*")))
        # Readers take files in the order of their names: seconds, host, suffix
        self._file = self._open(str(place / "events"), f".{count:06d}")
        if count:
            begins = self._events.SessionLog(status=self._events.SessionLog.START)
            self._file.write_event(self._events.Event(wall_time=time.time(), step=run.step, session_log=begins))
        if run.settings and not run.step:
            rows = "\n".join(f"| {_plain(name)} | {_plain(value)} |" for name, value in run.settings.items())
            self._write(0, self._text("settings", f"| setting | value |\n|---|---|\n{rows}"))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(step, self._summaries.Summary(value=values))

    def close(self) -> None:
        """See `Tracker`."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, step: int, summary: Any) -> None:
        self._file.write_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()


class Wandb:
    """``folder/wandb/offline-run-*``: ``wandb sync`` sends that, when its user wants it. It cannot take back a step: a
    run that goes back begins another one of W&B, in the same group."""

    def __init__(self, folder: Path) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # it would send its own errors and counts, offline too
        import wandb

        self._wandb: Any = wandb
        self._folder = folder.resolve()
        self._run: Any = None

    def start(self, run: RunFacts) -> None:
        """See `Tracker`."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        # Offline, and nothing but what `log` is given: not the command line, the host, git, the code or what is printed
        quiet = self._wandb.Settings(
            mode="offline", console="off", silent=True, disable_git=True, disable_code=True, save_code=False,
            disable_job_creation=True, x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
            x_save_requirements=False,
        )  # fmt: skip
        self._run = self._wandb.init(
            project="rallypoint", group=run.name, name=_named_from(run), dir=str(self._folder),
            id=hashlib.sha256(run.name.encode()).hexdigest()[:8] + secrets.token_hex(4),
            config=dict(run.settings), notes=_note(run) or None, settings=quiet, reinit="create_new",
        )  # fmt: skip
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({**figures, STEP: step})

    def close(self) -> None:
        """See `Tracker`."""
        if self._run is not None:
            self._run.finish()
            self._run = None
            self._wandb.teardown()  # only now everything is in the file


class MLflow:
    """The experiment "rallypoint" in ``folder/mlflow.db``, by mlflow-skinny: ``mlflow ui`` shows it. It cannot take
    back a step: a run that goes back begins another one of MLflow, with the same tag ``rallypoint.run``."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves the machine
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # what it prints is printed by the run
        import mlflow.entities
        import mlflow.tracking

        self._entities: Any = mlflow.entities
        self._open: Any = mlflow.tracking.MlflowClient
        self._folder = folder.resolve()
        self._client: Any = None
        self._run, self._metrics, self._sent = "", list[Any](), 0.0

    def start(self, run: RunFacts) -> None:
        """See `Tracker`."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._client = self._open(tracking_uri=f"sqlite:///{self._folder / 'mlflow.db'}")
        known = self._client.get_experiment_by_name("rallypoint")
        place = (self._folder / "artifacts").as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment("rallypoint", place)
        tags = {"rallypoint.run": run.name, **({"mlflow.note.content": note} if (note := _note(run)) else {})}
        self._run = self._client.create_run(experiment, tags=tags, run_name=_named_from(run)).info.run_id
        settings = {_allowed(name): value[:_SETTING_CHARACTERS] for name, value in run.settings.items()}
        parameters = [self._entities.Param(name, value) for name, value in settings.items()]
        self._client.log_batch(self._run, params=parameters[:_SETTINGS])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`. It keeps an infinite value as the largest number that there is."""
        now = int(time.time() * 1000)
        self._metrics += [self._entities.Metric(_allowed(name), value, now, step) for name, value in figures.items()]
        if len(self._metrics) >= _BATCH or time.monotonic() - self._sent > _BATCH_S:
            self._send()

    def close(self) -> None:
        """See `Tracker`."""
        if self._client is not None:
            self._send()
            self._client.set_terminated(self._run)
            self._client = None

    def _send(self) -> None:
        for first in range(0, len(self._metrics), _BATCH):
            self._client.log_batch(self._run, metrics=self._metrics[first : first + _BATCH])
        self._metrics, self._sent = [], time.monotonic()


def _named_from(run: RunFacts) -> str:
    return f"{run.name} from step {run.step}" if run.step else run.name


def _note(run: RunFacts) -> str:
    """What is said of a run in stores that cannot take back a step."""
    return f"from step {run.step} on, earlier runs of {run.name} are void" if run.step else ""


def _plain(text: str) -> str:
    """A text that is Markdown and HTML no more."""
    return html.escape(text).replace("|", "&#124;").replace("`", "&#96;")


def _allowed(name: str) -> str:
    """A name that MLflow takes: no other signs, and no path that leaves its folder."""
    parts = (part.strip(".") for part in re.sub(r"[^/\w.\- ]", "_", name).split("/"))
    return "/".join(part for part in parts if part)[:250] or "_"
