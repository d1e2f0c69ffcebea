"""The loop of a rank that does not lead: it does what the leader tells, in the same order as all other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from rallypoint.config import JobConfig
from rallypoint.core.layout import Entry
from rallypoint.core.ranks import Spread
from rallypoint.data.loader import MicroBatches
from rallypoint.data.randomness import seed_everything
from rallypoint.errors import UsageError
from rallypoint.observe.lenient import say
from rallypoint.parallel.group import Kind, Order
from rallypoint.parallel.holdings import whole_of
from rallypoint.worker.activations import Activations
from rallypoint.worker.carried import Carry
from rallypoint.worker.evaluations import Evaluation, Evaluations, check_period
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.precision import Autocast
from rallypoint.worker.ranks.figures import Figures, Logged
from rallypoint.worker.ranks.followers import COMPUTED, COMPUTING, EVALUATING, GRADIENTS, VERSION, first_result
from rallypoint.worker.ranks.spread import SpreadModel

log = logging.getLogger("rallypoint")

_E = TypeVar("_E", bound=Evaluation)


class RankRun:
    """What `job.train` returns on a rank that does not lead: iterate over it as over `Run`.

    Attributes:
        ended: the leader has said that the loop is over.
    """

    def __init__(
        self, spread: SpreadModel, config: JobConfig, batches: MicroBatches, order: list[tuple[Entry, Spread]],
        folder: Path,
    ) -> None:  # fmt: skip
        self._spread, self._config, self._batches, self._order = spread, config, batches, order
        self._folder = folder
        self._figures = Figures(spread.group, spread.part)
        self._evaluations = Evaluations.unwatched(spread.model, seed=config.seed, steps=config.steps)
        self._autocast = Autocast(config, spread.device)
        self._activations = Activations(spread.model, config)
        self._step, self._started, self.ended, self._leads = -1, False, False, False
        self._losses: list[torch.Tensor] = []
        self._logged = Logged()
        self._weight, self._computed = 1.0, 0  # of the step in progress: the weight, the micro-batches

    @property
    def config(self) -> JobConfig:
        """The resolved configuration of the job."""
        return self._config

    @property
    def step(self) -> int:
        """Steps of training in the version that the model holds; -1 before the first version."""
        return self._step

    @property
    def lead(self) -> bool:
        """False: only rank 0 of a worker leads."""
        return False

    @property
    def worker_leads(self) -> bool:
        """When the job is over: True if rank 0 of this worker leads."""
        return self._leads

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._folder

    def say(self, text: str) -> None:
        """Print a line."""
        say(text)

    def stop(self, reason: str = "") -> None:
        """End the job with the next version: see `Run.stop`. Rank 0 hears of it at the replica's end."""
        if self._figures.stop is None:
            self._figures.stop = reason

    def stop_when(self, metric: str, **settings: object) -> None:
        """Raises UsageError: see `Run.stop_when`."""
        raise UsageError(f"{metric}: run.stop_when is not supported together with --ranks: call run.stop() instead")

    def log_micro(self, figures: Mapping[str, float | torch.Tensor]) -> None:
        """Add figures of one micro-batch (called by Micro): rank 0 gets them at the replica's end."""
        self._logged.add(figures)

    def carried_micro(self, micro: Micro) -> Carry:
        """Raises UsageError: rank 0 has refused ``carry=``."""
        raise UsageError("micro.carry is not supported together with --ranks")

    def carry_micro(self, micro: Micro, state: Carry) -> None:
        """Raises UsageError: see `carried_micro`."""
        self.carried_micro(micro)

    def every(self, steps: int) -> Callable[[_E], _E]:
        """Decorate an evaluation: it runs on all ranks of the worker that evaluates. See `Run.every`."""
        check_period(steps)

        def register(evaluation: _E) -> _E:
            self._evaluations.add(steps, evaluation)
            return evaluation

        return register

    def __iter__(self) -> Iterator[Micro]:
        if self._started:
            raise UsageError("a run is iterated once")
        self._started = True
        self._spread.forget_gradients()
        while (order := self._spread.group.hear()).kind is not Kind.END:
            match order.kind:
                case Kind.VALUE:
                    self._spread.restore_buffers()  # asked for again, after a replica has changed them
                    self._spread.collect_value(self._order[order.first][1], None)
                case Kind.INSTALL:
                    self._install(order.first)
                case Kind.EVALUATE:
                    self._evaluate(order)
                case Kind.COMPUTE:
                    yield from self._replica(order.first, order.second)
        self.ended = True
        if order.first:
            raise SystemExit(0)  # this worker was told to leave
        self._activations.remove()
        self._leads = bool(order.second)
        self._spread.restore_buffers()

    def _install(self, version: int) -> None:
        self._spread.group.at(VERSION.format(version=version))
        for _, tensor in self._order:
            self._spread.hand_out(tensor, None)
        self._spread.keep_buffers()
        self._step = self._config.steps_at(version)

    def _evaluate(self, order: Order) -> None:
        self._spread.group.at(EVALUATING.format(step=order.first))
        due = self._evaluations.chosen(order.second)
        agree = partial(first_result, self._spread.group, self._figures)
        self._spread.restore_buffers()  # as the leader's: after the last version a replica may have changed them
        with self._autocast.on():
            self._evaluations.run(due, order.first, agree=agree)
        self._figures.stop = None  # rank 0 knows of it
        self._spread.forget_gradients()

    def _replica(self, round: int, replica: int) -> Iterator[Micro]:
        group = self._spread.group
        group.at(COMPUTING.format(step=round, replica=replica))
        self._losses, self._logged = [], Logged()
        self._spread.restore_buffers()
        for step in self._config.steps_of(round):
            self._computed = 0
            for index in range(self._config.accumulate):
                batch = self._batches.load(step, replica, index)
                yield Micro(self, step=step, replica=replica, index=index, batch=batch)
                if self._computed == index:
                    raise UsageError(f"step {step}, replica {replica}: the loop went on without micro.backward(loss)")
        group.at(COMPUTED)
        self._figures.agree([float(loss) for loss in self._losses], self._weight, self._logged)
        self._figures.stop = None  # rank 0 knows of it
        group.at(GRADIENTS)
        for entry, tensor in self._order:
            if entry.spec.group >= 0:
                self._spread.collect_gradient(tensor, None)
            else:
                self._spread.collect_value(tensor, None)

    # ---- called by Micro ----

    def check(self) -> None:
        """Does nothing: the leader decides what is stale."""

    def enter_micro(self, micro: Micro) -> None:
        """Begin ``with micro:``."""
        seed_everything(self._batches.compute_seed(micro.step, micro.replica, micro.index))
        self._autocast.enter()

    def exit_micro(self) -> None:
        """End ``with micro:``."""
        self._autocast.leave()

    def backward_micro(
        self, micro: Micro, loss: torch.Tensor, weight: float, *, last: bool = True, retain_graph: bool = False
    ) -> None:
        """Back-propagate one micro-batch."""
        if not last:
            raise UsageError("micro.backward(more=True) is for workers of one process: add the losses")
        self._count(loss, weight)
        with self._autocast.off():
            (loss / self._config.accumulate if self._config.accumulate > 1 else loss).backward(  # type: ignore[no-untyped-call]
                retain_graph=retain_graph
            )

    def backward_at(self) -> str:
        """Nowhere: only the leader looks (called by Micro)."""
        return ""

    def computed_micro(self, micro: Micro, loss: torch.Tensor | None, weight: float) -> None:
        """The script has back-propagated one micro-batch by itself."""
        self._count(loss, weight)

    def _count(self, loss: torch.Tensor | None, weight: float) -> None:
        self._computed, self._weight = self._computed + 1, weight
        if loss is not None:
            self._losses.append(whole_of(loss))
