"""A simulated forward pass that begins before all of its version is here: it swaps shard after shard into the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rallypoint.core.worker.aligned import OverlapMachine
from rallypoint.testing.simulation.exchange import SimulatedExchange
from rallypoint.testing.simulation.replicas.contents import Content


class SimulatedForward:
    """One worker's forward passes that begin early.

    Attributes:
        runs: such a pass runs.
    """

    _early_share = 0.8  # of all steps, those that may begin early

    def __init__(self, exchange: SimulatedExchange, swap_s: float, swapped: Callable[[], None]) -> None:
        """A swap takes at most `swap_s` seconds; `swapped` is called after each, and when all is installed."""
        self.runs = False
        self._exchange, self._job, self._swap_s, self._told = exchange, exchange.job, swap_s, swapped
        self._model: list[Content] = []
        self._random = exchange.node.world.random
        self._left: list[int] = []  # the shards that the pass still needs; the last one is next
        self._swapped: dict[int, tuple[Content, Content]] = {}  # shard -> what was in its slot, and in the model

    @property
    def _machine(self) -> OverlapMachine:
        machine = self._exchange.machine
        assert isinstance(machine, OverlapMachine)
        return machine

    def allow(self, may: bool) -> None:
        """The main thread looks for something to do. `may`: nothing is to be done first with the next version."""
        if isinstance(self._exchange.machine, OverlapMachine):
            self._machine.allow_early(may and self._random.random() < self._early_share)

    def begin(self, model: list[Content]) -> None:
        """A replica begins: early, if its version is not installed. `model` changes in place."""
        self._model = model
        self.runs = self._exchange.machine.reads != self._exchange.machine.step
        if self.runs:
            assert not self._swapped, "the model holds a part of another version"
            self._left = self._random.sample(range(self._job.shards), self._job.shards)

    def go_on(self) -> bool:
        """Swap the next shard, or report the install once all are swapped. Returns False if it has to wait for one."""
        while self._left:
            if not self._machine.here(self._left[-1:]):
                return False
            shard = self._left.pop()
            if self._machine.to_swap([shard]):
                self._swapped[shard] = self._exchange.slots[shard], self._model[shard]
                self._exchange.node.later(self._swap_s * self._random.random(), partial(self._swap, shard))
                return True
        self._exchange.installed()
        self.runs = False
        self._swapped.clear()
        self._check()
        self._told()
        return True

    def _swap(self, shard: int) -> None:
        """Some time has passed: no link has written to the slot meanwhile."""
        slots = self._exchange.slots
        before = slot, model = self._swapped[shard]
        assert (slots[shard], self._model[shard]) == before, f"the slot of shard {shard} has changed meanwhile"
        slots[shard], self._model[shard] = model, slot
        self._told()

    def give_up(self) -> None:
        """The replica ends: swap back what an early pass has swapped."""
        for shard, (slot, model) in self._swapped.items():
            self._exchange.slots[shard], self._model[shard] = slot, model
        if self.runs and self._machine.step >= 0:
            self._check()
        self.runs = False
        self._swapped.clear()

    def _check(self) -> None:
        for shard, content in self._job.dense(self._model):
            own = self._job.cadence.updates_before(shard, self._machine.step)
            self._job.check_version(shard, own, content)
