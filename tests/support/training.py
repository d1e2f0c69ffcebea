"""Training alone in this process, on an embedded cluster: the plainest loop, and what tests do beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rallypoint as rp
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.store.checkpoints import OptimizerState
from rallypoint.store.export import _Flat
from rallypoint.store.manifest import Manifest
from rallypoint.store.record import AVERAGE, MASTER
from rallypoint.store.snapshots import SnapshotStore

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).view(32, 3))
Look = Callable[[rp.Micro], object]
Loss = Callable[[Any, Any], torch.Tensor]


def optimizer_state(store: SnapshotStore, manifest: Manifest) -> OptimizerState:
    """Each trained parameter's state in a snapshot: tensors of the parameter's shape (as stored: fp32) and numbers."""
    return _Flat(store, manifest, lambda name: name not in (MASTER, AVERAGE)).optimizer()


def square(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).float().square().mean()  # type: ignore[no-any-return]


def small() -> torch.nn.Sequential:
    """Two layers with statistics between them, the same each time."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def _nothing(micro: rp.Micro) -> None:
    pass


def finish(
    run: rp.Run, model: Any, loss: Loss = square, *, before: Look = _nothing, inside: Look = _nothing,
    after: Look = _nothing,
) -> None:  # fmt: skip
    """Run a job's loop to its end.

    before, inside, after: called before each micro-batch, in it before its backward pass, and after it.
    """
    for micro in run:
        before(micro)
        with micro:
            inside(micro)
            micro.backward(loss(model, micro.batch))
        after(micro)


def train(
    model: Any, data: Any = DATA, loss: Loss = square, *, servers: int = 1, folder: Path | str = "",
    evaluate: Callable[[int], Any] | None = None, every: Any = 1, before: Look = _nothing, inside: Look = _nothing,
    after: Look = _nothing, **settings: Any,
) -> rp.Run:  # fmt: skip
    """A whole job of batches of 4, three steps if nothing else is said; `evaluate` is called every so many steps."""
    with EmbeddedJob(servers=servers, folder=str(folder)) as job:
        run = job.train(model, data, **{"batch": 4, "steps": 3, **settings})
        if evaluate is not None:
            run.every(every)(evaluate)
        finish(run, model, loss, before=before, inside=inside, after=after)
    return run
