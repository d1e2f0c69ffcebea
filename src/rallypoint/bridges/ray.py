"""`RallypointTrainer`: what `ray.train.torch.TorchTrainer` is for Ray Train, with workers that may be lost.

A lost worker or node restarts nobody: its replicas of the step in progress are computed elsewhere. So there is no
`FailureConfig(max_failures=...)` to set, and no checkpoint to load in the training function.

The training function gets to the workers as Ray's own trainers send theirs: pickled (cloudpickle), inside of the user's
own Ray cluster. Rallypoint's own links never carry pickles.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rallypoint.errors import UsageError
from rallypoint.launch import run
from rallypoint.launch.console import RunConsole
from rallypoint.launch.join import join
from rallypoint.launch.plan import HERE, SNAPSHOTS_FOLDER, Launch
from rallypoint.store.export import export_snapshot
from rallypoint.store.snapshots import Retention

if TYPE_CHECKING:
    from rallypoint.worker.loop.run import Run

__all__ = ["RallypointTrainer", "join", "report"]

REPORTS, CHECKPOINT = "reports.jsonl", "checkpoint_{:06d}"
RUN, FINAL = "rallypoint", "checkpoint_final"  # folders in the results: the run's own, and the exported model
_PLACE = "RALLYPOINT_RAY_RESULTS"  # in a worker: where `report` writes
_KEEP = "RALLYPOINT_RAY_KEEP"  # and how many checkpoints it keeps
_SCRIPT = """\
import sys
sys.path[:0] = {paths!r}
from rallypoint.bridges.ray import run_shipped
run_shipped({results!r}, {payload!r}, keep={keep!r})
"""


class RallypointTrainer:
    """Trains a function that calls `rallypoint.join` on workers of a Ray cluster.

    >>> trainer = RallypointTrainer(train, scaling_config=ScalingConfig(num_workers=(2, 8)))
    >>> result = trainer.fit()
    """

    def __init__(
        self, train_loop_per_worker: Callable[..., Any], *, train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: Any = None, run_config: Any = None, servers: int = 2, replication: int = 0, standby: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Take what a `TorchTrainer` takes, and what Rallypoint needs besides.

        train_loop_per_worker: the function that each worker calls, with `train_loop_config` if that is given.
        scaling_config: `num_workers` is 4, or (2, 8) for from two to eight; `use_gpu` and `resources_per_worker` say
            what each needs.
        run_config: `name`, and `storage_path`, a folder that all nodes see; `checkpoint_config.num_to_keep` is how many
            snapshots are kept, and how many reported checkpoints (the last; by default 3 and all).
        servers, replication, standby, settings: as in ``rallypoint run --servers ... --set KEY=VALUE``.

        Raises UsageError where Ray Train is not installed, or for what is not supported.
        """
        train = _train()
        self._function, self._config = train_loop_per_worker, train_loop_config
        self._scaling, self._run = scaling_config or train.ScalingConfig(), run_config or train.RunConfig()
        if getattr(self._run, "callbacks", None) or getattr(self._run, "worker_runtime_env", None):
            raise UsageError("RunConfig's callbacks and worker_runtime_env are not supported")
        self._servers, self._replication, self._standby = servers, min(replication, servers), standby
        self._settings = dict(settings or {})

    def fit(self) -> Any:
        """Train to the last step. Returns a `ray.train.Result`; raises `ray.train.TrainingFailedError` if it fails.

        After Ctrl-C or SIGTERM every process is ended, and KeyboardInterrupt raised.

        `metrics` are the last that were reported; `checkpoint` is the last that was reported, or else has the last
        snapshot's model (``model.safetensors``). `path` holds both, and the run's own folder.
        """
        import ray
        from ray import cloudpickle

        train = _train()
        if not ray.is_initialized():
            ray.init(log_to_driver=False)  # as Ray's own trainers do: the cluster of this machine, or a new one
        results = self._results()
        with tempfile.TemporaryDirectory(prefix="rallypoint-") as home:
            script = Path(home) / "train.py"
            payload = base64.b64encode(cloudpickle.dumps((self._function, self._config))).decode()
            shipped = {"results": str(results), "payload": payload, "keep": self._kept()}
            # Workers find there what the function's module imports, as Ray's workers do
            folders = dict.fromkeys((os.path.abspath(sys.path[0] or "."), os.getcwd()))
            paths = [path for path in folders if os.path.isdir(path)]
            script.write_text(_SCRIPT.format(paths=paths, **shipped))
            plan = self._plan(script, results / RUN)
            console = RunConsole()
            status = run.launch(plan, console)
            if status == run.INTERRUPTED:
                raise KeyboardInterrupt
            if status != 0:
                raise train.TrainingFailedError(console.failure or f"the run in {plan.folder} has failed")
        return result_of(results)

    def _results(self) -> Path:
        where = str(self._run.storage_path or Path.home() / "ray_results")
        if "://" in where:
            raise UsageError(f"storage_path {where}: give a folder that all nodes see")
        name = self._run.name or f"RallypointTrainer_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        return Path(where).expanduser().resolve() / name

    def _plan(self, script: Path, folder: Path) -> Launch:
        number = self._scaling.num_workers
        least, most = number if isinstance(number, tuple) else (1, number)
        needs = dict(self._scaling.resources_per_worker or {})
        return Launch(
            worker=(sys.executable, str(script)), script=str(script), folder=str(folder), engine="ray",
            workers=(least, most), workers_start=least if isinstance(number, tuple) else most, standby=self._standby,
            servers=self._servers, replication=self._replication, bind=f"{HERE}:0", overrides=self._settings,
            snapshots=str(folder / SNAPSHOTS_FOLDER), threads=max(1, int(needs.get("CPU", 1))),
            gpus=float(needs.get("GPU", 1 if self._scaling.use_gpu else 0)),
            retention=Retention(keep_last=self._kept() or 3),
        )  # fmt: skip

    def _kept(self) -> int:
        """How many snapshots, and reported checkpoints, are kept; 0: the user has not said."""
        checkpoints = self._run.checkpoint_config
        return int((checkpoints and checkpoints.num_to_keep) or 0)


def report(run: Run, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
    """In a training function: report metrics, and a checkpoint if there is one, as `ray.train.report` does.

    Call it on every worker: what the lead worker of `run` reports counts. It waits for nobody, and after a roll-back
    the same step may be reported again. `checkpoint` is a `ray.train.Checkpoint`, whose folder is copied to the
    results. Does nothing where no trainer has started the worker.
    """
    if not (results := os.environ.get(_PLACE)) or not run.lead:
        return
    path, place = Path(results), ""
    said = {"metrics": dict(metrics), "checkpoint": place}
    json.dumps(said, default=_number)  # it raises before anything is written
    there = sorted(path.glob("checkpoint_[0-9]*"))
    if checkpoint is not None:
        number = int(there[-1].name.rpartition("_")[2]) + 1 if there else 0
        said["checkpoint"] = place = CHECKPOINT.format(number)
        checkpoint.to_directory(str(path / place))
    with (path / REPORTS).open("a") as file:
        file.write(json.dumps(said, default=_number) + "\n")
    if place and (keep := int(os.environ.get(_KEEP, "0"))):
        for old in there[: max(0, len(there) + 1 - keep)]:
            shutil.rmtree(old, ignore_errors=True)


def _number(value: Any) -> Any:
    """Return NumPy's and torch's numbers as Python's. TypeError for anything else."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a metric is a number or a text, not {type(value).__name__}")


def run_shipped(results: str, payload: str, keep: int = 0) -> None:
    """On a worker: call the training function that the driver has sent. `keep`: the reported checkpoints; 0: all."""
    from ray import cloudpickle

    os.environ[_PLACE], os.environ[_KEEP] = results, str(keep)
    function, config = cloudpickle.loads(base64.b64decode(payload))
    function(config) if config is not None else function()


def result_of(results: Path) -> Any:
    """Return the `ray.train.Result` of a run that has ended well."""
    train = _train()
    file = results / REPORTS
    reports = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with_one = [said for said in reports if said["checkpoint"] and (results / said["checkpoint"]).is_dir()]
    told = [(train.Checkpoint(str(results / said["checkpoint"])), said["metrics"]) for said in with_one]
    if told:
        checkpoint = told[-1][0]
    else:
        (results / FINAL).mkdir(exist_ok=True)
        export_snapshot(str(results / RUN), results / FINAL / "model.safetensors")
        checkpoint = train.Checkpoint(str(results / FINAL))
    return train.Result(
        metrics=reports[-1]["metrics"] if reports else {}, checkpoint=checkpoint, error=None, path=str(results),
        best_checkpoints=told,
    )  # fmt: skip


def _train() -> Any:
    """Return `ray.train`. Raises UsageError when it is not installed."""
    try:
        import ray.train
    except ImportError:
        raise UsageError("there is no Ray Train here: pip install 'ray[train]'") from None
    return ray.train
