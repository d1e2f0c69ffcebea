"""Micro-batches of a data set: the samples of (step, replica, micro), read, collated, on a device.

A sample that raises an error is read again, then named, and skipped or fatal.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from rallypoint.config import JobConfig
from rallypoint.core.order import SampleOrder, StreamOrder, derive_seed, stream_looks_ahead
from rallypoint.data.collate import collated, gathered
from rallypoint.data.dataset import MapDataset, NotASample, check_dataset, fetch, shard_lengths
from rallypoint.data.order import OrderAhead
from rallypoint.data.randomness import seed_everything
from rallypoint.data.spec import Collate, Loader
from rallypoint.data.stream import Stream, StreamItems
from rallypoint.data.tokens import Lanes
from rallypoint.errors import DataError

log = logging.getLogger("rallypoint")


@dataclass(frozen=True, slots=True)
class LastBatch:
    """A batch after which a stream has no full one for its replica: the job is to end with this step."""

    batch: Any

    def pin_memory(self) -> LastBatch:
        """For torch's `pin_memory`, which does not know what is inside."""
        return LastBatch(pin_memory(self.batch))  # type: ignore[no-untyped-call]


def _order_of(dataset: MapDataset, config: JobConfig) -> OrderAhead:
    """Return the order of a map-style data set's samples. Raises DataError as `MicroBatches`."""
    check_dataset(dataset)
    if config.reading.order == "stream":
        raise DataError('reading.order="stream" is set by rp.Stream: leave it out')
    if isinstance(dataset, Lanes):
        dataset.check(config)
    order = SampleOrder(
        seed=config.seed, samples=len(dataset), replicas=config.replicas, batch=config.batch,
        shuffled=config.reading.order == "shuffled", mixed=config.reading.mixed_shards,
        shards=shard_lengths(dataset) if config.reading.order == "windowed" else (),
    )  # fmt: skip
    if order.length < (step := config.replicas * config.batch) and config.reading.order != "own":
        log.warning(f"a step takes {step} samples, and the data set has {order.length}: some come more than once in it")
    return OrderAhead(order, config.batch)


class MicroBatches:
    """The data of one job, by position (I6).

    `collate` makes a batch of a list of samples; None: torch's ``default_collate``. `part` says which part, of how
    many, of each micro-batch is loaded. `loader` says what happens to samples that raise an error. Raises DataError
    when the data set is empty or not map-style, when its shards are needed and it does not tell them, or when a
    micro-batch cannot be cut into so many equal parts.

    Attributes:
        config: the job's configuration.
        loader: as it was given.
        dataset: as it was given.
    """

    def __init__(
        self, dataset: MapDataset | Stream, config: JobConfig, device: torch.device, collate: Collate | None = None,
        part: tuple[int, int] = (0, 1), loader: Loader | None = None,
    ) -> None:  # fmt: skip
        self._order: OrderAhead | StreamOrder
        self._stream: StreamItems | None = None
        if isinstance(dataset, Stream):
            self._order = order = dataset.order(config)
            dataset = self._stream = StreamItems(dataset, order, config)
        else:
            self._order = _order_of(dataset, config)
        self.config, self.loader = config, loader or Loader()
        self._device, self._collate = device, collate
        self.dataset, self._reading = dataset, ReadingAhead(dataset, self.loader)
        self._micro, self._part = config.batch // config.accumulate, part
        self._parted = part[:1] if part[1] > 1 else ()  # ranks that have the same part draw the same random numbers
        if self._micro % part[1]:
            raise DataError(
                f"a micro-batch of {self._micro} samples cannot be split over {part[1]} ranks: make batch / accumulate "
                "a multiple of that"
            )

    def load(self, step: int, replica: int, micro: int) -> Any:
        """Return the collated samples of one micro-batch.

        Random augmentation in the data set is seeded by position too.

        Raises DataError when ``default_collate`` cannot make a batch of the samples, and for a sample that raises.
        """
        batch, skipped = self.loaded(step, replica, micro)
        for sentence in skipped:
            log.warning(sentence)
        return self.on_device(batch)

    def loaded(self, step: int, replica: int, micro: int) -> tuple[Any, list[str]]:
        """Return the collated samples, not yet on the device, and what to tell of skipped ones. Raises as `load`."""
        with one_thread():
            indices, seed = self.indices(step, replica, micro), self._seed(step, replica, micro)
            skipped = list[str]()
            if self._collate is None and (batch := gathered(self.dataset, indices)) is not None:
                seed_everything(seed)  # what else reads the global generators sees them as after other data sets
            else:
                samples, skipped = self._reading.read(indices, seed)
                batch = self._collated(samples)
            return (LastBatch(batch) if self._is_last(step, replica, micro) else batch), skipped

    def _is_last(self, step: int, replica: int, micro: int) -> bool:
        """True if a stream has no full batch for this replica at the next step."""
        if self._stream is None or micro + 1 < self.config.accumulate:
            return False
        looks = stream_looks_ahead(self.config.reading.passes, step, self.config.steps)
        return looks and not self._stream.continues(step + 1, replica)

    def on_device(self, batch: Any) -> Any:
        """Return what `loaded` returns, on the device."""
        return to_device(batch.batch if isinstance(batch, LastBatch) else batch, self._device)

    def indices(self, step: int, replica: int, micro: int) -> Sequence[int]:
        """Return the positions of a micro-batch's samples in the data set."""
        part, parts = self._part
        of_replica = self._order.samples(step, replica)
        of_micro = of_replica[micro * self._micro : (micro + 1) * self._micro]
        return of_micro[part * self._micro // parts : (part + 1) * self._micro // parts]

    def _seed(self, step: int, replica: int, micro: int) -> int:
        return derive_seed(self.config.seed, "data", step, replica, micro, *self._parted)

    def compute_seed(self, step: int, replica: int, micro: int) -> int:
        """Return the seed of a micro-batch's forward pass."""
        return derive_seed(self.config.seed, "compute", step, replica, micro, *self._parted)

    def _collated(self, samples: list[Any]) -> Any:
        if self._collate is not None:
            return self._collate(samples)
        try:
            return collated(samples)
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"these samples cannot be made a batch of ({str(error).splitlines()[0]}): return tensors of one shape, "
                "numbers, or lists, tuples and dicts of them; or give job.train(..., collate_fn=...), as for a "
                "DataLoader"
            ) from None


@contextmanager
def one_thread() -> Iterator[None]:
    """In the body torch computes with one thread, as it does in loader processes: their number may change sums."""
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on `device`, also those in nested lists, tuples and dicts.

    What has a `to` of its own, as a PackedSequence, moves itself. (Batches are made on the CPU: nothing moves there.)
    """
    if isinstance(batch, torch.Tensor):
        if device.type == "cuda" and batch.is_cpu and batch.layout is torch.strided:  # else it may wait for the GPU
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    if device.type != "cpu" and callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


class ReadingAhead:
    """Reads the samples of one micro-batch after another.

    Random numbers are seeded before each micro-batch. One of which a sample fails is read again as a whole, so what its
    other samples draw does not depend on the failure.
    """

    def __init__(self, dataset: MapDataset, loader: Loader) -> None:
        self._dataset, self._loader = dataset, loader

    def read(self, indices: Sequence[int], seed: int) -> tuple[list[Any], list[str]]:
        """Return the samples, and what to tell of skipped ones.

        Raises DataError, which names the sample, for one that fails to the last, or if all were to be skipped.
        """
        left, skipped = list(indices), list[str]()
        while True:
            try:
                return self._try(left, seed), skipped
            except NotASample as error:
                raise DataError(str(error)) from error
            except Exception as error:
                bad, cause = self._culprit(left, seed, error)
            where = "a sample" if bad is None else self._name_of(bad)
            frames = [*reversed(traceback.extract_tb(cause.__traceback__))]  # (a library's own line says little)
            at = next((frame for frame in frames if "lib/python" not in frame.filename), frames[0])
            what = f"{where} raised {type(cause).__name__}: {cause} ({Path(at.filename).name}:{at.lineno})"
            if self._loader.on_error == "stop" or bad is None or len(left) == 1:
                tries = f" ({self._loader.retries + 1} times)" if self._loader.retries else ""
                raise DataError(
                    f"{what}{tries}: mend the data set, or leave such samples out with "
                    'loader=rp.Loader(on_error="skip")'
                ) from cause
            left.remove(bad)
            skipped.append(f"{what}; it is left out of its batch")

    def _try(self, indices: list[int], seed: int) -> list[Any]:
        for _ in range(self._loader.retries):
            try:
                return self._once(indices, seed)
            except NotASample:
                raise
            except Exception:
                continue
        return self._once(indices, seed)

    def _once(self, indices: list[int], seed: int) -> list[Any]:
        seed_everything(seed)
        return fetch(self._dataset, indices)

    def _culprit(self, indices: list[int], seed: int, error: Exception) -> tuple[int | None, Exception]:
        """The first sample that fails by itself; None if none does, and `error` is all that is known."""
        seed_everything(seed)
        for index in indices:
            try:
                fetch(self._dataset, [index])
            except NotASample as own:
                raise DataError(str(own)) from own
            except Exception as own:
                return index, own
        return None, error

    def _name_of(self, index: int) -> str:
        name_of = getattr(self._dataset, "name_of", None)
        return f"sample {index} of the data set" if name_of is None else str(name_of(index))
