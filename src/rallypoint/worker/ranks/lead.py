"""The leader's side of a group: it stands in for the whole worker, as a worker of one process does for itself."""

from __future__ import annotations

import torch

from rallypoint.config import JobConfig
from rallypoint.config.checks import check_ranks
from rallypoint.data.dataset import MapDataset
from rallypoint.data.loader import MicroBatches
from rallypoint.data.spec import GivenData
from rallypoint.parallel.group import RankGroup
from rallypoint.parallel.holdings import Parallel
from rallypoint.worker.carried import Carry
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.ranks.figures import Figures
from rallypoint.worker.ranks.followers import OtherRanks
from rallypoint.worker.ranks.gradients import RankGradients
from rallypoint.worker.ranks.job import told
from rallypoint.worker.ranks.spread import SpreadModel
from rallypoint.worker.ranks.tensors import LeaderTensors


class Lead:
    """What a group's leader has in place of the parts of a worker of one process.

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
        self._figures = Figures(group, self._spread.part)
        self.followers = OtherRanks(group, self._figures)

    def tensors(self, dataset: MapDataset) -> LeaderTensors:
        """Compare the data sets of the ranks, and return the model's tensors."""
        self._spread.check_data(dataset)
        tensors = LeaderTensors(self._spread, self._config)
        self._group.at("")
        return tensors

    def batches(self, data: GivenData) -> MicroBatches:
        """Return this rank's part of the micro-batches."""
        spread = self._spread
        return MicroBatches(
            data.dataset, self._config, spread.device, data.collate, part=spread.part, loader=data.loader
        )

    def source(self, tensors: LeaderTensors, exchange: Exchange) -> RankGradients:
        """Return the source of this worker's contributions."""
        return RankGradients(tensors, exchange, self._figures)
