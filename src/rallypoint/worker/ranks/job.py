"""A rank that does not lead, as a job: it has no link to anybody but the other ranks of its worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import msgspec
import torch

from rallypoint.config import JobConfig, parse
from rallypoint.data.loader import MicroBatches
from rallypoint.data.spec import Collate, Data, Loader, given
from rallypoint.errors import UsageError, sentence_of
from rallypoint.parallel.group import RankGroup, is_of_another_rank
from rallypoint.parallel.holdings import Parallel
from rallypoint.worker.carried import TrainSettings
from rallypoint.worker.keys.settings import NOT_OF_RANKS, KeySettings, KeyShape
from rallypoint.worker.keys.store import KeyStore
from rallypoint.worker.ranks.followers import LEFT_LOOP
from rallypoint.worker.ranks.run import RankRun
from rallypoint.worker.ranks.spread import SpreadModel
from rallypoint.worker.ranks.tensors import in_order, layout_of


class Start(msgspec.Struct, frozen=True):
    """What the leader tells the other ranks before a run: the resolved configuration, the run's folder, and with how
    many intra-op threads each rank computes."""

    config: dict[str, Any]
    folder: str
    threads: int


class RankJob:
    """What `rallypoint.join` returns on a rank that does not lead: use it as a `Job`."""

    def __init__(self, group: RankGroup, id: str) -> None:
        self.id = id
        self._group = group
        self._run: RankRun | None = None

    @property
    def rank(self) -> int:
        """This process's number among the ranks of its worker."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """The number of ranks of this worker."""
        return self._group.size

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
        batches = MicroBatches(
            data.dataset, config, spread.device, data.collate, part=spread.part, loader=data.loader
        )
        self._run = RankRun(spread, config, batches, in_order(spread, layout_of(spread, config)), folder)
        self._group.at("in the script, before its loop")
        return self._run

    def leave(self, status: int = 0) -> None:
        """Does nothing: the leader is told, and tells this rank."""

    def close(self) -> None:
        """End the process groups that `rallypoint.join` has made."""
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
            raise UsageError(LEFT_LOOP.format(rank=self.rank))
        self.close()


def told(group: RankGroup, config: JobConfig, folder: str) -> None:
    """On the leader: tell the other ranks the configuration."""
    group.all_bytes(msgspec.msgpack.encode(Start(msgspec.to_builtins(config), folder, torch.get_num_threads())))


def heard(group: RankGroup) -> tuple[JobConfig, Path]:
    """On another rank: return what the leader tells."""
    start = msgspec.msgpack.decode(group.all_bytes(b"")[0], type=Start)
    torch.set_num_threads(start.threads)
    return parse(start.config), Path(start.folder or ".")
