"""`rallypoint.wrap`: joins the job with a model and an optimizer whose training loop stays the script's own."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch.optim.lr_scheduler import LRScheduler

from rallypoint.codec.spec import CodecSpec
from rallypoint.config.tree import DownSpec, Group, Network, rate_of
from rallypoint.core.optimizer import Optimizer
from rallypoint.core.policy import AllReduce, Sync
from rallypoint.errors import ConfigError, JobAborted, UsageError, sentence_of
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.launch.join import join
from rallypoint.observe.lenient import say
from rallypoint.worker.loop.session import Job
from rallypoint.worker.ranks.run import RankJob
from rallypoint.worker.wrapped import OneSample, OwnRun, Replay, WrappedOptimizer

_runs: list[OwnRun] = []  # of this process, those that are not over


class WrapSettings(TypedDict, total=False):
    """The keywords of `rp.wrap` that are settings of `JobConfig` too, and mean the same."""

    clip: float | None
    nonfinite: str
    decay_1d: bool
    groups: Sequence[Group]
    codec: CodecSpec
    down: DownSpec
    network: Network
    seed: int


def wrap(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | Optimizer, *, steps: int,
    schedule: LRScheduler | None = None, replicas: int = 0, batch: int = 0, seeded: bool = True,
    **settings: Unpack[WrapSettings],
) -> WrappedOptimizer:  # fmt: skip
    """Join the job, and return an optimizer whose `step` is the job's; the loop and its batches stay the script's.

    Call it once, where a DDP script wraps its model: after the model is built and on its device, before the loop. Each
    process is one replica. It returns when all are here, and the model holds the job's weights: the first ones, or in
    a restarted process the weights of the step in progress. Begin the loop at `WrappedOptimizer.position`, or let
    it be `WrappedOptimizer.epochs`: a process that begins at a later step than 0 and steps without either is an error.

    `optimizer` decides who steps. A torch optimizer steps here, in every process, with the mean gradient of all: the
    script may set its rates. Rallypoint's own, as ``rp.AdamW(lr=3e-4)``, steps on the servers, which hold its state.

    `steps` is the number of optimizer steps of the whole job. `schedule` is stepped up to the position; from there the
    loop steps it, as before. `replicas`: how many processes compute; 0: as many as the
    launcher has started. `batch`: samples of one process at one step, for the rate that is shown; 0: batches are
    counted. `seeded`: the global random generators are seeded for each step, so that a step's random numbers do not
    depend on when the process was started.

    Raises ConfigError for settings that do not go together, UsageError for a model that is wrapped already or has
    gradients, and what `rallypoint.join` and `Job.train` raise. Calls in the loop that mean something else than in
    plain PyTorch are UsageErrors at their line: ``clip_grad_norm_``, a GradScaler, ``step()`` of the inner optimizer.
    """
    _check_first(model, optimizer)
    return wrap_in(
        join(), model, optimizer, steps=steps, schedule=schedule, replicas=replicas, batch=batch, seeded=seeded,
        **settings,
    )  # fmt: skip


def wrap_in(
    job: Job | RankJob, model: torch.nn.Module, optimizer: torch.optim.Optimizer | Optimizer, *, steps: int,
    schedule: LRScheduler | None = None, replicas: int = 0, batch: int = 0, seeded: bool = True,
    **settings: Unpack[WrapSettings],
) -> WrappedOptimizer:  # fmt: skip
    """`wrap` for a job that the script has joined."""
    _check_first(model, optimizer)
    if strange := {name.partition(".")[0] for name in settings} - WrapSettings.__annotations__.keys():
        raise ConfigError(f"rp.wrap has no setting {min(strange)}: it is one of job.train, where the job has the loop")
    own = isinstance(optimizer, torch.optim.Optimizer)
    if not isinstance(job, Job) or job.ranks > 1:
        raise ConfigError("rp.wrap is for workers of one process: leave --ranks out, or use job.train")
    job.run_type = OwnRun
    told: dict[str, Any] = {
        "sync": AllReduce() if own else Sync(), "replicas": replicas or job.started, "batch": 1, "steps": steps,
        "reading.items_per_sample": batch or 1, "reading.order": "own", "network.overlap": False, **settings,
    }  # fmt: skip
    if not batch:
        told["reading.item"] = "batches"
    told |= {"own_optimizer": optimizer} if own else {"optimizer": optimizer}
    replay = None if schedule is None else Replay(schedule)
    run = job.train(model, OneSample(), **told)
    assert isinstance(run, OwnRun)
    _runs[:] = [*(known for known in _runs if not known.released), run]
    run.seeded = seeded
    atexit.register(_script_ends, job, run)
    if not run.begin():
        raise SystemExit(0)  # the job is over, and this process has stood by
    # One that nobody steps shows the parameters, and the rate
    inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=rate_of(run.config, run.position)
    )  # fmt: skip
    if replay is not None:
        replay.to(run.position)
    return WrappedOptimizer(run, inner, steps_here=own, schedule=schedule if own else None)


def _check_first(model: torch.nn.Module, optimizer: torch.optim.Optimizer | Optimizer) -> None:
    """Raise UsageError for what is wrapped already, and for gradients of before."""
    if isinstance(optimizer, WrappedOptimizer) or any(run.trains(model) for run in _runs):
        raise UsageError(
            "rp.wrap is called a second time for one model, whose job is not over: call it once, and give it the "
            "torch optimizer itself (with several groups, if parameters need different settings); optimizer.finish() "
            "ends a job before its last step"
        )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise UsageError(
                f"parameter {name} has a gradient before rp.wrap, which no step of the job would use: call backward() "
                "after rp.wrap, and model.zero_grad() before it where it was a trial"
            )


def _script_ends(job: Job, run: OwnRun) -> None:
    """The script ends. If the job is not over, nobody else can compute its replica: say so."""
    error = getattr(sys, "last_value", None)
    if run.over or run.released or job.left or run.replaced or isinstance(error, JobAborted):
        return
    why = sentence_of(error) if error is not None else (
        f"its script has ended at step {run.position} of {run.config.steps}: call optimizer.finish() where the loop "
        "ends earlier on all processes"
    )  # fmt: skip
    run.give_up(why)
    if error is None and isinstance(job, EmbeddedJob):
        say(f"warning: {why}. On a cluster the job would fail", error=True)
