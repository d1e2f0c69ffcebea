"""Finds the replica of a step with the highest loss, and in it the sample: forward passes of ever fewer samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from rallypoint.data.loader import MicroBatches
from rallypoint.launch.replaying.task import Probed
from rallypoint.worker.loop.micro import Loop, Micro


class Probe(Micro):
    """A micro-batch of which only the loss is wanted: `backward` computes no gradient, and an error is the answer."""

    loss = math.nan
    failed = False
    _begun = False

    def backward(
        self, loss: torch.Tensor, *, weight: float = 1.0, more: bool = False, retain_graph: bool = False
    ) -> None:
        """Note the loss; of several, their sum."""
        one = float(loss.detach().mean())
        self.loss, self._begun, self._finished = self.loss + one if self._begun else one, True, not more

    def log(self, **figures: float | torch.Tensor) -> None:
        """Nobody is shown figures of a probe."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self._inside = False
        self._run.exit_micro()
        self.failed = not self._finished
        return isinstance(error, Exception)


class Probes:
    """Yields the micro-batches to compute; afterwards `found` says what they have shown. Changes nothing in the model.

    It halves the samples of the worst micro-batch: the half with the higher loss goes on. A model that cannot compute
    one sample alone (BatchNorm) leaves a few samples that are not told apart.
    """

    def __init__(self, model: torch.nn.Module, batches: MicroBatches, loop: Loop, sizes: tuple[int, int]) -> None:
        """`sizes`: how many replicas, and micro-batches of each."""
        self._model, self._batches, self._loop, (self._replicas, self._micros) = model, batches, loop, sizes
        self.found: Probed | None = None

    def of(self, step: int) -> Iterator[Probe]:
        """Probe all replicas of this step."""
        kept = [buffer.clone() for buffer in self._model.buffers()]
        losses: list[list[float]] = []
        for replica in range(self._replicas):
            losses.append([])
            for micro in range(self._micros):
                probe = self._probe(step, replica, micro, self._batches.load(step, replica, micro))
                yield probe
                losses[-1].append(probe.loss)
        means = [sum(of_replica) / len(of_replica) for of_replica in losses]
        worst = max(range(self._replicas), key=lambda replica: _badness(means[replica]))
        micro = max(range(self._micros), key=lambda index: _badness(losses[worst][index]))
        self.found = Probed(worst, (), tuple(map(repr, means)), "")
        yield from self._halve(step, worst, micro, means)
        for buffer, values in zip(self._model.buffers(), kept, strict=True):
            buffer.data.copy_(values)

    def _halve(self, step: int, replica: int, micro: int, means: Sequence[float]) -> Iterator[Probe]:
        samples = list(zip(self._batches.indices(step, replica, micro), self._batches.fetched(step, replica, micro),
                           strict=True))  # fmt: skip
        alone = math.nan
        while len(samples) > 1:
            halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
            tried: list[Probe] = []
            for half in halves:
                tried.append(self._probe(step, replica, micro, self._batches.batch_of([one for _, one in half])))
                yield tried[-1]
            if any(probe.failed for probe in tried) or not any(math.isfinite(probe.loss) for probe in tried):
                break  # both halves are spoilt: no single sample does it
            first = _badness(tried[0].loss) >= _badness(tried[1].loss)
            samples, alone = (halves[0], tried[0].loss) if first else (halves[1], tried[1].loss)
        self.found = Probed(replica, tuple(index for index, _ in samples), tuple(map(repr, means)), repr(alone))

    def _probe(self, step: int, replica: int, micro: int, batch: Any) -> Probe:
        return Probe(self._loop, step=step, replica=replica, index=micro, batch=batch)


def _badness(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
