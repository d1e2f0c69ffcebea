"""`RallypointTrainer`: a `transformers.Trainer` whose processes are replicas of one job.

>>> trainer = RallypointTrainer(model=model, args=args, train_dataset=data)   # in place of Trainer
>>> trainer.train()

Its loop, callbacks, evaluation, logging and `save_pretrained` are transformers' own. Each process computes one replica
(`rp.wrap`): its optimizer's step takes the mean of all. A process that dies is started again by ``rallypoint run``; its
Trainer begins at the job's step, in the middle of an epoch if need be, and reads no checkpoint.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from rallypoint.bridges.wrap import wrap_in
from rallypoint.data.order import ReplicaSampler
from rallypoint.errors import ConfigError
from rallypoint.launch.join import join
from rallypoint.worker.loop.session import Job
from rallypoint.worker.wrapped import WrappedOptimizer

__all__ = ["RallypointTrainer"]


class RallypointTrainer(Trainer):  # type: ignore[misc]
    """Takes what `transformers.Trainer` takes. One `train` for one process.

    The mean over replicas is clipped by `max_grad_norm`, on the servers. Each process evaluates the whole evaluation
    set; replica 0 logs, saves checkpoints and reports. When one process stops early, all end with its step.

    Raises ConfigError for fp16, FSDP, DeepSpeed, data sets without a length, and a `get_train_dataloader` of its own.

    Attributes:
        wrapped: the job's optimizer; None before `train`.
    """

    optimizer: Any  # torch's; from `train` on the wrapped one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.wrapped: WrappedOptimizer | None = None
        self._joined: Any = None
        self._sampler: ReplicaSampler | None = None
        self._skip = 0
        self.loss: Any = 0.0  # of the step in progress
        super().__init__(*args, **kwargs)
        self.add_callback(_EndsWithTheJob(self))

    # ---- the job ----

    @property
    def replica(self) -> int:
        """Which replica this process computes; 0 before it is known."""
        return 0 if self.wrapped is None else self.wrapped.replica

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train. Raises ConfigError for `resume_from_checkpoint`: the job goes on from its own snapshots."""
        if resume_from_checkpoint:
            raise ConfigError(
                "resume_from_checkpoint is given: a job goes on with `rallypoint resume`; weights of a checkpoint are "
                "loaded with from_pretrained"
            )
        for unsupported, what in (
            (self.args.fp16, "fp16"), (self.is_fsdp_enabled, "fsdp"), (self.is_deepspeed_enabled, "deepspeed"),
            (self.args.auto_find_batch_size, "auto_find_batch_size"), (self.args.n_gpu > 1, "several GPUs a process"),
            (self.args.ignore_data_skip, "ignore_data_skip"),  # a process that is started again would read others
        ):  # fmt: skip
            if unsupported:
                raise ConfigError(f"RallypointTrainer does not support {what}: leave it out (bf16 works)")
        if self._joined is None:
            self._joined = join()
        return super().train(None, *args, **kwargs)

    def _init_training_state(self, max_steps: int, num_update_steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        if self._sampler is None:  # nobody asked for one: each process would read the same batches
            raise ConfigError(
                "RallypointTrainer cuts each global batch of a map-style data set: give one with a length (no Iterable"
                'Dataset), train_sampling_strategy="random" or "sequential", and no get_train_dataloader of your own'
            )
        self.create_optimizer()
        self.create_scheduler(max_steps, optimizer=self.optimizer)
        self._created_lr_scheduler = False  # `_prepare_for_training` would make another, of the rates of now
        self.wrapped = wrap_in(
            self._joined, self.model, self.optimizer, steps=max_steps, schedule=self.lr_scheduler,
            clip=self.args.max_grad_norm or None, seed=self.args.seed,
            batch=self._train_batch_size * self.args.gradient_accumulation_steps,
        )  # fmt: skip
        self.optimizer = self.wrapped
        super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        self.state.global_step = self.wrapped.position
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.replica == 0
        epoch, step = divmod(self.wrapped.position, num_update_steps_per_epoch)
        self._skip = step * self.args.gradient_accumulation_steps
        return epoch, self._skip

    def _run_epoch(self, *args: Any, epoch: int, **kwargs: Any) -> None:
        if self._sampler is not None and self.wrapped is not None:
            self._sampler.replica = self.wrapped.replica
            self._sampler.set_epoch(epoch)
        if self._skip:  # this makes it leave out the first batches; there is no state of random generators to load
            kwargs["resume_from_checkpoint"], self._skip = os.devnull, 0
        super()._run_epoch(*args, epoch=epoch, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.wrapped is not None:
            self.wrapped.finish()
        return super()._finalize_training(*args, **kwargs)

    # ---- data and gradients ----

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[int] | None:
        data = self.train_dataset if train_dataset is None else train_dataset
        if not has_length(data) or self.args.train_sampling_strategy not in ("random", "sequential"):
            return None  # `_init_training_state` refuses it
        assert isinstance(self._joined, Job)
        self._sampler = ReplicaSampler(
            len(data), replicas=self._joined.started, batch=self._train_batch_size,
            shuffled=self.args.train_sampling_strategy == "random",
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )  # fmt: skip
        if not len(self._sampler):
            raise ConfigError(f"{len(data)} samples are less than one batch for each replica")
        return self._sampler

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As transformers'."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.loss = self.loss + loss
        return loss

    def _clip_grad_norm(self, model: Any) -> None:
        """The servers clip the mean."""

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of one step, over all replicas."""
        return int(super().get_total_train_batch_size(args)) * int(self._joined.started)

    # ---- who saves and reports ----

    def is_world_process_zero(self) -> bool:
        """True on the process of replica 0."""
        return self.replica == 0

    is_local_process_zero = is_world_process_zero

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers', on replica 0 only."""
        if self.replica == 0:
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.replica == 0:
            super()._save_checkpoint(model, trial)


class _EndsWithTheJob(TrainerCallback):  # type: ignore[misc]
    """Tells the job the loss, and ends the loop where another process has ended the job."""

    def __init__(self, trainer: RallypointTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the job the step's loss."""
        if self._trainer.wrapped is not None:
            self._trainer.wrapped.log(self._trainer.loss)
        self._trainer.loss = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the loop if the job is over."""
        if self._trainer.wrapped is not None and self._trainer.wrapped.over:
            control.should_training_stop = True
