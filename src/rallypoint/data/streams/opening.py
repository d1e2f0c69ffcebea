"""Opens the iterator of a part of a stream, under the random numbers and as the loader process that it expects."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as of_torch

from rallypoint.core.order import derive_seed
from rallypoint.data.randomness import seed_everything, untouched
from rallypoint.errors import UsageError

TOLD = ("part", "parts", "epoch")  # what a function may ask for, by the names of its parameters


class PartIterator:
    """One pass over one part.

    Its items are what they would be if nothing else ran in the process: it draws from random generators of its own,
    seeded by (job's seed, part, pass), and ``torch.utils.data.get_worker_info()`` says "worker `part` of `parts`", or
    nothing with one part. Items are read in the body of ``with iterator.running():``.
    """

    def __init__(self, source: Any, part: int, parts: int, *, epoch: int, seed: int) -> None:
        self._source, self._part, self._parts, self._epoch = source, part, parts, epoch
        self._seed = derive_seed(seed, "stream", part, epoch)
        self._states: tuple[Any, Any, torch.Tensor] | None = None
        self._iterator: Iterator[Any] | None = None

    @contextmanager
    def running(self) -> Iterator[Iterator[Any]]:
        """In the body the iterator, which it opens the first time, may be asked for items."""
        before = of_torch._worker_info
        with untouched():
            if self._states is None:
                seed_everything(self._seed)
            else:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
                torch.set_rng_state(self._states[2])
            of_torch._worker_info = self._worker_info()
            try:
                if self._iterator is None:
                    self._iterator = self._open()
                yield self._iterator
            finally:
                of_torch._worker_info = before
                if self._iterator is not None:
                    self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def _open(self) -> Iterator[Any]:
        if not hasattr(self._source, "__iter__"):
            told = {"part": self._part, "parts": self._parts, "epoch": self._epoch}
            return iter(self._source(**{name: told[name] for name in asked_for(self._source)}))
        source = self._source
        if _shards_itself(source, self._parts):
            source = source.shard(num_shards=self._parts, index=self._part)
        else:
            source = copy.copy(source)  # `__iter__` may keep its place on it, and the script may iterate it too
        if callable(set_epoch := getattr(source, "set_epoch", None)):
            set_epoch(self._epoch)
        return iter(source)

    def _worker_info(self) -> Any:
        if self._parts == 1 or _shards_itself(self._source, self._parts):
            return None
        return of_torch.WorkerInfo(
            id=self._part, num_workers=self._parts, seed=self._seed, dataset=self._source
        )


def asked_for(function: Any) -> tuple[str, ...]:
    """Return which of `TOLD` a function takes. Raises UsageError if it needs anything else."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a class or a function of C's
        return ()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if strange := [name for name in needed if name not in TOLD]:
        raise UsageError(
            f"rp.Stream got a function that needs {', '.join(strange)}: it is called with those of part, parts and "
            "epoch that it has; bind the others with functools.partial"
        )
    return tuple(p.name for p in parameters if p.name in TOLD and p.kind is not p.POSITIONAL_ONLY)


def _shards_itself(source: Any, parts: int) -> bool:
    """True for a streaming data set of Hugging Face's, which has parts of its own."""
    return parts > 1 and callable(getattr(source, "shard", None)) and hasattr(source, "num_shards")
