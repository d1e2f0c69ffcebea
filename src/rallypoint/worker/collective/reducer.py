"""Sums over all workers, by the servers: `Reducer.sum` gives a vector, a future has the sum.

    reducer = Reducer(job.open_exchange(record, config), rank=0)
    future = reducer.sum(gradient)          # 1-D fp32, in place; all workers ask for the same sums in the same order
    future.wait()

The sum is the tree over worker numbers (I3): ((0 + 1) + (2 + 3)) + 4, in fp32, each addition rounded once. A thread of
its own fills slots, and copies out what has landed, so the caller goes on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rallypoint.core.worker.slots import Effect, Filled
from rallypoint.core.worker.sums.rolling import RollingMachine
from rallypoint.errors import JobAborted, UsageError
from rallypoint.net.summing.messages import Summed
from rallypoint.worker.collective.pieces import CLOCK, LANES, Cutter, Piece
from rallypoint.worker.exchange.exchange import Exchange

Done = Callable[[BaseException | None], None]
Tell = Callable[[Summed], None]
CLOCK_LANE = -1  # of the last sum, with which the job ends
_TELL_S, _TELL_IDLE_S = 1.0, 0.25  # seconds between two words about how many sums are here


@dataclass(slots=True, eq=False)  # two sums of equal values are not one
class _Sum:
    """A sum that was asked for: the `number`-th of its lane. `keeps`: the words of it that the caller wants."""

    values: torch.Tensor
    into: torch.Tensor
    keeps: range
    done: Done
    lane: int = CLOCK_LANE
    number: int = 0
    left: int = 0  # pieces


@dataclass(slots=True)
class _Queues:
    """The pieces that wait for their shard's turn, or for its version."""

    by_shard: dict[int, deque[tuple[_Sum, Piece]]] = field(default_factory=dict)

    def add(self, asked: _Sum, piece: Piece) -> None:
        self.by_shard.setdefault(piece.shard, deque()).append((asked, piece))

    def remove(self, failed: list[_Sum]) -> None:
        """These are waited for no more."""
        for shard, queue in self.by_shard.items():
            self.by_shard[shard] = deque(item for item in queue if item[0] not in failed)

    @property
    def waiting(self) -> list[int]:
        return [shard for shard, queue in self.by_shard.items() if queue]


class Reducer:
    """This process as worker number `rank` of a job of sums. Any thread may ask for a sum.

    Attributes:
        asked, made: how many sums were asked for, by lane; how many are here.

    Raises JobAborted, from then on and of every sum under way, when a worker is gone or servers have lost sums: the
    script's world is fixed, so nothing can go on.
    """

    def __init__(self, exchange: Exchange, rank: int, tell: Tell | None = None) -> None:
        """`tell` is called now and then with how many sums are here."""
        self._exchange, self._loop, self._locked = exchange, exchange.own_loop, exchange.own_loop.locked
        machine = self._locked.machine
        assert isinstance(machine, RollingMachine)
        machine.number, self._machine = rank, machine
        self._cutters, self._queues = [Cutter(exchange.layout, lane) for lane in range(LANES)], _Queues()
        self.asked, self._ended = Counter[int](), dict[str, Mapping[int, int]]()
        self._report = _Progress(tell)
        self._failure: BaseException | None = None
        self._closing = False
        self.made = 0
        self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
        self._thread.start()

    # ---- what others call ----

    def sum(
        self, values: torch.Tensor, into: torch.Tensor | None = None, keeps: range | None = None, lane: int = 0
    ) -> Sum:
        """Ask for the sum of all workers' `values` (1-D fp32 on the CPU, contiguous). Leave them as they are meanwhile.

        `into` gets the words `keeps` of the sum; None: `values` itself gets all of them. In one `lane` all workers ask
        for the same sums in the same order.
        """
        into = values if into is None else into
        keeps = range(values.numel()) if keeps is None else keeps
        future = Sum()
        if not keeps and not values.numel():
            future.ended(None)
            return future
        asked = _Sum(values, into, keeps, future.ended, lane)
        self._ask(asked, lambda: self._cutters[lane].cut(values.numel()))
        return future

    def finish(self) -> int:
        """Wait until all workers call this too. Returns the version of the clock shard: the job ends with it."""
        clock = torch.zeros(16)
        last = Sum()
        self._ask(_Sum(clock, clock, range(0), last.ended), lambda: [Piece(0, clock.numel(), CLOCK)])
        last.wait()
        self._report.now(self.made, 0.0)
        with self._locked.changed:
            return self._machine.at[CLOCK]

    def close(self) -> None:
        """End the thread. Sums under way fail."""
        with self._locked.changed:
            self._closing = True
            self._locked.changed.notify_all()
        self._thread.join()

    def _ask(self, asked: _Sum, cut: Callable[[], list[Piece]]) -> None:
        with self._locked.changed:
            if asked.lane != CLOCK_LANE:
                self.asked[asked.lane] += 1
                asked.number = self.asked[asked.lane]
            if (failure := self._failure or self._refusal(asked)) is None:
                pieces = cut()
                asked.left = len(pieces)
                for piece in pieces:
                    self._queues.add(asked, piece)
                self._locked.changed.notify_all()
        if failure is not None:
            asked.done(failure)

    def other_ended(self, worker: str, sums: Mapping[int, int]) -> None:
        """That worker's script has ended, after so many sums of each lane: the sums after those will never be."""
        with self._locked.changed:
            self._ended[worker] = sums
            self._locked.changed.notify_all()

    def _refusal(self, asked: _Sum) -> JobAborted | None:
        """Why this sum will never be; None if it may."""
        if asked.lane == CLOCK_LANE:
            return None
        for worker, sums in self._ended.items():
            if asked.number > (its := sums.get(asked.lane, 0)):
                return JobAborted(
                    f"{worker}'s script has ended after {its} sum{'s' * (its != 1)}, and this one waits for sum "
                    f"{asked.number}, which {worker} will never send: give every rank the same number of batches (as "
                    "DistributedSampler does), or look why that script has ended early"
                )
        return None

    @property
    def _hopeless(self) -> list[_Sum]:
        """The sums that will never be."""
        under_way = {id(asked): asked for queue in self._queues.by_shard.values() for asked, _ in queue}
        return [asked for asked in under_way.values() if self._refusal(asked) is not None] if self._ended else []

    # ---- the thread ----

    def _run(self) -> None:
        failure: BaseException = UsageError("the sums were closed while some were under way")
        try:
            while self._go_on():
                pass
        except BaseException as error:  # whoever waits for a sum raises it
            failure = error
        with self._locked.changed:
            self._failure = failure
            left = {id(asked): asked for queue in self._queues.by_shard.values() for asked, _ in queue}
            self._queues.by_shard.clear()
        for asked in left.values():
            asked.done(failure)

    def _go_on(self) -> bool:
        """Do what can be done now; first wait until there is something. Returns False when this is closed."""
        with self._locked.changed:
            self._wait()
            if self._closing:
                return False
            self._queues.remove(hopeless := self._hopeless)
            uploads = self._machine.next_action() is not None
            landed = self._machine.landed_shards
            fills = [shard for shard in self._queues.waiting if self._machine.may_fill(shard)]
            for shard in fills:
                self._machine.fill(shard)
        for asked in hopeless:
            asked.done(self._refusal(asked))
        if uploads:
            self._exchange.initialise(lambda start, stop: torch.zeros(stop - start))
        for shard in fills:
            self._fill(shard)
        for shard in landed:
            self._take(shard)
        return True

    def _wait(self) -> None:
        """Wait for something to do. While no sum is under way the script computes, as long as it likes."""
        if self._ready():
            pass
        elif self._queues.waiting or self._machine.step < 0:
            self._locked.wait(self._ready, self._awaited)
        else:
            self._report.now(self.made, _TELL_IDLE_S)
            with self._loop.elsewhere():
                self._locked.changed.wait_for(lambda: self._ready() or self._locked.failure or self._queues.waiting)
        if self._locked.failure is not None:
            raise self._locked.failure
        if self._machine.broken:
            raise JobAborted(
                f"{self._machine.broken}, and this script's world is fixed: start all of it again, from the last "
                "checkpoint that it has saved"
            )

    def _ready(self) -> bool:
        machine = self._machine
        return bool(
            self._closing or machine.broken or machine.complete or machine.next_action() is not None
            or any(machine.may_fill(shard) for shard in self._queues.waiting) or self._hopeless
        )  # fmt: skip

    def _awaited(self) -> str:
        if self._queues.waiting == [CLOCK]:
            return "the other workers' scripts to end: this one's has, and asks for no more sums"
        shards = [shard for shard in self._machine.waits_for if self._queues.by_shard.get(shard)]
        where = self._loop.where(shards or self._machine.waits_for)
        return f"sums of all workers: {where}" if where else "sums of all workers"

    def _fill(self, shard: int) -> None:
        asked, piece = self._queues.by_shard[shard][0]
        words = self._exchange.memory.words(shard)
        part = asked.values[piece.start : piece.stop]
        words[: len(part)].copy_(part)
        words[len(part) :].zero_()
        self._locked.handle(Filled(shard))

    def _take(self, shard: int) -> None:
        asked = None
        if self._machine.at[shard] >= 0 and self._queues.by_shard.get(shard):  # else the first version: nobody's sum
            asked, piece = self._queues.by_shard[shard][0]  # left there for `_run`, should this fail
            start, stop = max(piece.start, asked.keeps.start), min(piece.stop, asked.keeps.stop)
            if start < stop:
                words = self._exchange.memory.words(shard)[start - piece.start : stop - piece.start]
                asked.into[start - asked.keeps.start : stop - asked.keeps.start].copy_(words)
        self._locked.apply(lambda: self._taken(shard))
        if asked is not None:
            self._queues.by_shard[shard].popleft()
            asked.left -= 1
            if not asked.left:
                if asked.lane != CLOCK_LANE:
                    self.made += 1
                    self._report.nbytes += asked.values.numel() * asked.values.element_size()
                    self._report.now(self.made, _TELL_S)
                self._locked.progress.got_on()
                asked.done(None)

    def _taken(self, shard: int) -> list[Effect]:
        return self._machine.taken(shard)


class _Progress:
    """Tells how many sums are here, with how many bytes, when that is news; a last time when the last sum is here."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell, self.nbytes = tell, 0
        self._said, self._told = 0.0, 0

    def now(self, made: int, every: float) -> None:
        """`made` sums are here: tell it unless that was done in the last `every` seconds."""
        if self._tell is None or made == self._told or time.monotonic() - self._said < every:
            return
        self._said, self._told = time.monotonic(), made
        self._tell(Summed(made, self.nbytes))


class Sum:
    """A sum that is under way."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._error: BaseException | None = None
        self._then: Callable[[BaseException | None], None] | None = None
        self._lock = threading.Lock()

    def ended(self, error: BaseException | None) -> None:
        """It is here (None), or it failed. Called once."""
        with self._lock:
            self._error, then = error, self._then
            self._event.set()
        if then is not None:
            then(error)

    def then(self, call: Callable[[BaseException | None], None]) -> None:
        """Call `call` when it has ended, on the thread of the sums; at once if it has ended already."""
        with self._lock:
            over = self._event.is_set()
            self._then = call
        if over:
            call(self._error)

    def wait(self) -> None:
        """Wait for the sum. Raises JobAborted when it failed."""
        self._event.wait()
        if self._error is not None:
            raise self._error
