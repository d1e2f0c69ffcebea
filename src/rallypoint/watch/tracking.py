"""Gives a run's figures to a tracker (TensorBoard and its like), from the run's log, in a process of its own."""

from __future__ import annotations

import hashlib
import html
import importlib.util
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rallypoint.errors import UsageError, to_install
from rallypoint.own_files import held, opened, read_file
from rallypoint.watch.follow import Event, Log, check_log
from rallypoint.watch.state import EVALUATION, RunState

_LOOK_S = 0.25
PREDECESSOR_S = 5.0  # so long another process that follows the same log, for the same target, may take to end
_NEEDS = {"tensorboard": ("tensorboardX",), "wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
KINDS = tuple(_NEEDS)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run, for its tracker."""

    name: str  # the name of its folder
    settings: Mapping[str, str] = field(default_factory=dict)  # how it was started
    step: int = 0  # the first step that will be logged. Whatever the tracker has of this step and later ones is void.


class Tracker(Protocol):
    """Takes the figures of one run.

    `start` comes first, and again whenever the run goes back to an earlier step, or is tracked again from a step on.
    Steps rise between two calls of it. Any method may raise, and may take its time: a tracker has a process of its own.

    One that prints, in five lines::

        class Printing:
            def start(self, run): print(f"{run.name} from step {run.step}")
            def log(self, step, figures): print(step, *(f"{name} {value:.4g}" for name, value in figures.items()))
            def close(self): print("over")
    """

    def start(self, run: RunFacts) -> None:
        """Begin, or go back to ``run.step``."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step: ``{"loss": 2.5, "lr": 0.001}``. Values may be nan or infinite."""

    def close(self) -> None:
        """The end: make everything durable. May be called twice, and without `start`."""


class Position(msgspec.Struct, frozen=True):
    """How far a log was given to a tracker: the file's number on its disk, and how many of its events."""

    file: int = -1
    events: int = 0


def parse_target(text: str) -> str:
    """Return ``KIND:FOLDER`` with the whole path. UsageError if there is no such tracker, or its package is missing."""
    kind, colon, folder = text.partition(":")
    if kind not in _NEEDS or not colon or not folder:
        raise UsageError(f"--track {text}: not KIND:FOLDER, KIND being one of {', '.join(KINDS)}")
    for name in _NEEDS[kind]:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"tracking with {kind} needs {name}: {to_install(kind)}")
    return f"{kind}:{os.path.abspath(folder)}"


def parse_targets(named: Iterable[str]) -> tuple[str, ...]:
    """Return the targets, each once. Raises as `parse_target` does."""
    return tuple(dict.fromkeys(map(parse_target, named)))


def place_of(folder: Path, target: str) -> Path:
    """The file in a run's folder that says how far a tracker has come with this target."""
    return folder / f"tracked-{target.partition(':')[0]}-{hashlib.sha256(target.encode()).hexdigest()[:8]}.json"


def track(
    folder: Path, facts: RunFacts, tracker: Tracker, place: Path, closing: threading.Event, goes_on: Callable[[], bool]
) -> int:  # fmt: skip
    """Give the run's figures to the tracker while the run `goes_on` and `closing` is not set; then what is left. At
    last close the tracker.

    It goes on where an earlier call has ended, by the position in the file `place`: what a killed process has given
    after that is given again. Returns the next step. Raises UsageError if there is no log, or another process does the
    same now, and what the tracker raises.
    """
    check_log(folder)
    # Else each step would be there twice
    taken = UsageError(
        f"another process writes {place.parent} for the same tracker already, as `rallypoint run --track` does: there "
        "is nothing left to do"
    )
    with held(place.parent, place.with_suffix(".lock").name, PREDECESSOR_S, lambda _: taken):
        log, before = Log(folder), _position(place)
        tracked = _Tracked(tracker, facts)
        while True:
            last = closing.is_set() or not goes_on()  # then what is written by now is all
            generation = log.generation
            while (events := log.piece()) is not None:
                if generation != log.generation:
                    generation, tracked = log.generation, _Tracked(tracker, facts)
                for event in events:
                    tracked.take(event, new=log.file != before.file or tracked.events >= before.events)
            if last:
                tracker.close()
                with opened(place.parent) as own:
                    own.write(place.name, msgspec.json.encode(Position(log.file, tracked.events)))
                return tracked.run.step
            closing.wait(_LOOK_S)


@dataclass(slots=True)
class _Tracked:
    """What of a log was read: `events` of them. Those that are `new` are given to the tracker."""

    tracker: Tracker
    facts: RunFacts
    events: int = 0
    run: RunState = field(default_factory=RunState)
    _begun: bool = False

    def take(self, event: Event, *, new: bool = True) -> None:
        self.events += 1
        step, (version, results) = self.run.step, self.run.evaluation
        if not self.run.take(*event) or self.run.row is None or not new:
            return
        if self.run.went_back or not self._begun:
            self._begun = True
            step = self.run.row[0] if self.run.went_back else step
            self.tracker.start(RunFacts(self.facts.name, self.facts.settings, step))
            if version == step:  # the evaluation of the version that the step begins with is not void
                self.tracker.log(version, {f"{EVALUATION}{name}": value for name, value in results.items()})
        self.tracker.log(*self.run.row)


def _position(place: Path) -> Position:
    try:
        return msgspec.json.decode(read_file(place), type=Position)
    except (OSError, msgspec.DecodeError):
        return Position()


STEP = "rallypoint/step"  # W&B's own step can only rise: an evaluation is of an earlier step
_BATCH, _BATCH_S = 900, 2.0  # figures in one transaction of MLflow, which takes 1000; seconds between two
_SETTING_CHARACTERS, _SETTINGS = 500, 100


def open_tracker(target: str) -> Tracker:
    """Return the tracker that writes to a target of `parse_target`."""
    kind, _, folder = target.partition(":")
    kinds: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
    return kinds[kind](Path(folder))


class TensorBoard(Tracker):
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
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(step, self._summaries.Summary(value=values))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, step: int, summary: Any) -> None:
        self._file.write_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()


class Wandb(Tracker):
    """``folder/wandb/offline-run-*``: ``wandb sync`` sends that, when its user wants it. It cannot take back a step: a
    run that goes back begins another one of W&B, in the same group."""

    def __init__(self, folder: Path) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # it would send its own errors and counts, offline too
        import wandb

        self._wandb: Any = wandb
        self._folder = folder.resolve()
        self._run: Any = None

    def start(self, run: RunFacts) -> None:
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
        self._run.log({**figures, STEP: step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
            self._wandb.teardown()  # only now everything is in the file


class MLflow(Tracker):
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
