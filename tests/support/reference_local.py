"""Local SGD and (streaming) DiLoCo in one process with plain PyTorch: LocalSteps over Sync must equal it.

Algorithm 1 of Douillard et al. (2023), replicas one after the other. An inner optimizer over the model's own parameters
makes the round's steps. The outer gradient is the weighted mean over replicas of start - local; an outer torch SGD
applies it. With fragments (Douillard et al., 2025) or periods of groups, the replicas' own parameters continue from
round to round, except for the shards that are due. With a delay, these are mixed in some steps later. As in
`reference`, only what the job's definition fixes is shared with the engine.
"""

from __future__ import annotations

import math

import torch

from rallypoint.config import JobConfig, settings_of
from rallypoint.core.cadence import cut_evenly
from rallypoint.core.layout import Shard
from rallypoint.core.order import derive_seed
from rallypoint.core.policy import LocalSteps
from rallypoint.core.schedule import rate_at
from rallypoint.data.dataset import MapDataset
from rallypoint.data.loader import MicroBatches
from rallypoint.data.randomness import seed_everything
from rallypoint.testing.reference import LossFunction, WeightFunction, copy_all, plain_optimizer, sum_leaves, tree_sum
from rallypoint.worker.tensors import ModelTensors


def train_local_reference(
    model: torch.nn.Module, dataset: MapDataset, loss_fn: LossFunction, config: JobConfig, *,
    weight_of: WeightFunction | None = None,
) -> list[float]:  # fmt: skip
    """Train `model` in place for `config.steps` steps. Returns the mean loss of every round.

    `weight_of(step, replica)` is what the loop passes as ``micro.backward(loss, weight=...)``. A replica's weight in
    its round's mean is the average over its steps.
    """
    assert isinstance(config.sync, LocalSteps)
    kind = _Streaming if config.staggered else _Reference
    reference = kind(model, dataset, loss_fn, config, config.sync, weight_of or (lambda step, replica: 1.0))
    size = config.steps_per_round
    firsts = range(0, config.steps, size)
    return [reference.round(r, range(s, min(s + size, config.steps))) for r, s in enumerate(firsts)]


class _Reference:
    def __init__(
        self, model: torch.nn.Module, dataset: MapDataset, loss_fn: LossFunction, config: JobConfig, mode: LocalSteps,
        weight_of: WeightFunction,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.config, self.mode, self.weight_of = model, loss_fn, config, mode, weight_of
        self.tensors = tensors = ModelTensors(model, config)
        self.batches = MicroBatches(dataset, config, tensors.device)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = [p.tensor for p in tensors.buffers]
        groups: dict[int, list[torch.nn.Parameter]] = {}
        for placed in tensors.parameters:
            assert isinstance(placed.tensor, torch.nn.Parameter)
            groups.setdefault(placed.entry.spec.group, []).append(placed.tensor)
        self.groups = [(settings_of(config, group), members) for group, members in groups.items()]
        self.inner = [self.new_inner() for _ in range(config.replicas)]
        self.start = [torch.nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.outer = plain_optimizer(mode.outer, [{"params": self.start, "weight_decay": mode.outer.weight_decay}])
        assert isinstance(mode.outer.lr, float)
        self.outer.param_groups[0]["lr"] = mode.outer.lr

    def new_inner(self) -> torch.optim.Optimizer:
        return plain_optimizer(
            self.config.optimizer,
            [{"params": m, "weight_decay": s.weight_decay, "scale": s.lr_scale} for s, m in self.groups],
        )

    def round(self, number: int, steps: range) -> float:
        buffers, kept = [b.clone() for b in self.buffers], [b.clone() for b in self.buffers]
        leaves: list[list[torch.Tensor]] = []
        weights: list[float] = []
        losses = []
        for replica in range(self.config.replicas):
            copy_all(list(self.parameters), list(self.start))
            copy_all(self.buffers, buffers)
            if not self.mode.keep_inner:
                self.inner[replica] = self.new_inner()
            loss = math.fsum(self.step(step, replica) for step in steps) / len(steps)
            weight = math.fsum(self.weight_of(step, replica) for step in steps) / len(steps)
            with torch.no_grad():
                deltas = [(start - local) * weight for start, local in zip(self.start, self.parameters, strict=True)]
                leaves.append(deltas)
            kept = [b.clone() for b in self.buffers] if replica == 0 else kept
            weights.append(weight)
            losses.append(loss * weight)
        total = tree_sum(weights)
        for start, delta in zip(self.start, sum_leaves(leaves), strict=True):
            start.grad = delta * (1.0 / total)
        self.outer.step()
        copy_all(list(self.parameters), list(self.start))
        copy_all(self.buffers, kept)
        return math.fsum(losses) / total

    def step(self, step: int, replica: int) -> float:
        optimizer, losses = self.inner[replica], []
        optimizer.zero_grad()
        for micro in range(self.config.accumulate):
            batch = self.batches.load(step, replica, micro)
            seed_everything(derive_seed(self.config.seed, "compute", step, replica, micro))
            loss = self.loss_fn(self.model, batch)
            (loss / self.config.accumulate).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(self.config.schedule, step, self.config.steps) * group["scale"]
        optimizer.step()
        optimizer.zero_grad()
        return math.fsum(losses) / len(losses)


class _Streaming(_Reference):
    """Staggered rounds: `G` steps of every replica, then the outer step of the shards that are due."""

    def __init__(
        self, model: torch.nn.Module, dataset: MapDataset, loss_fn: LossFunction, config: JobConfig, mode: LocalSteps,
        weight_of: WeightFunction,
    ) -> None:  # fmt: skip
        super().__init__(model, dataset, loss_fn, config, mode, weight_of)
        shards = self.tensors.layout.shards
        self.shards = [shard for shard in shards if shard.role == "parameters"]
        self.when = self.periods()
        self.late: list[tuple[Shard, torch.Tensor]] = []  # with a delay: the result of the round before
        self.local = [self.vector() for _ in range(config.replicas)]
        self.start = [torch.nn.Parameter(self.local[0][s.start : s.stop].clone()) for s in self.shards]
        self.outer = plain_optimizer(mode.outer, [{"params": self.start, "weight_decay": mode.outer.weight_decay}])
        assert isinstance(mode.outer.lr, float)
        self.outer.param_groups[0]["lr"] = mode.outer.lr

    def vector(self) -> torch.Tensor:
        """Return the model's parameters as a flat vector."""
        vector = torch.zeros(self.tensors.layout.words, dtype=torch.float32, device="cpu")
        for placed in self.tensors.parameters:
            placed.of(vector).copy_(placed.tensor.detach())
        return vector

    @torch.no_grad()
    def load(self, vector: torch.Tensor) -> None:
        """Load the model's parameters from a flat vector."""
        for placed in self.tensors.parameters:
            placed.tensor.copy_(placed.of(vector))

    def round(self, number: int, steps: range) -> float:
        buffers, kept = [b.clone() for b in self.buffers], [b.clone() for b in self.buffers]
        due = [(s, start) for s, start in zip(self.shards, self.start, strict=True) if self.is_due(s.index, steps.stop)]
        leaves: list[list[torch.Tensor]] = []
        weights: list[float] = []
        losses = []
        for replica in range(self.config.replicas):
            self.load(self.local[replica])
            copy_all(self.buffers, buffers)
            loss = self.steps(steps, replica) / len(steps)
            weight = math.fsum(self.weight_of(step, replica) for step in steps) / len(steps)
            local = self.local[replica] = self.vector()
            leaves.append([(start.detach() - local[s.start : s.stop]) * weight for s, start in due])
            kept = [b.clone() for b in self.buffers] if replica == 0 else kept
            weights.append(weight)
            losses.append(loss * weight)
        total = tree_sum(weights)
        self.outer.zero_grad()  # without a gradient torch leaves a parameter and its momentum unchanged
        for (_, start), delta in zip(due, sum_leaves(leaves), strict=True):
            start.grad = delta * (1.0 / total)
        self.outer.step()
        new = [(shard, start.detach().clone()) for shard, start in due]
        self.late = new if self.mode.delay else []
        for shard, values in new if not self.late or steps.stop == self.config.steps else ():
            for local in self.local:
                local[shard.start : shard.stop] = values
        copy_all(self.buffers, kept)
        self.load(self.local[0])  # after the last round, which updates all shards, every replica has the same
        return math.fsum(losses) / total

    def steps(self, steps: range, replica: int) -> float:
        """Make one replica's steps of a round. Returns the sum of their losses."""
        losses = []
        for index, step in enumerate(steps):
            if index == min(self.mode.delay, len(steps) - 1) and self.late:
                local = self.vector()
                for shard, new in self.late:
                    own = local[shard.start : shard.stop]
                    own.copy_(new if self.mode.mix == 1.0 else own * (1.0 - self.mode.mix) + new * self.mode.mix)
                self.load(local)
            losses.append(self.step(step, replica))
        return math.fsum(losses)

    def periods(self) -> dict[int, tuple[int, int]]:
        """Return each shard's (every, offset): it is due after the steps that are `offset` modulo `every`."""
        when, periods = {}, []
        for shard in self.shards:
            group = self.config.groups[shard.group - 2] if shard.group >= 2 else None
            if group is not None and group.sync_every is not None:
                when[shard.index] = (group.sync_every, group.sync_offset)
            else:
                periods.append(shard)
        every, fragments = self.mode.steps, self.mode.fragments
        for shard, fragment in zip(periods, cut_evenly([s.nbytes for s in periods], fragments), strict=True):
            when[shard.index] = (every, (fragment + 1) * every // fragments % every)
        return when

    def is_due(self, shard: int, end: int) -> bool:
        """True if the shard is due after `end` steps, or if the job ends there."""
        every, offset = self.when[shard]
        return end == self.config.steps or end % every == offset
