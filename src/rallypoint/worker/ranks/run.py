"""The ranks of one worker: the loop of one that does not lead, its job, and the leader's side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import msgspec
import torch

from rallypoint.config import JobConfig, parse
from rallypoint.config.checks import check_ranks
from rallypoint.core.layout import Entry
from rallypoint.core.ranks import Spread
from rallypoint.data.dataset import MapDataset
from rallypoint.data.loader import MicroBatches
from rallypoint.data.randomness import seed_everything
from rallypoint.data.spec import Collate, Data, Loader, given
from rallypoint.errors import UsageError, sentence_of
from rallypoint.observe.lenient import say
from rallypoint.parallel import OrderKind, Parallel, RankGroup, RankOrder, is_of_another_rank, whole_of
from rallypoint.worker.evaluations import Evaluation, Evaluations, check_period
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.keys import NOT_OF_RANKS, KeySettings, KeyShape, KeyStore
from rallypoint.worker.loop.micro import Loop, Micro
from rallypoint.worker.module_hooks import Activations
from rallypoint.worker.precision import Autocast
from rallypoint.worker.ranks import followers
from rallypoint.worker.ranks.tensors import LeaderTensors, RankGradients, SpreadModel, in_order, layout_of
from rallypoint.worker.tensors import Carry, TrainSettings

# ---- The loop of a rank that does not lead: what the leader tells, in the same order as all other ranks ----

log = logging.getLogger("rallypoint")

_E = TypeVar("_E", bound=Evaluation)


class RankRun(Loop):
    """What `job.train` returns on a rank that does not lead: iterate over it as over `Run`.

    Attributes:
        config, folder: the resolved configuration of the job; the run's folder.
        step: steps of training in the version that the model holds; -1 before the first version.
        lead: False, as only rank 0 of a worker leads.
        worker_leads: when the job is over: rank 0 of this worker leads.
        ended: the leader has said that the loop is over.
    """

    def __init__(
        self, spread: SpreadModel, config: JobConfig, batches: MicroBatches, order: list[tuple[Entry, Spread]],
        folder: Path,
    ) -> None:  # fmt: skip
        self._spread, self.config, self._batches, self._order, self.folder = spread, config, batches, order, folder
        self._figures = followers.Figures(spread.group, spread.part)
        self._evaluations = Evaluations.unwatched(spread.model, seed=config.seed, steps=config.steps)
        self._autocast = Autocast(config, spread.device)
        self._activations = Activations(spread.model, config)
        self.step = -1
        self._started = self.ended = self.lead = self.worker_leads = False
        self._losses: list[torch.Tensor] = []
        self.logged = followers.Logged()
        self._weight, self._computed = 1.0, 0  # of the step in progress: the weight, the micro-batches

    def say(self, text: str) -> None:
        say(text)

    def stop(self, reason: str = "") -> None:
        """End the job with the next version: see `Run.stop`. Rank 0 hears of it at the replica's end."""
        if self._figures.stop is None:
            self._figures.stop = reason

    def stop_when(self, metric: str, **settings: object) -> None:
        """Raises UsageError: see `Run.stop_when`."""
        raise UsageError(f"{metric}: run.stop_when is not supported together with --ranks: call run.stop() instead")

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
        while (order := self._spread.group.hear()).kind is not OrderKind.END:
            match order.kind:
                case OrderKind.VALUE:
                    self._spread.restore_buffers()  # asked for again, after a replica has changed them
                    self._spread.collect_value(self._order[order.first][1], None)
                case OrderKind.INSTALL:
                    self._install(order.first)
                case OrderKind.EVALUATE:
                    self._evaluate(order)
                case OrderKind.COMPUTE:
                    yield from self._replica(order.first, order.second)
        self.ended = True
        if order.first:
            raise SystemExit(0)  # this worker was told to leave
        self._activations.remove()
        self.worker_leads = bool(order.second)
        self._spread.restore_buffers()

    def _install(self, version: int) -> None:
        self._spread.group.at(followers.VERSION.format(version=version))
        for _, tensor in self._order:
            self._spread.hand_out(tensor, None)
        self._spread.keep_buffers()
        self.step = self.config.steps_at(version)

    def _evaluate(self, order: RankOrder) -> None:
        self._spread.group.at(followers.EVALUATING.format(step=order.first))
        due = self._evaluations.chosen(order.second)
        agree = partial(followers.first_result, self._spread.group, self._figures)
        self._spread.restore_buffers()  # as the leader's: after the last version a replica may have changed them
        with self._autocast.on():
            self._evaluations.run(due, order.first, agree=agree)
        self._figures.stop = None  # rank 0 knows of it
        self._spread.forget_gradients()

    def _replica(self, round: int, replica: int) -> Iterator[Micro]:
        group = self._spread.group
        group.at(followers.COMPUTING.format(step=round, replica=replica))
        self._losses, self.logged = [], followers.Logged()
        self._spread.restore_buffers()
        for step in self.config.steps_of(round):
            self._computed = 0
            for index in range(self.config.accumulate):
                batch = self._batches.load(step, replica, index)
                yield Micro(self, step=step, replica=replica, index=index, batch=batch)
                if self._computed == index:
                    raise UsageError(f"step {step}, replica {replica}: the loop went on without micro.backward(loss)")
        group.at(followers.COMPUTED)
        self._figures.agree([float(loss) for loss in self._losses], self._weight, self.logged)
        self._figures.stop = None  # rank 0 knows of it
        group.at(followers.GRADIENTS)
        for entry, tensor in self._order:
            if entry.spec.group >= 0:
                self._spread.collect_gradient(tensor, None)
            else:
                self._spread.collect_value(tensor, None)

    # ---- called by Micro ----

    def enter_micro(self, micro: Micro) -> None:
        seed_everything(self._batches.compute_seed(micro.step, micro.replica, micro.index))
        self._autocast.enter()

    def exit_micro(self) -> None:
        self._autocast.leave()

    def backward_micro(
        self, micro: Micro, loss: torch.Tensor, weight: float, *, last: bool = True, retain_graph: bool = False
    ) -> None:
        if not last:
            raise UsageError("micro.backward(more=True) is for workers of one process: add the losses")
        self.computed_micro(micro, loss, weight)
        with self._autocast.off():
            (loss / self.config.accumulate if self.config.accumulate > 1 else loss).backward(  # type: ignore[no-untyped-call]
                retain_graph=retain_graph
            )

    def computed_micro(self, micro: Micro, loss: torch.Tensor | None, weight: float) -> None:
        self._computed, self._weight = self._computed + 1, weight
        if loss is not None:
            self._losses.append(whole_of(loss))


# ---- A rank that does not lead, as a job: it has no link to anybody but the other ranks of its worker ----


class Start(msgspec.Struct, frozen=True):
    """What the leader tells the other ranks before a run: the resolved configuration, the run's folder, and with how
    many intra-op threads each rank computes."""

    config: dict[str, Any]
    folder: str
    threads: int


class RankJob:
    """What `rallypoint.join` returns on a rank that does not lead: use it as a `Job`, with the same attributes."""

    def __init__(self, group: RankGroup, id: str) -> None:
        self.id, self.rank, self.ranks = id, group.rank, group.size
        self._group = group
        self._run: RankRun | None = None

    def store(self, keys: Mapping[str, KeyShape], **settings: Unpack[KeySettings]) -> KeyStore:
        """Raises UsageError: a store is for workers of one process."""
        raise UsageError(NOT_OF_RANKS)

    def train(
        self, model: torch.nn.Module, dataset: Data, *, collate_fn: Collate | None = None, loader: Loader | None = None,
        own_optimizer: object = None, own_schedule: object = None, parallel: Parallel | None = None,
        **settings: Unpack[TrainSettings],
    ) -> RankRun:  # fmt: skip
        """Train `model`, of which this rank has a part: see `Job.train`. The leader's settings count."""
        if self._run is not None:
            raise UsageError("this job has its run already: one job.train for one rp.join")
        self._group.at("in job.train, comparing the model with the other ranks'")
        config, folder = heard(self._group)
        spread = SpreadModel(self._group, model, parallel or Parallel())
        data = given(dataset, collate_fn, loader)
        spread.check_data(data.dataset)
        for tensor in spread.frozen:
            spread.collect_value(tensor, None)
        batches = MicroBatches(data.dataset, config, spread.device, data.collate, part=spread.part, loader=data.loader)
        self._run = RankRun(spread, config, batches, in_order(spread, layout_of(spread, config)), folder)
        self._group.at("in the script, before its loop")
        return self._run

    def leave(self, status: int = 0) -> None:
        """Does nothing: the leader is told, and tells this rank."""

    def close(self) -> None:
        self._group.close()

    def __enter__(self) -> RankJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            if not is_of_another_rank(error):
                called = f"the script has called sys.exit({error.code!r})" if isinstance(error, SystemExit) else ""
                self._group.last_words(called or sentence_of(error))
            return
        if self._run is not None and not self._run.ended:
            raise UsageError(followers.LEFT_LOOP.format(rank=self.rank))
        self.close()


def told(group: RankGroup, config: JobConfig, folder: str) -> None:
    """On the leader: tell the other ranks the configuration."""
    group.all_bytes(msgspec.msgpack.encode(Start(msgspec.to_builtins(config), folder, torch.get_num_threads())))


def heard(group: RankGroup) -> tuple[JobConfig, Path]:
    """On another rank: return what the leader tells."""
    start = msgspec.msgpack.decode(group.all_bytes(b"")[0], type=Start)
    torch.set_num_threads(start.threads)
    return parse(start.config), Path(start.folder).absolute()


# ---- The leader's side: it stands in for the whole worker, as a worker of one process does for itself ----


class Lead:
    """What a group's leader has in place of the parts of a worker of one process; `part` is that of `SpreadModel`.

    Made while the other ranks call `RankJob.train`. Raises ConfigError for settings that a group does not support.
    """

    def __init__(
        self, group: RankGroup, config: JobConfig, model: torch.nn.Module, parallel: Parallel | None, folder: str,
        carry: Carry | None = None,
    ) -> None:  # fmt: skip
        check_ranks(config, carries=carry is not None)
        group.at("in job.train, comparing the model with the other ranks'")
        told(group, config, folder)
        self._group, self._config = group, config
        self._spread = SpreadModel(group, model, parallel or Parallel())
        self.part, self._figures = self._spread.part, followers.Figures(group, self._spread.part)
        self.followers = followers.OtherRanks(group, self._figures)

    def tensors(self, dataset: MapDataset) -> LeaderTensors:
        """Compare the data sets of the ranks, and return the model's tensors."""
        self._spread.check_data(dataset)
        tensors = LeaderTensors(self._spread, self._config)
        self._group.at("")
        return tensors

    def source(self, tensors: LeaderTensors, exchange: Exchange) -> RankGradients:
        return RankGradients(tensors, exchange, self._figures)
