"""A simulated forward pass that begins before all of its version is here: it swaps shard after shard into the model."""

from __future__ import annotations

from rallypoint.core.worker.overlap import OverlapMachine
from rallypoint.testing.simulation.exchange import SimulatedExchange
from rallypoint.testing.simulation.job import Content


class SimulatedForward:
    """One worker's forward passes that begin early.

    Attributes:
        runs: such a pass runs.
    """

    _early_share = 0.8  # of all steps, those that may begin early

    def __init__(self, exchange: SimulatedExchange) -> None:
        self.runs = False
        self._exchange, self._job = exchange, exchange.job
        self._model: list[Content] = []
        self._random = exchange.node.world.random
        self._left: list[int] = []  # the shards that the pass still needs; the last one is next
        self._swapped: dict[int, tuple[int, Content, Content]] = {}  # shard -> its version before, slot and model

    @property
    def _machine(self) -> OverlapMachine:
        machine = self._exchange.machine
        assert isinstance(machine, OverlapMachine)
        return machine

    def allow(self) -> None:
        """The main thread looks for something to do."""
        if isinstance(self._exchange.machine, OverlapMachine):
            self._machine.allow_early(self._random.random() < self._early_share)

    def begin(self, model: list[Content]) -> None:
        """A replica begins: early, if its version is not installed. `model` changes in place."""
        self._model = model
        self.runs = self._exchange.machine.early
        if self.runs:
            assert not self._swapped, "the model holds a part of another version"
            self._left = self._random.sample(range(self._job.shards), self._job.shards)

    @property
    def next(self) -> int | None:
        """The shard to swap next; None if it is not here yet, -1 if the model has all of them."""
        while self._left:
            if not self._machine.here(self._left[-1:]):
                return None
            shard = self._left.pop()
            if self._machine.to_swap([shard]):
                slots = self._exchange.slots
                self._swapped[shard] = (self._machine.step, slots[shard], self._model[shard])
                return shard
        return -1

    def swap(self, shard: int) -> None:
        """Some time has passed since `next` named the shard. No link has written to its slot."""
        slots = self._exchange.slots
        _, slot, model = self._swapped[shard]
        assert (slots[shard], self._model[shard]) == (slot, model), f"the slot of shard {shard} has changed meanwhile"
        slots[shard], self._model[shard] = model, slot

    def installed(self) -> None:
        """All of the version is in the model."""
        self.runs = False
        self._swapped.clear()
        self._check()

    def give_up(self) -> None:
        """The replica ends: swap back what an early pass has swapped."""
        for shard, (_, slot, model) in self._swapped.items():
            self._exchange.slots[shard], self._model[shard] = slot, model
        if self.runs and self._machine.step >= 0:
            self._check()
        self.runs = False
        self._swapped.clear()

    def _check(self) -> None:
        for shard, content in self._job.dense(self._model):
            own = self._job.cadence.updates_before(shard, self._machine.step)
            self._job.check_version(shard, own, content)
