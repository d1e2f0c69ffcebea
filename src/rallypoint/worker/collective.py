"""Sums over all workers, by the servers: `SumWorker.sum` gives a vector, a future has the sum.

    reducer = Reducer(job.open_exchange(record, config), rank=0)
    future = reducer.sum(gradient)          # 1-D fp32, in place; all workers ask for the same sums in the same order
    future.wait()

The sum is the tree over worker numbers (I3): ((0 + 1) + (2 + 3)) + 4, in fp32, each addition rounded once. A thread of
its own fills slots, and copies out what has landed, so the caller goes on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rallypoint.config import record_of, resolve
from rallypoint.core.layout import Layout, TensorSpec, build_layout
from rallypoint.core.optimizer import Sum as SumOfAll
from rallypoint.core.protocol import ScriptAt
from rallypoint.core.sums import EndedScripts
from rallypoint.core.worker.rolling import RollingMachine
from rallypoint.core.worker.slots import Filled
from rallypoint.errors import ConfigError, JobAborted, UsageError
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.loop.session import Job

# How sums of any length are cut into the shards of one fixed layout, the same way on all workers.
#
# The layout has shards of a few sizes. A sum takes as many large ones as fit, then smaller ones for the rest, in turn
# among those of a size. Which shard a piece gets depends only on the lengths of the sums before it, so workers that
# ask for the same sums in the same order need not tell each other anything.


CLOCK = 0  # the shard that counts: it is used for no sum but the last one, with which the job ends
_SMALLEST, _SMALL = 64, 1024  # words
_WASTE = 8  # a piece may be smaller than its shard by so much: 1/8 of what was asked for
_ROWS = "sums.{words}.{number}"


class SumPiece(NamedTuple):
    """Words [start, stop) of a sum, in the first words of a shard."""

    start: int
    stop: int
    shard: int


def layout_of(under_way_bytes: int, shard_bytes: int) -> Layout:
    """Return a layout for sums of which about so many bytes are under way at once, in shards of at most `shard_bytes`
    (at least 16 KiB; at least two of these)."""
    largest = max(shard_bytes // 4, 4 * _SMALL)
    counts = {largest: max(2, under_way_bytes // (4 * largest))}
    size = largest // 4
    while size > _SMALL:
        counts[size], size = 4, size // 4
    counts |= {_SMALL: 8, _SMALLEST: 8}
    specs = [
        TensorSpec(_ROWS.format(words=words, number=number), (1, words), "float32", 0)
        for words, count in counts.items() for number in range(count)
    ]  # fmt: skip
    specs.append(TensorSpec("sums.clock", (1, 16), "float32", 0))  # the last one has the first shard
    return build_layout(specs, matrices=frozenset(spec.name for spec in specs))


class Cutter:
    """Cuts one sum after the other. Not thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._shards: dict[int, list[int]] = {}
        for shard in layout.shards:
            if shard.index != CLOCK:
                self._shards.setdefault(shard.words, []).append(shard.index)
        self._next = dict.fromkeys(self._shards, 0)
        self._sizes = sorted(self._shards, reverse=True)

    def cut(self, words: int) -> list[SumPiece]:
        """Return the pieces of the next sum, which has so many words (at least 1)."""
        start, pieces = 0, []
        for size in self._chosen(words):
            stop = min(words, start + size)
            pieces.append(SumPiece(start, stop, self._take(size)))
            start = stop
        return pieces

    def _chosen(self, words: int) -> Iterator[int]:
        """The sizes of the shards for a sum of so many words."""
        left = words
        for size, smaller in zip(self._sizes, [*self._sizes[1:], 0], strict=True):
            while left >= size or (left > 0 and (not smaller or size - left <= max(words // _WASTE, smaller - 1))):
                yield size
                left -= size

    def _take(self, size: int) -> int:
        number, own = self._next[size], self._shards[size]
        self._next[size] = (number + 1) % len(own)
        return own[number]


SAID_EVERY_S = 1.0
Done = Callable[[BaseException | None], None]


@dataclass(slots=True)
class _Sum:
    """A sum that was asked for. `keeps`: the words of it that the caller wants."""

    values: torch.Tensor
    into: torch.Tensor
    keeps: range
    done: Done
    left: int = 0  # pieces


class SumWorker:
    """This process as worker number `rank` of a job of sums. Any thread may ask for a sum.

    Attributes:
        asked, made: how many sums were asked for, and how many are here. (The last one, with which the job ends, is
            none of them.)
        nbytes: the size of those that were asked for.
        when_broken: called with the error when no further sum can be made; on the thread of the sums.

    Raises JobAborted, from then on and of every sum under way, when a worker is gone, when a sum is asked for after
    another worker's script has ended, or when servers have lost sums: the world is fixed, so nothing can go on.
    """

    def __init__(
        self, exchange: Exchange, rank: int, ended: EndedScripts, say: Callable[[int, int], None] | None = None
    ) -> None:
        """`ended`: the other workers' scripts. `say` is told now and then how many sums are here, and their bytes."""
        self._exchange, self._loop, self._locked = exchange, exchange.own_loop, exchange.own_loop.locked
        machine = self._locked.machine
        assert isinstance(machine, RollingMachine)
        machine.number, self._machine = rank, machine
        self._cutter = Cutter(exchange.layout)
        # By shard the pieces that wait for its turn, or for its version
        self._queues = defaultdict[int, deque[tuple[_Sum, SumPiece]]](deque)
        self._failure: BaseException | None = None
        self._closing = False
        self.when_broken: Callable[[JobAborted], None] | None = None
        self._ended, self._say, self._said_at = ended, say, 0.0
        self.asked = self.made = self.nbytes = 0
        self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
        self._thread.start()

    # ---- what others call ----

    def sum(self, values: torch.Tensor, into: torch.Tensor | None = None, keeps: range | None = None) -> PendingSum:
        """Ask for the sum of all workers' `values` (1-D fp32 on the CPU, contiguous). Leave them as they are meanwhile.

        `into` gets the words `keeps` of the sum; None: `values` itself gets all of them.
        """
        into = values if into is None else into
        keeps = range(values.numel()) if keeps is None else keeps
        future = PendingSum()
        if not keeps and not values.numel():
            future.ended(None)
            return future
        self._ask(_Sum(values, into, keeps, future.ended), lambda: self._next(values.numel()))
        return future

    def other_ended(self, rank: int, sums: int, worker: str) -> None:
        """Another worker's script has ended, after so many sums. The thread of the coordinator's link calls this."""
        self._locked.set(lambda: self._ended.told(rank, sums, worker))

    def finish(self) -> int:
        """Wait until all workers call this too. Returns the version of the clock shard: the job ends with it."""
        clock = torch.zeros(16, dtype=torch.float32, device="cpu")
        last = PendingSum()
        self._ask(_Sum(clock, clock, range(0), last.ended), lambda: [SumPiece(0, clock.numel(), CLOCK)])
        last.wait()
        with self._locked.changed:
            return self._machine.at[CLOCK]

    def broken(self, within_s: float) -> JobAborted | None:
        """Why no further sum can be made, if that is known within so long."""
        self._thread.join(within_s)
        return self._failure if isinstance(self._failure, JobAborted) else None

    def close(self) -> None:
        """End the thread. Sums under way fail."""
        with self._locked.changed:
            self._closing = True
            self._locked.changed.notify_all()
        self._thread.join()

    def _next(self, words: int) -> list[SumPiece]:
        self.asked, self.nbytes = self.asked + 1, self.nbytes + 4 * words
        return self._cutter.cut(words)

    def _ask(self, asked: _Sum, cut: Callable[[], list[SumPiece]]) -> None:
        with self._locked.changed:
            if (failure := self._failure) is None:
                pieces = cut()
                asked.left = len(pieces)
                for piece in pieces:
                    self._queues[piece.shard].append((asked, piece))
                self._locked.changed.notify_all()
        if failure is not None:
            asked.done(failure)

    # ---- the thread ----

    @property
    def _waiting(self) -> list[int]:
        """The shards for which pieces wait."""
        return [shard for shard, queue in self._queues.items() if queue]

    def _run(self) -> None:
        failure: BaseException = UsageError("the sums were closed while some were under way")
        try:
            while self._go_on():
                pass
        except BaseException as error:  # whoever waits for a sum raises it
            failure = error
        with self._locked.changed:
            self._failure = failure
            left = {id(asked): asked for queue in self._queues.values() for asked, _ in queue}
            self._queues.clear()
        for asked in left.values():
            asked.done(failure)
        if self.when_broken is not None and isinstance(failure, JobAborted):
            self.when_broken(failure)

    def _go_on(self) -> bool:
        """Do what can be done now; first wait until there is something. Returns False when this is closed."""
        with self._locked.changed:
            self._wait()
            if self._closing:
                return False
            uploads = self._machine.next_action() is not None
            landed = self._machine.landed_shards
            fills = [shard for shard in self._waiting if self._machine.may_fill(shard)]
            for shard in fills:
                self._machine.fill(shard)
        if uploads:
            self._exchange.initialise(lambda start, stop: torch.zeros(stop - start, dtype=torch.float32, device="cpu"))
        for shard in fills:
            self._fill(shard)
        for shard in landed:
            self._take(shard)
        return True

    def _wait(self) -> None:
        """Wait for something to do. While no sum is under way the script computes, as long as it likes."""
        if self._ready():
            pass
        elif self._waiting or self._machine.step < 0:
            self._locked.wait(self._ready, self._awaited)
        else:
            with self._loop.elsewhere():
                self._locked.changed.wait_for(lambda: self._ready() or self._locked.failure or self._waiting)
        if self._locked.failure is not None:
            raise self._locked.failure
        if refusal := self._ended.refusal_of(self.asked):
            raise JobAborted(refusal)
        if self._machine.broken:
            raise JobAborted(
                f"{self._machine.broken}, and this script's world is fixed: start all of it again, from the last "
                "checkpoint that it has saved"
            )

    def _ready(self) -> bool:
        machine = self._machine
        return bool(
            self._closing or machine.broken or self._ended.refusal_of(self.asked)
            or machine.complete or machine.next_action() is not None
            or any(machine.may_fill(shard) for shard in self._waiting)
        )  # fmt: skip

    def _awaited(self) -> str:
        if self._waiting == [CLOCK]:
            return "the other workers' scripts to end: this one's has, and asks for no more sums"
        shards = [shard for shard in self._machine.waits_for if self._queues.get(shard)]
        where = self._loop.where(shards or self._machine.waits_for)
        return f"sums of all workers: {where}" if where else "sums of all workers"

    def _fill(self, shard: int) -> None:
        asked, piece = self._queues[shard][0]
        words = self._exchange.memory.words(shard)
        part = asked.values[piece.start : piece.stop]
        words[: len(part)].copy_(part)
        words[len(part) :].zero_()
        self._locked.handle(Filled(shard))

    def _take(self, shard: int) -> None:
        asked = None
        if self._machine.at[shard] >= 0:  # else it is the first version, which is nobody's sum
            asked, piece = self._queues[shard][0]  # left there for `_run`, should this fail
            start, stop = max(piece.start, asked.keeps.start), min(piece.stop, asked.keeps.stop)
            if start < stop:
                words = self._exchange.memory.words(shard)[start - piece.start : stop - piece.start]
                asked.into[start - asked.keeps.start : stop - asked.keeps.start].copy_(words)
        self._locked.apply(lambda: self._machine.taken(shard))
        if asked is not None:
            self._queues[shard].popleft()
            asked.left -= 1
            if not asked.left:
                self.made += 1
                self._locked.progress.got_on()
                asked.done(None)
                self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if self._say is not None and now - self._said_at >= SAID_EVERY_S:
            self._said_at = now
            self._say(self.made, self.nbytes)


class PendingSum(Future[None]):
    """A sum that is under way."""

    def ended(self, error: BaseException | None) -> None:
        """It is here (None), or it failed. Called once."""
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)

    def then(self, call: Done) -> None:
        """Call `call` when it has ended, on the thread of the sums; at once if it has ended already."""
        self.add_done_callback(lambda one: call(one.exception()))  # (not `self`: a cycle would keep what was summed)

    def wait(self) -> None:
        """Wait for the sum. Raises JobAborted when it failed."""
        self.result()


# ---- A job of sums: joined by a script that has a loop of its own, from its first sum to its end ----


UNDER_WAY_BYTES = 16 << 20
SHARD_BYTES = 256 << 10  # a quarter of a job's own: the first and the last shard of each sum travel alone
NAMED_S = 5.0  # a worker whose connections are closed has been named by now, if it is gone
MOST_ROUNDS = (1 << 31) - 1  # of a shard: sums that it takes part in


class Sums:
    """This process as worker `rank` of `world`, which are the workers of `job`.

    Attributes:
        rank, world: the worker's number, and how many there are.
        reducer: makes the sums.
        failed: the first error of a sum, which torch has raised in the script in words of its own.

    Raises ConfigError where the cluster's settings do not fit, JobAborted when the job ends before it begins.
    """

    def __init__(self, job: Job, *, rank: int, world: int, under_way_bytes: int = UNDER_WAY_BYTES) -> None:
        """Wait until all workers and servers are here. `under_way_bytes`: about so much of the sums is, at once."""
        self.rank, self.world, self._job = rank, world, job
        ended = EndedScripts()
        job.script_ended = ended.told
        settings = {
            "replicas": world, "steps": MOST_ROUNDS, "optimizer": SumOfAll(), "nonfinite": "continue",
            "network.overlap": False,
            "network.presum_bytes": 0, "batch": 1, "reading.item": "scripts", "network.shard_bytes": SHARD_BYTES,
        }  # fmt: skip
        config = resolve(settings, job.welcome.overrides)
        record = record_of(config, layout_of(under_way_bytes, config.network.shard_bytes))
        self._exchange = job.open_exchange(record, config, early=False)
        if (count := len(self._exchange.view.workers)) != world:
            raise ConfigError(f"the cluster has {count} workers, and the script's world is {world}: start as many")
        self.reducer = SumWorker(self._exchange, rank, ended, self._say if rank == 0 else None)
        job.script_ended = self.reducer.other_ended
        self._over = False
        self.failed: BaseException | None = None

    def told(self, error: BaseException) -> BaseException:
        """Return what has failed, for an error that the script has got.

        torch raises a sum's error as ``RuntimeError: Unable to cast <the error's sentence> to Tensor``. In a collective
        over Gloo a closed connection tells of a worker that is gone, often before the coordinator's word that names it.
        """
        if self.failed is not None and (said := str(self.failed)) and said in str(error):
            return self.failed
        if not isinstance(error, JobAborted) and "gloo" in str(error) and (gone := self.reducer.broken(NAMED_S)):
            gone.__cause__ = error
            return gone
        return error

    def finish(self) -> None:
        """End the job when all workers call this. Raises JobAborted, and fails the job, when one of them is gone."""
        if self._over:
            return
        self._say(self.reducer.asked, self.reducer.nbytes, ended=True)
        try:
            version = self.reducer.finish()
        except BaseException as error:
            self.fail(error)  # nobody asks this worker for anything more, so nobody else may notice
            raise
        self._over = True
        exchange = self._exchange
        loop, generation = exchange.own_loop, exchange.view.generation
        self._job.stopping.wish("the scripts have ended")
        self._job.stopping.say(version, generation)
        self._job.done(generation, version)
        with loop.locked.changed:
            loop.locked.wait(lambda: loop.finished, lambda: "the other workers to end")
        self.close()

    def _say(self, sums: int, nbytes: int, *, ended: bool = False) -> None:
        self._job.say_script(ScriptAt(self.rank, sums, nbytes, ended))

    def fail(self, error: BaseException) -> None:
        """This worker's script has failed: the job ends for all, with this reason."""
        if not self._over:
            self._over = True
            told = UsageError(str(error)) if isinstance(error, JobAborted) else error  # nobody else has told it
            self._job.__exit__(type(told), told, None)
            self.reducer.close()

    def close(self) -> None:
        """Leave the job: end every thread and link."""
        self._over = True
        self.reducer.close()
        self._job.close()
