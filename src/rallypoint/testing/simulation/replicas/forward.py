"""Simulated forward passes that begin before all of their version is here, and those that pull streamed parameters."""

from __future__ import annotations

from rallypoint.net.pool import bytes_of
from rallypoint.testing.simulation.exchange import SimulatedExchange
from rallypoint.testing.simulation.names import TOKEN
from rallypoint.testing.simulation.network import PlayedThread
from rallypoint.testing.simulation.replicas.contents import Content
from rallypoint.testing.simulation.replicas.floats import WORDS
from rallypoint.worker.exchange.arrivals import Range
from rallypoint.worker.exchange.locked import Rewound


class SimulatedForward:
    """One worker's forward passes that begin early: they swap shard after shard into the model."""

    _early_share = 0.8  # of all steps, those that may begin early

    def __init__(self, exchange: SimulatedExchange, thread: PlayedThread, swap_s: float) -> None:
        """A swap takes at most `swap_s` seconds."""
        self._exchange, self._job, self._thread, self._swap_s = exchange, exchange.job, thread, swap_s
        self._random = exchange.node.world.random
        self._swapped: dict[int, tuple[Content, Content]] = {}  # shard -> what was in its slot, and in the model
        self._runs = False

    def allow(self, may: bool) -> None:
        """The main thread looks for something to do. `may`: nothing is to be done first with the next version."""
        if self._exchange.forward.possible:
            self._exchange.forward.allow(may and self._random.random() < self._early_share)

    def run(self, model: list[Content]) -> None:
        """Swap all shards into `model`, in any order, and report the install. Raises Rewound when that is stale."""
        assert not self._swapped, "the model holds a part of another version"
        self._runs = True
        for shard in self._random.sample(range(self._job.shards), self._job.shards):
            for new in self._exchange.forward.take([shard]):
                before = self._swapped[new] = self._exchange.read(new), model[new]
                self._thread.sleep(self._swap_s * self._random.random())
                same = (self._exchange.read(new), model[new]) == before
                assert same, f"the slot of shard {new} has changed meanwhile"
                self._exchange.write(new, before[1])
                model[new] = before[0]
        self._exchange.forward.installed()
        self._swapped.clear()
        self._runs = False
        self._check(model)

    def undo(self, model: list[Content]) -> None:
        """The replica ends: swap back what an early pass has swapped."""
        for shard, (slot, before) in self._swapped.items():
            self._exchange.write(shard, slot)
            model[shard] = before
        if self._runs and self._exchange.shell.machine.step >= 0:
            self._check(model)
        self._swapped.clear()
        self._runs = False

    def _check(self, model: list[Content]) -> None:
        for shard, content in self._job.dense(model):
            own = self._job.cadence.updates_before(shard, self._exchange.shell.machine.step)
            self._job.check_version(shard, own, content)


class SimulatedWords:
    """One worker's pulls of streamed parameters, forward and backward: each shard comes in two pieces."""

    def __init__(self, exchange: SimulatedExchange, thread: PlayedThread, shard_s: float) -> None:
        """A pass takes at most `shard_s` seconds for each shard."""
        self._exchange, self._thread, self._shard_s = exchange, thread, shard_s

    def pull(self) -> dict[int, Content]:
        """The parameters of the step in progress. Raises Rewound when they cannot be had any more."""
        exchange, found = self._exchange, dict[int, Content]()
        random, words = exchange.node.world.random, exchange.words
        for shards in 2 * [sorted(exchange.job.absent)] if exchange.job.streamed else ():
            random.shuffle(shards)
            cuts = {shard: random.choice((2, 6, 8, 14)) for shard in shards}
            asked = [
                words.ask((Range(shard, 0, cut, 0), Range(shard, cut, WORDS - cut, cut)), newest=False)
                for shard, cut in cuts.items()
            ]
            try:
                for (shard, cut), pulled in zip(cuts.items(), asked, strict=True):
                    self._thread.sleep(self._shard_s * random.random())
                    if not words.wait(pulled, unwinds=True):
                        raise Rewound
                    for at in (0, cut):
                        name = exchange.node.world.tokens.of(bytes_of(pulled.values[at:])[:TOKEN])
                        assert found.setdefault(shard, name) == name, f"shard {shard} changes within a step"
            finally:
                for pulled in asked:
                    words.drop(pulled)
        return found
