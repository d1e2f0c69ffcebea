"""A simulated worker's data plane: the product's own exchange. Its slots hold names; its main thread is played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from rallypoint.codec.base import Codec
from rallypoint.core.layout import Shard
from rallypoint.core.sums import Part
from rallypoint.core.view import ViewNumber
from rallypoint.net.frames import Header
from rallypoint.net.pool import bytes_of
from rallypoint.store.record import ShardRecord
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.names import TOKEN, NamedBuffer, SimulatedTransport, WireChannel
from rallypoint.testing.simulation.network import Node, PlayedCondition, PlayedThread, Tokens
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Coded, Content, Residual
from rallypoint.testing.simulation.replicas.floats import WORDS
from rallypoint.worker.exchange.arrivals import Range
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.links import Receiver
from rallypoint.worker.exchange.locked import Rewound, ShardMemory
from rallypoint.worker.exchange.pushes import BlockTally, Encoder, Partials

_BAD = b"\0\0\xc0\x7f"  # a word that is not a number


@dataclass
class Total:
    """What is in a slot, or was: the sum of a block that begins with the replica `first`."""

    job: SimulatedJob
    first: int
    content: Content

    def add_(self, other: Total) -> None:
        left, right = sorted((self, other), key=lambda total: total.first)
        self.first, self.content = left.first, self.job.add(left.content, right.content)


class NamedPartials(Partials):
    """Adds up names."""

    def __init__(self, exchange: SimulatedExchange) -> None:
        super().__init__()
        self._exchange = exchange

    def add_up(self, shard: int, part: Part, slot: Any, leaf: BlockTally) -> None:
        exchange = self._exchange
        total = Total(exchange.job, exchange.replica._replica, exchange.read(shard))
        super().add_up(shard, part, total, leaf)
        assert total.first == part.block.start, f"{part} begins with replica {total.first}"
        exchange.write(shard, total.content)

    def _to_keep(self, shard: int, slot: Total) -> Total:
        return replace(slot)

    def _free(self, shard: int, values: Total) -> None:
        """A name needs no room."""


class NamedCodec:
    """A codec whose state, in the place of the real one's, is the name of what was not sent."""

    lossless, carries_nonfinite = False, True

    def __init__(self, encoder: NamedEncoder, shard: int, replica: int, real: Any) -> None:
        self._encoder, self._shard, self._replica = encoder, shard, replica
        self.code, self.bytes_for, self.decode, self.decode_add = (
            real.code, real.bytes_for, real.decode, real.decode_add
        )  # fmt: skip
        self.state, self.load_state, self.reset = real.state, real.load_state, real.reset
        self._memory = bytes_of(next(iter(real.state().values())))

    def encode(self, values: Any, out: memoryview, *, seed: int) -> int:
        job, tokens, (step, generation) = self._encoder.job, self._encoder.tokens, self._encoder.now()
        known: Residual | None = tokens.of(self._memory[:TOKEN]) if any(self._memory[:TOKEN]) else None
        content, name = job.encoded(tokens.of(bytes_of(values)[:TOKEN]), 0 if known is None else known.name)
        after, of = (-1, None) if known is None else (known.step, known.generation)
        self._memory[:TOKEN] = tokens.bytes_of(Residual(name, step, generation))
        nbytes: int = min(TOKEN, self.bytes_for(len(values)))
        out[:nbytes] = tokens.bytes_of(Coded(content, step, self._replica, after, of))[:nbytes]
        return nbytes


class NamedEncoder(Encoder):
    """Encodes names."""

    def __init__(self, job: SimulatedJob, tokens: Tokens, generation: Callable[[], ViewNumber]) -> None:
        super().__init__(job.layout, job.config)
        self.job, self.tokens, self._generation, self._step = job, tokens, generation, -1

    def encode(self, shard: int, step: int, replica: int, values: Any) -> Any:
        self._step = step
        payload = super().encode(shard, step, replica, values)
        if payload is None and shard not in self.raw:  # it goes raw, and must not count
            bytes_of(values)[:TOKEN] = self.tokens.bytes_of(Coded(GARBAGE, step, replica, -1, None))
        return payload

    def now(self) -> tuple[int, ViewNumber]:
        """The step of the contribution that is encoded, and the generation."""
        return self._step, self._generation()

    def _codec(self, key: tuple[int, int]) -> Codec:
        if key not in self._codecs:
            self._codecs[key] = cast(Codec, NamedCodec(self, *key, super()._codec(key)))
        return self._codecs[key]


class SimulatedExchange(Exchange):
    """`thread` is the main one."""

    def __init__(self, node: Node, job: SimulatedJob, thread: PlayedThread) -> None:
        self.node, self.job, self._computing = node, job, False
        self._tokens, self._garbage = node.world.tokens, node.world.tokens.bytes_of(GARBAGE)
        context = replace(
            SimulatedTransport(node, "worker").context, clock=lambda: node.world.now,
            changed=lambda: cast(Any, PlayedCondition(thread, self._validate)),
        )  # fmt: skip
        encoder = NamedEncoder(job, self._tokens, lambda: self.view.generation)
        super().__init__(job.layout, job.config, context, encoder=encoder)
        self.shell = self._shell
        self._pushes.partials = NamedPartials(self)
        self._optimizer.read = self._record  # type: ignore[method-assign]
        filled, self.contributed = self.replica.contributions.filled, 0  # the name of the last contribution
        self.replica.contributions.filled = (  # type: ignore[method-assign]
            lambda shard, gradient, weight: filled(shard, job.floats.of(self.contributed), weight)
        )
        self.arrivals = cast(Any, _Landings(self, self.arrivals))
        self._wait, self._locked.wait = self._locked.wait, self._named_wait  # type: ignore[method-assign]
        self.buffer.zero_()
        for shard in range(job.shards):
            self.spoil(shard)

    def _named_wait(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Whoever waits can say for what (I8), unless nothing is assigned to him."""
        what = "nothing" if ready() else describe()
        idle = not what and self._shell.machine.view is not None and not self._shell.machine.takes_part
        assert idle or (what and not what.endswith(": ")), f"{self.me} waits for {what or 'nothing'}"
        self._wait(ready, describe)

    def _slot(self, shard: int) -> memoryview:
        """The slot's bytes; none where it has no memory now."""
        here = not isinstance(self.memory, ShardMemory) or shard in self.memory._held or shard in self.memory._kept
        return self.memory.slot(shard) if here else memoryview(bytearray())

    def read(self, shard: int) -> Content:
        place = self._slot(shard)
        return self._tokens.of(place[:TOKEN]) if len(place) else self.job.nothing

    def write(self, shard: int, content: Content, *, whole: bool = True) -> None:
        """Write into the slot; `whole`: it is finite."""
        if len(place := self._slot(shard)):
            place[:TOKEN], place[TOKEN : TOKEN + 4] = self._tokens.bytes_of(content), bytes(4) if whole else _BAD

    def spoil(self, shard: int) -> None:
        """The slot is being written."""
        place = self._slot(shard)
        place[:TOKEN] = self._garbage[: len(place)]

    def _validate(self) -> None:
        shell, machine, began = self._shell, self._shell.machine, not self._computing
        shell.validate()
        machine.validate()
        self._computing = machine.computing
        if machine.computing and began:
            paused, moves = shell.view.orders.paused, shell.view.orders.handover
            assert paused is None or machine.step < paused, f"it begins step {machine.step} of a paused job"
            assert moves is None or machine.step < moves, f"it begins step {machine.step} before shards move"

    def _record(self, header: Header, data: bytearray, shard: Shard) -> ShardRecord:
        return ShardRecord(shard.index, header.step, {"master": np.frombuffer(data[:TOKEN], np.uint8)}, {})


class _Landings:
    """What arrives: the bytes of a version come a while after its header."""

    def __init__(self, exchange: SimulatedExchange, receiver: Receiver) -> None:
        self._exchange, self._receiver = exchange, receiver
        self._coming: dict[int, tuple[WireChannel, NamedBuffer]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def arriving(self, header: Header, server: str) -> Any:
        if self._receiver.arriving(header, server) is None:
            return None
        self._exchange.spoil(header.shard)
        link = self._exchange._links.get(server)
        assert link is not None
        self._coming[header.shard] = cast(WireChannel, link._channel), NamedBuffer(None)
        return self._coming[header.shard][1]

    def landed(self, shard: int) -> None:
        channel, came = self._coming.pop(shard)

        def land() -> None:
            self._exchange.write(shard, came.content)
            self._receiver.landed(shard)

        channel.pause(self._exchange.node.world.latency() / 4, land)


# ---- Forward passes that begin before all of their version is here, and those that pull streamed parameters ----


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
