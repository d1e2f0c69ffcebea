"""A stream that comes only once: places get items when they are asked for, and keep them for a while."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.data.identity import identity_of
from rallypoint.data.loader import LastBatch, MicroBatches
from rallypoint.data.streams import once
from rallypoint.data.streams.stream import STEPS_KEPT
from rallypoint.errors import ConfigError, DataError, UsageError
from rallypoint.observe.trace import Tracer
from rallypoint.worker.loop.prefetch import Prefetch
from rallypoint.worker.tensors import ModelTensors


def batches_of(source: Any, *, loader: rp.Loader | None = None, passes: int | None = None, **settings: Any) -> Any:
    stream = rp.Stream(source, once=True, passes=passes)
    config = resolve({"replicas": 2, "batch": 2, **stream.settings, **settings})
    return MicroBatches(stream, config, torch.device("cpu"), loader=loader)


def values(batches: MicroBatches, step: int, replica: int, *, computed: bool = True) -> list[int]:
    batch, _ = batches.loaded(step, replica, 0)
    if computed:
        batches.computes(step, replica, 0)
    return (batch.batch if isinstance(batch, LastBatch) else batch).tolist()


def test_items_come_in_the_order_in_which_places_ask_and_are_the_same_when_asked_again() -> None:
    batches = batches_of(itertools.count())
    assert [values(batches, 5, 1), values(batches, 5, 0), values(batches, 6, 0)] == [[0, 1], [2, 3], [4, 5]]
    assert [values(batches, 6, 0), values(batches, 5, 1)] == [[4, 5], [0, 1]]
    assert batches.once.read == 6


def test_what_was_read_ahead_for_a_replica_that_moved_away_is_used_later() -> None:
    batches = batches_of(itertools.count())
    assert values(batches, 0, 1, computed=False) == [0, 1]
    seen = [number for step in range(8) for number in values(batches, step, 0)]
    assert sorted(seen) == list(range(len(seen)))
    assert batches.once.read == len(seen)


def test_after_a_roll_back_what_no_version_has_any_more_is_used_again() -> None:
    batches = batches_of(itertools.count(), replicas=1)
    before = [values(batches, step, 0) for step in range(20)]
    read = batches.once.read
    after = [values(batches, step, 0) for step in range(2, 8)]
    assert after[:4] == before[16:], "the last steps are kept"
    assert batches.once.read == read + 4


def test_places_are_not_looked_through_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = batches_of(itertools.count(), replicas=2)
    monkeypatch.setattr(once, "sorted", lambda places: pytest.fail("all places are sorted"), raising=False)
    for step in range(50):
        for replica in range(2):
            at = 4 * step + 2 * replica
            assert values(batches, step, replica) == [at, at + 1]
    (part,) = batches.once._parts.values()
    assert len(part._at) <= 2 * STEPS_KEPT * 4 + 2
    monkeypatch.undo()
    assert values(batches, 2, 0) == [186, 187], "the oldest in memory: all of those steps are undone"


def test_what_was_loaded_ahead_is_not_kept_beside_what_its_items_are_used_for() -> None:
    """A replica moves away and comes back in a roll-back, while this worker had no time to load anything ahead."""
    batches = batches_of(itertools.count())
    prefetch = Prefetch(
        SimpleNamespace(batches=batches, tracer=Tracer("w"), say=print, stopping=None, exchange=None)  # type: ignore[arg-type]
    )
    prefetch.load((0, 1, 0))
    for step in range(8):
        prefetch.take((step, 0, 0))
    after = [number for step in range(8) for r in (1, 0) for number in prefetch.take((step, r, 0)).tolist()]
    assert len(set(after)) == len(after), "no item is used twice"


def test_nothing_is_read_before_the_job_begins() -> None:
    source = iter(range(10))
    identity_of(rp.Stream(source, once=True))
    assert next(source) == 0


def test_with_one_pass_the_last_full_batch_says_so() -> None:
    batches = batches_of(range(7), passes=1, replicas=1)
    last = [isinstance(batches.loaded(step, 0, 0)[0], LastBatch) for step in range(3)]
    assert last == [False, False, True]
    with pytest.raises(DataError, match="part 0 of the stream has ended after 7 items"):
        values(batches, 3, 0)


def failing() -> Iterator[int]:
    yield 1
    raise ConnectionError("reset")


def test_an_error_of_the_source_is_not_taken_for_its_end_and_nothing_is_opened_again() -> None:
    batches = batches_of(failing, passes=1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"raised ConnectionError after 1 items: reset\. It comes only once"):
            values(batches, 0, 0)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="it cannot be opened again"):
        rp.Stream(itertools.count(), once=True, passes=2)
    with pytest.raises(UsageError, match="or once=True"):
        rp.Stream(itertools.count())
    with pytest.raises(DataError, match="what loader processes have read ahead is lost"):
        batches_of(itertools.count(), loader=rp.Loader(workers=1))
    with pytest.raises(ConfigError, match=r"once=True of rp\.Stream is not supported under rp\.Async"):
        batches_of(itertools.count(), sync=rp.Async())
    with pytest.raises(ConfigError, match="no other worker has the replica's samples"):
        batches_of(itertools.count(), audit=0.5)


def counting(number: int) -> torch.Tensor:
    if number % 5 == 3:
        raise ValueError(f"{number} is broken")
    return torch.tensor([float(number)])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_ledger_does_not_count_what_is_left_out_of_its_batch(accumulate: int) -> None:
    model = torch.nn.Linear(1, 1)
    stream = rp.Stream(itertools.count(), once=True, transform=counting)
    with rp.join() as job:
        run = job.train(
            model, stream, replicas=2, batch=8, accumulate=accumulate, steps=4, optimizer=rp.SGD(lr=0.0),
            loader=rp.Loader(on_error="skip", retries=0),
        )  # fmt: skip
        sizes = 0
        for micro in run:
            with micro:
                sizes += len(micro.batch)
                micro.backward(model(micro.batch).mean())
        (mine,) = run.ledger
    assert sizes < 2 * 8 * 4, "some are broken"
    assert mine.used == sizes
    assert mine.read == 2 * 8 * 4
    assert mine.lost == mine.read - sizes, "read, and not in the version"


def test_the_ledger_is_on_the_cpu_wherever_the_model_is() -> None:
    """Each micro-batch reads and writes a row, and must not wait for a device."""
    config = resolve({"replicas": 2, "batch": 2, "order": "once"})
    tensors = ModelTensors(torch.nn.Linear(1, 1, device="meta"), config, made=("weight", "bias"))
    assert tensors.samples is not None
    assert {str(row.device) for row in tensors.samples.tensors.values()} == {"cpu"}
