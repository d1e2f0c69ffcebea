"""Micro-batches of a data set: the samples of (step, replica, micro), collated, on a device."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from rallypoint.config import JobConfig, batch_at
from rallypoint.core.order import SampleOrder, derive_seed
from rallypoint.core.streams import end
from rallypoint.data.collate import collated
from rallypoint.data.dataset import MapDataset, check_dataset, shard_lengths
from rallypoint.data.gather import gathered
from rallypoint.data.positions import OrderAhead
from rallypoint.data.randomness import seed_everything
from rallypoint.data.reading import Reading
from rallypoint.data.sources.lanes import Lanes
from rallypoint.data.spec import Collate, Loader
from rallypoint.data.streams.once import OnceItems, StreamOver, check_once
from rallypoint.data.streams.reader import EndOfStream
from rallypoint.data.streams.stream import Stream, StreamItems
from rallypoint.errors import DataError

log = logging.getLogger("rallypoint")


class Order(Protocol):
    """Which samples a replica reads at a step."""

    def samples(self, step: int, replica: int) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class LastBatch:
    """A batch after which a stream has no full one for its replica: the job is to end with this step."""

    batch: Any

    def pin_memory(self) -> LastBatch:
        """For torch's `pin_memory`, which does not know what is inside."""
        return LastBatch(pin_memory(self.batch))  # type: ignore[no-untyped-call]


def order_of(dataset: MapDataset, config: JobConfig) -> Order:
    """Return the order of a map-style data set's samples. Raises DataError as `MicroBatches`."""
    check_dataset(dataset)
    if config.order in ("stream", "once"):
        raise DataError(f'order="{config.order}" is set by rp.Stream: leave it out')
    if isinstance(dataset, Lanes):
        dataset.check(config)
    order = SampleOrder(
        seed=config.seed, samples=len(dataset), replicas=config.replicas, batch=config.batch,
        shuffled=config.order == "shuffled", mixed=config.mixed_shards,
        shards=shard_lengths(dataset) if config.order == "windowed" else (),
    )  # fmt: skip
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
        self._order: Order
        self._stream: StreamItems | OnceItems | None = None
        if isinstance(dataset, Stream):
            self._order = dataset.order(config)
            items = OnceItems if dataset.once else StreamItems
            check_once(loader.workers if dataset.once and loader is not None else 0)
            dataset = self._stream = items(dataset, self._order, config)
        else:
            self._order = order_of(dataset, config)
        self.config, self.loader = config, loader or Loader()
        self._device, self._collate = device, collate
        self.dataset, self._reading = dataset, Reading(dataset, self.loader)
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
        """Return the collated samples, not yet on the device, and what to tell of skipped ones.

        Raises as `load`; StreamOver where the job is to end before `step`.
        """
        with one_thread():
            indices, seed = self.indices(step, replica, micro), self._seed(step, replica, micro)
            skipped = list[str]()
            if self._collate is None and (batch := gathered(self.dataset, indices)) is not None:
                seed_everything(seed)  # what else reads the global generators sees them as after other data sets
            else:
                samples, skipped = self._read(step, indices, seed)
                batch = self._collated(samples)
            return (LastBatch(batch) if self._is_last(step, replica, micro) else batch), skipped

    def _read(self, step: int, indices: Sequence[int], seed: int) -> tuple[list[Any], list[str]]:
        try:
            return self._reading.read(indices, seed)
        except DataError as error:
            over = self.once is not None and self.config.passes and isinstance(error.__cause__, EndOfStream)
            if not over or step == 0:
                raise
            raise StreamOver(str(error)) from error

    def _is_last(self, step: int, replica: int, micro: int) -> bool:
        """True if a stream has no full batch for this replica at the next step."""
        if self._stream is None or micro + 1 < self.config.accumulate:
            return False
        looks = end.looks_ahead(self.config.passes, step, self.config.steps)
        return looks and not self._stream.continues(step + 1, replica)

    @property
    def once(self) -> OnceItems | None:
        """What this process reads of a stream that comes only once; None for other data."""
        return self._stream if isinstance(self._stream, OnceItems) else None

    def computes(self, step: int, replica: int, micro: int, left_out: int = 0) -> None:
        """This micro-batch is computed now, without so many samples: a stream that comes only once has used its items.
        """
        if isinstance(self._stream, OnceItems):
            self._stream.computes(self.indices(step, replica, micro), left_out)

    def on_device(self, batch: Any) -> Any:
        """Return what `loaded` returns, on the device."""
        return to_device(batch.batch if isinstance(batch, LastBatch) else batch, self._device)

    def indices(self, step: int, replica: int, micro: int) -> Sequence[int]:
        """Return the positions of a micro-batch's samples in the data set."""
        part, parts = self._part
        of_replica = self._order.samples(batch_at(self.config, step), replica)
        of_micro = of_replica[micro * self._micro : (micro + 1) * self._micro]
        return of_micro[part * self._micro // parts : (part + 1) * self._micro // parts]

    def _seed(self, step: int, replica: int, micro: int) -> int:
        return derive_seed(self.config.seed, "data", batch_at(self.config, step), replica, micro, *self._parted)

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
