"""`RallypointStrategy`: a Lightning `Trainer` whose processes are replicas of one job.

>>> trainer = Trainer(strategy=RallypointStrategy(clip=1.0), max_epochs=3)

Lightning's own loop, callbacks, loggers and checkpoints stay. Each process computes one replica (`rp.wrap`): its
optimizer's step takes the mean of all. A process that dies is started again by ``rallypoint run``; its Trainer begins
at the job's step, in the middle of an epoch if need be, and reads no checkpoint.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, IterableDataset

from rallypoint.bridges.wrap import wrap_in
from rallypoint.data.order import ReplicaSampler
from rallypoint.data.spec import ordered
from rallypoint.errors import ConfigError
from rallypoint.launch.join import join
from rallypoint.worker.wrapped import Replay, WrappedOptimizer

__all__ = ["RallypointStrategy"]

_LOADER = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip


class RallypointStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """One process with one device, of as many as the launcher has started. One `fit` for one process.

    `clip` is the global norm at which servers clip the mean gradient (in place of ``gradient_clip_val``). `seed` is
    that of the order of samples. `device`: by default a GPU, if there is one.

    Each training batch is the replica's part of a global batch; validation runs whole, on every process, so all see the
    same figures. Replica 0 is the global zero: it logs and saves, and nobody waits for that.

    Raises ConfigError for what has no place in it: several optimizers, manual optimization, fp16, a Trainer without an
    end, data sets without a length.

    Attributes:
        wrapped: the job's optimizer; None before `fit`.
    """

    strategy_name = "rallypoint"

    def __init__(self, device: str = "", *, clip: float | None = None, seed: int = 0, **kwargs: Any) -> None:
        here = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % gpus}" if (gpus := torch.cuda.device_count()) else "cpu"
        super().__init__(device or here, **kwargs)
        self.wrapped: WrappedOptimizer | None = None
        self._batch = 1  # samples that a replica reads at a time; the training loader says it
        self._loss: torch.Tensor | None = None  # of the step in progress
        self._clip, self._seed, self._epoch, self._skip = clip, seed, 0, 0
        self._job: Any = None

    @property
    def is_global_zero(self) -> bool:
        """True on the process of replica 0."""
        return self.global_rank == 0

    def setup(self, trainer: Any) -> None:
        """Set up, join the job, and begin where it is."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        if self._job is None:
            self._job = join()
        super().setup(trainer)
        self._check(trainer)
        steps = trainer.estimated_stepping_batches
        if not math.isfinite(steps) or steps < 1:
            raise ConfigError("RallypointStrategy needs a last step: give the Trainer max_steps or max_epochs")
        replays = [(config, Replay(config.scheduler)) for config in self.lr_scheduler_configs]
        self.wrapped = wrap_in(
            self._job, self.lightning_module, trainer.optimizers[0], steps=int(steps), clip=self._clip, seed=self._seed,
            batch=trainer.accumulate_grad_batches * self._batch,
        )  # fmt: skip
        self.optimizers = [self.wrapped]
        self.global_rank = rank_zero_only.rank = self.wrapped.replica
        self.world_size = self.wrapped.replicas
        self._epoch, self._skip = _go_to(trainer, self.wrapped.position)
        for config, replay in replays:
            done = self.wrapped.position if config.interval == "step" else self._epoch
            replay.to(done // config.frequency)

    def _check(self, trainer: Any) -> None:
        for unsupported, why in (
            (len(self.optimizers) != 1, "one optimizer: for several use job.store in a loop of your own"),
            (not self.lightning_module.automatic_optimization, "automatic optimization: use rp.wrap in a plain loop"),
            (bool(trainer.gradient_clip_val), "no gradient_clip_val, which would clip before the mean: give it clip="),
            (getattr(self.precision_plugin, "scaler", None) is not None, 'no loss scaling: use precision="bf16-mixed"'),
        ):  # fmt: skip
            if unsupported:
                raise ConfigError(f"RallypointStrategy needs {why}")

    def process_dataloader(self, dataloader: object) -> object:
        """Return the replica's part of a loader of training data; any other loader as it is."""
        trainer = self.lightning_module.trainer
        if not trainer.training or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset) or (
            dataloader.batch_size is None
        ):  # fmt: skip
            raise ConfigError(
                "RallypointStrategy cuts each global batch of a map-style data set: give training a DataLoader with "
                "batch_size= and shuffle=, without a sampler of its own"
            )
        (dataset, order), self._batch = ordered(dataloader), dataloader.batch_size
        sampler = ReplicaSampler(
            len(dataset), replicas=self._job.started, batch=self._batch, shuffled=order == "shuffled", seed=self._seed,
        )  # fmt: skip
        sampler.replica, sampler.epoch = self.global_rank, trainer.current_epoch
        sampler.skip = self._skip * dataloader.batch_size if sampler.epoch == self._epoch else 0  # else it is reloaded
        if not len(sampler):
            raise ConfigError(f"{len(dataset)} samples are less than one batch for each replica")
        kept: dict[str, Any] = {name: getattr(dataloader, name) for name in _LOADER}
        return DataLoader(dataset, batch_size=dataloader.batch_size, sampler=sampler, **kept)

    def post_backward(self, closure_loss: Any) -> None:
        """As Lightning's; tells the job the step's loss, of which this is a part where gradients are accumulated."""
        super().post_backward(closure_loss)
        part = closure_loss.detach()
        self._loss = part if self._loss is None else self._loss + part
        if self.wrapped is not None:
            self.wrapped.log(self._loss)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; ends training where another process has ended the job."""
        result = super().optimizer_step(*args, **kwargs)
        self._loss = None
        if self.wrapped is not None and self.wrapped.over:
            self.lightning_module.trainer.should_stop = True
        return result

    def on_train_end(self) -> None:
        """End the job, if it does not end by itself."""
        if self.wrapped is not None:
            self.wrapped.finish()


def _go_to(trainer: Any, position: int) -> tuple[int, int]:
    """Set the Trainer's progress to where the job is, as a checkpoint of that step would. Returns the epoch, and how
    many of its batches are done."""
    fit, accumulate = trainer.fit_loop, trainer.accumulate_grad_batches
    epoch, step = divmod(position, math.ceil(trainer.num_training_batches / accumulate))
    fit._combined_loader = None  # `setup_data` is called again: now the replica is known
    if position == 0:
        return 0, 0
    done, begun = step * accumulate, epoch + (step > 0)
    state = fit.state_dict()
    for when, batches in (("total", epoch * trainer.num_training_batches + done), ("current", done)):
        state["epoch_progress"][when] = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
        names = ("ready", "started", "processed", "completed")
        state["epoch_loop.batch_progress"][when] = dict.fromkeys(names, batches)
    stepped = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    stepped["total"] = stepped["current"] = {"ready": position, "completed": position}
    fit.load_state_dict(state)
    fit.epoch_loop._batches_that_stepped = position
    return epoch, done
