"""A simulated worker of a store: the real exchange, and a script that pulls, computes and pushes what is due."""

from __future__ import annotations

from typing import Any

import torch

from rallypoint.codec.base import encode_ids
from rallypoint.core.keys import NEWEST
from rallypoint.core.protocol import Beat, Done, GiveUp, Leaving, NewView, Propose
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import SimulatedMembership
from rallypoint.testing.simulation.names import NBYTES, TOKEN, SimulatedTransport, payload_of
from rallypoint.testing.simulation.network import Node, World
from rallypoint.testing.simulation.replicas.contents import Content
from rallypoint.testing.simulation.replicas.floats import ROWS
from rallypoint.worker.keys import LOOK_AGAIN_S
from rallypoint.worker.keys_exchange import KeyExchange, KeyRequest

GIVES_UP_S = 1.0  # from a script's error to the end of its process
LEFT = "went back to a snapshot after its script had ended"
_NO_ROWS, _ALL_ROWS = memoryview(b""), encode_ids(torch.arange(ROWS, dtype=torch.int64, device="cpu"))


class SimulatedKeys(KeyExchange):
    """`poke` is called after every change."""

    def __init__(self, node: Node, job: SimulatedJob, send: Any, poke: Any) -> None:
        self._poke = poke
        super().__init__(job.layout, job.config, SimulatedTransport(node, "worker").context, send)

    def apply(self, change: Any) -> None:
        super().apply(change)
        self.machine.validate()
        self._poke()


class KeyedWorker:
    """One worker process.

    Its script does `store.due`, `pull(step=)` and `push(step=)` for all keys, in any order, one push at a time.
    """

    model: list[Content]

    def __init__(self, world: World, name: str, job: SimulatedJob, speed: float = 1.0) -> None:
        self.node, self.job, self.speed = Node(world, name), job, speed
        self.exchange: Any = None  # until `job.store` returns
        self.model, self.done = [], False
        self._claim: tuple[int, Any] | None = None  # the roll-backs before it said that it is done, and its claim
        self._leaving = self._acting = False
        self._due: tuple[int, int, int] | None = None  # the key, step and contributor in progress
        self._asked: dict[int, KeyRequest] = {}
        self._generation, self._last = 0, False
        self._watches = False  # it has asked how far others are, and waits as `store.due` does
        self.membership = SimulatedMembership(
            self.node, "worker", self._on_message, self._on_admitted,
            beat=lambda: Beat() if self.exchange is None else self.exchange.beat(),
        )  # fmt: skip
        self._look_again()

    # ---- the coordinator's words ----

    def _on_admitted(self, new: bool) -> None:
        self.membership.send(Propose(self.job.record))
        if self._claim is not None and self.exchange is not None and self._claim[0] == self.exchange.rolled_back:
            self.membership.send(Done(*self._claim[1]))
        if self._leaving:
            self.membership.send(Leaving())

    def leave(self) -> None:
        """SIGTERM."""
        self._leaving = True
        self.membership.send(Leaving())
        if self.exchange is not None:
            self.exchange.leave()
            self._poke()

    def _on_message(self, message: Any) -> None:
        if not isinstance(message, NewView):
            return
        if self.exchange is None:  # `job.store` returns
            self.exchange = SimulatedKeys(self.node, self.job, self.membership.send, self._poke)
            self.exchange.adopt(message.view)
            for shard in range(self.job.shards):
                nbytes = 0 if shard in self.job.table_shards else NBYTES
                self.exchange.begin(shard, payload_of(self.node.world.tokens, self.job.first(shard), nbytes))
            if self._leaving:
                self.exchange.leave()
        else:
            self.exchange.adopt(message.view)
        self._poke()

    # ---- the script ----

    def _poke(self) -> None:
        if not self._acting:
            self._acting = True
            self.node.later(0.0, self._act)

    def _look_again(self) -> None:
        if self.exchange is not None and not self.done:
            for key in range(self.job.keys):
                self.exchange.watch(self.job.shards_of(key), self._unfinished(key))
        self.node.later(LOOK_AGAIN_S, self._look_again)

    def _act(self) -> None:
        self._acting = False
        exchange = self.exchange
        if exchange is None or exchange.finished:
            return
        if exchange._gone:
            self._ends()
        elif self._claim is not None:
            self._wait_for_the_end(exchange)
        elif self._generation != exchange.rolled_back:
            self._due, self._asked, self._last = None, {}, False  # StoreRolledBack: it goes on with what is due
            self._watches = False
            self._generation = exchange.rolled_back
            self._poke()
        elif self._due is None and not self._last:
            self._begin(exchange)
        elif self._asked and all(asked.value is not None for asked in self._asked.values()):
            self._pulled()

    def _wait_for_the_end(self, exchange: SimulatedKeys) -> None:
        assert self._claim is not None
        if self._claim[0] != exchange.rolled_back and self._claim[1] is not None:
            self._claim = (self._claim[0], None)
            self.membership.send(GiveUp(LEFT, max(0, exchange.step), exchange.view.generation))
            self.node.later(GIVES_UP_S, self._ends)  # the coordinator may be away: the process ends all the same

    def _ends(self) -> None:
        self.membership.close()
        self.node.kill()

    def _begin(self, exchange: SimulatedKeys) -> None:
        """Pull for the next push that is due; when none is left, all keys once more."""
        random, found = self.node.world.random, [due for key in range(self.job.keys) for due in self._found(key)]
        if found:
            self._watches = False
            self._due = key, step, _ = random.choice(found)
            streaming = exchange.machine.by_clocks
            version = NEWEST if streaming or not step or random.random() < 0.1 else step
            self._pull(exchange, self.job.shards_of(key), version)
        elif not any(self._unfinished(key) for key in range(self.job.keys)):
            self._last = True
            self._pull(exchange, list(range(self.job.shards)), NEWEST)
        elif not self._watches:  # each answer pokes: asking after each would be a question and an answer without end
            self._watches = self._acting = True  # what follows at once pokes nobody
            for key in range(self.job.keys):
                exchange.watch(self.job.shards_of(key), self._unfinished(key))
            self._acting = False

    def _pull(self, exchange: SimulatedKeys, shards: list[int], version: int) -> None:
        self._asked, generation = exchange.need(
            {shard: (_ALL_ROWS if shard in self.job.table_shards else _NO_ROWS, NBYTES) for shard in shards}, version
        )
        assert generation == self._generation

    def _found(self, key: int) -> list[tuple[int, int, int]]:
        machine, shards = self.exchange.machine, self.job.shards_of(key)
        nexts = {one: machine.next_of(shards, one) for one in machine.contributors if machine.counts(shards, one)}
        return [(key, step, one) for one, step in nexts.items() if step is not None and step < self.job.steps]

    def _unfinished(self, key: int) -> list[int]:
        shards = self.job.shards_of(key)
        nexts = {one: self.exchange.machine.next_of(shards, one) for one in range(self.job.replicas)}
        return [one for one, step in nexts.items() if step is None or step < self.job.steps]

    def _pulled(self) -> None:
        of = self.node.world.tokens.of
        values = {shard: of(asked.value[1][:TOKEN]) for shard, asked in self._asked.items() if asked.value}
        self._asked = {}
        if self._last:
            self._end(values)
            return
        generation = self._generation
        seconds = self.job.compute_s / self.job.keys / self.speed * self.node.world.random.uniform(0.5, 1.5)
        self.node.later(seconds, lambda: self._computed(values, generation))

    def _computed(self, values: dict[int, Content], generation: int) -> None:
        """`store.push`: it raises StoreRolledBack if there was a roll-back since the step was due."""
        exchange = self.exchange
        if self._due is None or generation != exchange.rolled_back:
            self._poke()
            return
        (key, step, one), self._due = self._due, None
        self._check_read(key, step, one, values)
        pushed = {s: self.job.gradient(s, step, one, (value,)) for s, value in values.items()}
        parts = {shard: payload_of(self.node.world.tokens, content) for shard, content in pushed.items()}
        if exchange.machine.counts(values, one):
            exchange.apply(lambda: exchange.push(parts, one, step))

    def _check_read(self, key: int, step: int, one: int, values: dict[int, Content]) -> None:
        """A contributor reads what it has written."""
        if not self.job.same_bytes:
            for shard, content in values.items():
                missing = self.job.written(shard, one, step) - content
                assert not missing, f"contributor {one} pulls shard {shard} for step {step} without {sorted(missing)}"

    def _end(self, values: dict[int, Content]) -> None:
        """The script has ended: see `KeyStore.finish`."""
        exchange = self.exchange
        self.model = [values[shard] for shard in range(self.job.shards)]
        for shard, content in enumerate(self.model):
            self.job.check_end(shard, content)
        assert not exchange.machine.unfinished(), "it leaves while a push is on its way"
        self.done, self._claim = True, (exchange.rolled_back, (exchange.view.generation, -1))
        self.membership.send(Done(*self._claim[1]))

    def story(self) -> str:
        """What it waits for, where the job is stuck."""
        machine = None if self.exchange is None else self.exchange.machine
        return f"{self.node.name}: due {self._due}, asked {self._asked}, claim {self._claim}, {machine}"
