"""What a push and a pull return, and how a script's threads hear of a roll-back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from rallypoint.core.keys import Effect
from rallypoint.errors import StoreRolledBack, UsageError
from rallypoint.worker.keys.answers import Asked
from rallypoint.worker.keys.dense import Reading
from rallypoint.worker.keys.exchange import KeyExchange

LOOK_AGAIN_S = 0.5  # how often it asks how far others are, where no answer comes by itself (streaming)
NEVER, NEVER_YET = float("inf"), float("-inf")


class Waiting:
    """Waits for a store, on the script's threads.

    A step that a thread knows is of some generation. After a roll-back its next call raises StoreRolledBack, once:
    else it would wait for a version that can only come when the thread itself goes back.
    """

    def __init__(self, exchange: KeyExchange) -> None:
        self._exchange, self._known = exchange, threading.local()

    @property
    def generation(self) -> int:
        """The generation of what the calling thread knows."""
        if not hasattr(self._known, "generation"):
            self._known.generation = self._exchange.rolled_back
        found: int = self._known.generation
        return found

    def knows(self, generation: int) -> None:
        """The calling thread has been told where keys are in this generation."""
        self._known.generation = generation

    def ask(self, ready: Callable[[], bool], generation: int) -> bool:
        """Is it ready? Raises what `until` would raise."""
        try:
            return self._exchange.ask(ready, generation)
        except StoreRolledBack:
            self.knows(self._exchange.rolled_back)
            raise

    def until(
        self, ready: Callable[[], bool], describe: Callable[[], str], generation: int | None = None, *,
        of: tuple[Sequence[int], Iterable[int]] = ((), ()), then: Callable[[], Sequence[Effect]] | None = None,
    ) -> None:  # fmt: skip
        """Wait until it is ready, then do something (`then`), under one lock. `generation`: by default the thread's.

        `of` says which shards and contributors it depends on: under a streaming policy nobody tells how far a
        contributor is that is another worker's.
        """
        exchange, began, done = self._exchange, time.monotonic(), list[bool]()
        generation = self.generation if generation is None else generation
        streaming, (shards, contributors) = exchange.machine.by_clocks, of

        def then_or_again() -> Sequence[Effect]:
            if not ready():
                return exchange.machine.watch(shards, contributors)
            done.append(True)
            return () if then is None else then()

        try:
            while not done:
                again = time.monotonic() + LOOK_AGAIN_S if streaming else NEVER
                exchange.wait(
                    lambda again=again: ready() or time.monotonic() > again, describe, generation,  # type: ignore[misc]
                    waited=time.monotonic() - began, then=then_or_again,
                )  # fmt: skip
        except StoreRolledBack:
            self.knows(exchange.rolled_back)
            raise


class Push:
    """A push on its way. Any thread may ask it."""

    def __init__(
        self, exchange: KeyExchange, waiting: Waiting, name: str, shards: Sequence[int], step: int, contributor: int
    ) -> None:
        self._exchange, self._waiting, self._name, self._shards = exchange, waiting, name, shards
        self._step, self._contributor = step, contributor
        self._generation, self._looked = waiting.generation, NEVER_YET

    def done(self) -> bool:
        """True if the push counts, durably (under ``rp.Sync()``: its round is complete). Raises what `result` raises
        when that can never be."""
        counts = self._waiting.ask(self._counts, self._generation)
        if not counts and self._exchange.machine.by_clocks and time.monotonic() > self._looked + LOOK_AGAIN_S:
            self._looked = time.monotonic()  # nobody tells how far a contributor is that is another worker's by now
            self._exchange.watch(self._shards, [self._contributor])
        return counts

    def result(self) -> None:
        """Wait until the push counts. Raises StoreRolledBack, or JobAborted when the job is over."""
        self._waiting.until(
            self._counts, lambda: f"step {self._step} of key {self._name} to count (contributor {self._contributor})",
            self._generation, of=(self._shards, [self._contributor]),
        )  # fmt: skip

    def _counts(self) -> bool:
        return self._exchange.machine.counts(self._shards, self._contributor, self._step)


class Pull:
    """A pull on its way. Any thread may ask it."""

    def __init__(
        self, waiting: Waiting, reading: Reading, requests: Mapping[int, Asked], generation: int
    ) -> None:
        self._waiting, self._reading, self._requests, self._generation = waiting, reading, dict(requests), generation

    def done(self) -> bool:
        """True if the value is here. Raises what `result` raises when it cannot come any more."""
        return self._waiting.ask(self._here, self._generation)

    def result(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the value, and copy it into `out` (the shape of what was asked for), or into a new fp32 tensor.

        Each call copies the same value. Raises StoreRolledBack, or JobAborted when the job is over.
        """
        self._reading.check(out)
        parts: dict[int, bytearray] = {}

        def take() -> Sequence[Effect]:
            parts.update({s: asked.value[1] for s, asked in self._requests.items() if asked.value is not None})
            return ()

        self._waiting.until(self._here, lambda: f"a value of key {self._reading.name}", self._generation, then=take)
        return self._reading.filled(parts, out)

    def _here(self) -> bool:
        return all(asked.value is not None for asked in self._requests.values())


def checked_step(step: int | None, most: int, name: str) -> None:
    """Raise UsageError for a step that a key never gets to."""
    if step is not None and not 0 <= step <= most:
        raise UsageError(f"step {step} of key {name}: this store has steps={most}, from 0")
