"""A stream as a job's data: what is taken for one, what is refused, its micro-batches and its end."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

import rallypoint as rp
from rallypoint.config import JobConfig, resolve
from rallypoint.core.job import DataIdentity
from rallypoint.data.identity import identity_of
from rallypoint.data.loader import LastBatch, MicroBatches
from rallypoint.data.spec import given
from rallypoint.errors import ConfigError, DataError, UsageError

CPU = torch.device("cpu")


def numbers(part: int = 0, parts: int = 1) -> Iterator[float]:
    yield from (float(number) for number in range(part, 40, parts))


class Numbers(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return numbers()


def config_of(stream: rp.Stream, **settings: Any) -> JobConfig:
    return resolve({"replicas": 2, "batch": 4, **stream.settings, **settings})


def batches_of(stream: rp.Stream, loader: rp.Loader | None = None, **settings: Any) -> MicroBatches:
    return MicroBatches(stream, config_of(stream, **settings), CPU, loader=loader)


def test_what_has_items_and_no_positions_is_a_stream_of_one_part() -> None:
    for data in (Numbers(), numbers, {1.0, 2.0}):
        taken = given(data)
        assert isinstance(taken.dataset, rp.Stream)
        assert (taken.dataset.source, taken.dataset.parts) == (data, 1)
        assert taken.settings == {"reading.order": "stream", "reading.passes": 0}
    assert not isinstance(given([1, 2]).dataset, rp.Stream)


def test_a_data_loader_over_an_iterable_data_set_says_all_that_it_can() -> None:
    data = Numbers()
    taken = given(DataLoader(data, batch_size=5, num_workers=4, collate_fn=list))
    assert (taken.dataset.source, taken.collate) == (data, list)
    assert taken.settings == {"batch": 5, "reading.order": "stream", "reading.passes": 0}
    assert taken.loader.workers == 1, "each would read all of the one part"
    with pytest.raises(DataError, match="without batches"):
        given(DataLoader(data, batch_size=None))


def needs_more(part: int, path: str) -> Iterator[Any]:
    yield path


@pytest.mark.parametrize(("source", "options", "sentence"), [
    (numbers(), {}, "can be read only once"),
    (7, {}, "give an iterable, or a function"),
    (needs_more, {}, "needs path: .* functools.partial"),
    (numbers, {"parts": 0}, r"rp.Stream\(parts=0\)"),
    (numbers, {"passes": 0}, r"rp.Stream\(passes=0\)"),
])  # fmt: skip
def test_what_cannot_be_a_stream_is_refused(source: Any, options: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        rp.Stream(source, **options)


def test_settings_that_do_not_fit_are_refused() -> None:
    stream = rp.Stream(numbers, parts=3)
    with pytest.raises(DataError, match="3 parts, and the job 2 replicas: give a divisor or a multiple of 2"):
        batches_of(stream)
    with pytest.raises(DataError, match='order="shuffled" with a stream'):
        batches_of(stream, **{"reading.order": "shuffled"})
    with pytest.raises(DataError, match=r'order="stream" is set by rp\.Stream'):
        MicroBatches([1.0], resolve({"reading.order": "stream"}), CPU)
    with pytest.raises(ConfigError, match=r"passes= of rp\.Stream is not supported under rp\.Async"):
        config_of(rp.Stream(numbers, passes=1), sync=rp.Async())


def test_a_micro_batch_follows_from_its_place_whoever_loads_it_and_in_whatever_order() -> None:
    stream = rp.Stream(numbers, parts=2, transform=lambda item: item + torch.rand(1).item())
    places = [(step, replica, micro) for step in range(4) for replica in range(2) for micro in range(2)]
    in_order = batches_of(stream, accumulate=2)
    wanted = {place: in_order.load(*place) for place in places}
    assert [int(value) for value in wanted[1, 1, 1]] == [13, 15]
    for place in reversed(places):
        assert torch.equal(batches_of(stream, accumulate=2).load(*place), wanted[place])
        assert torch.equal(in_order.load(*place), wanted[place])


def test_the_last_full_batch_of_a_replica_says_so() -> None:
    batches = batches_of(rp.Stream(numbers, parts=2, passes=1), accumulate=2)
    assert [isinstance(batches.loaded(step, 1, micro)[0], LastBatch) for step in range(5) for micro in range(2)] == [
        *[False] * 9, True
    ]  # fmt: skip
    assert batches.load(4, 1, 1).tolist() == [37.0, 39.0]
    with pytest.raises(DataError, match="part 1 of the stream has ended after 20 items"):
        batches.load(5, 1, 0)
    assert not isinstance(batches_of(rp.Stream(numbers)).loaded(4, 1, 0)[0], LastBatch), "it is begun again"


def fails_at_5(item: float) -> float:
    if item == 5.0:
        raise ValueError("five")
    return item


def test_an_item_of_which_the_transform_fails_is_named_and_left_out_or_fatal() -> None:
    stream = rp.Stream(numbers, transform=fails_at_5)
    with pytest.raises(DataError, match=r"item 5 of the stream raised ValueError: five \(test_.*py:\d+\) \(3 times\)"):
        batches_of(stream).load(0, 1, 0)
    batch, (skipped,) = batches_of(stream, rp.Loader(on_error="skip")).loaded(0, 1, 0)
    assert batch.tolist() == [4.0, 6.0, 7.0]
    assert skipped.startswith("item 5 of the stream raised ValueError: five (test_stream.py:")
    assert skipped.endswith("; it is left out of its batch")


def test_of_an_error_in_pythons_own_library_the_scripts_line_is_named() -> None:
    with pytest.raises(DataError, match=r"raised JSONDecodeError: .*\(test_stream.py:\d+\)"):
        batches_of(rp.Stream(numbers, transform=lambda item: json.loads("{"))).load(0, 1, 0)


def test_an_item_that_the_iterator_cannot_read_is_left_out_where_the_iterator_goes_on() -> None:
    stream = rp.Stream(lambda: map(fails_at_5, numbers()))
    batch, (skipped,) = batches_of(stream, rp.Loader(on_error="skip")).loaded(0, 1, 0)
    assert (batch.tolist(), skipped[:32]) == ([4.0, 6.0, 7.0], "item 5 of the stream raised Valu")
    assert batches_of(stream, rp.Loader(on_error="skip")).load(1, 0, 0).tolist() == [8.0, 9.0, 10.0, 11.0]


def test_a_stream_is_known_by_its_first_items_and_parts() -> None:
    first = identity_of(rp.Stream(numbers))
    assert first == identity_of(rp.Stream(Numbers())) == DataIdentity(stream=first.stream)
    assert len({first, identity_of(rp.Stream(numbers, parts=2)), identity_of(rp.Stream([1.0]))}) == 3


def test_an_iterable_that_gives_other_items_the_second_time_is_refused() -> None:
    class Once(IterableDataset[float]):
        items = iter(range(100))

        def __iter__(self) -> Iterator[Any]:
            return self.items

    with pytest.raises(DataError, match="other items when it is opened a second time"):
        identity_of(rp.Stream(Once()))


def test_micro_batches_go_to_processes_that_are_started_anew() -> None:
    batches = batches_of(rp.Stream(Numbers()))
    batches.load(0, 0, 0)
    assert torch.equal(pickle.loads(pickle.dumps(batches)).load(1, 0, 0), batches.load(1, 0, 0))
    assert default_collate([8.0]).dtype == batches.load(1, 0, 0).dtype


@pytest.mark.slow
def test_a_forked_process_opens_the_stream_itself(tmp_path: Path) -> None:
    """An inherited file has one place for both processes."""
    file = tmp_path / "numbers"
    file.write_text("".join(f"{number}\n" for number in range(20_000)))  # more than one block of the file

    def lines() -> Iterator[int]:
        with open(file) as opened:
            yield from map(int, opened)

    batches = batches_of(rp.Stream(lines), replicas=1)
    batches.loaded(0, 0, 0)
    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)

    def child() -> None:
        sending.send([values(batches, step, 0) for step in range(1, 4000)][-1])

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    expected = list(range(4 * 3999, 4 * 4000))
    assert receiving.recv() == expected
    process.join()
    assert [values(batches, step, 0) for step in range(1, 4000)][-1] == expected
    receiving.close()
    sending.close()


@pytest.mark.parametrize("sync", [rp.Async(), rp.LocalSteps(20)])
def test_replicas_that_are_not_at_one_step_do_not_make_each_other_begin_anew(sync: Any) -> None:
    opened = 0

    def counted() -> Iterator[int]:
        nonlocal opened
        opened += 1
        return itertools.count()

    batches = batches_of(rp.Stream(counted), sync=sync, steps=400)
    opened = 0
    for step in range(5, 60):
        assert values(batches, step, 0) == list(range(8 * step, 8 * step + 4))
        assert values(batches, step - 5, 1) == list(range(8 * step - 36, 8 * step - 32))
    assert opened == 2


def test_a_pass_that_cannot_be_opened_at_once_is_tried_again_by_whoever_needs_its_items() -> None:
    failed: list[int] = []

    def source(epoch: int) -> Iterator[float]:
        if epoch == 1 and not failed:
            failed.append(epoch)
            raise OSError("connection reset")
        return iter([float(number) for number in range(8)])

    batches = batches_of(rp.Stream(source, passes=2), rp.Loader(retries=3), replicas=1)
    loaded = [values(batches, step, 0) for step in range(4)]
    assert failed == [1]
    assert loaded == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]] * 2


def test_the_script_may_iterate_its_data_set_beside_the_job() -> None:
    class Placed(IterableDataset[int]):
        place = 0

        def __iter__(self) -> Iterator[int]:
            self.place = 0
            return self._on()

        def _on(self) -> Iterator[int]:
            while True:
                self.place += 1
                yield self.place - 1

    data = Placed()
    batches = batches_of(rp.Stream(data), replicas=1)
    assert values(batches, 0, 0) == [0, 1, 2, 3]
    next(iter(data))
    assert values(batches, 1, 0) == [4, 5, 6, 7]


def values(batches: MicroBatches, step: int, replica: int) -> list[float]:
    batch, _ = batches.loaded(step, replica, 0)
    return [float(value) for value in (batch.batch if isinstance(batch, LastBatch) else batch)]


# ---- Streams of tokens side by side: each place of a batch reads on where it has stopped ----


CPU = torch.device("cpu")


def _batches(data: rp.Lanes, **settings: object) -> MicroBatches:
    return MicroBatches(data, resolve({**given(data).settings, **settings}), CPU)


def test_each_place_of_a_batch_reads_one_lane_from_its_beginning_to_its_end() -> None:
    data = rp.Lanes(torch.arange(100), length=4, lanes=6)  # 16 tokens in each: 3 windows
    assert (data.windows, len(data)) == (3, 18)
    batches = _batches(data, replicas=2, batch=3)
    for replica in range(2):
        for place in range(3):
            read = [batches.load(step, replica, 0) for step in range(4)]
            x, y = (torch.cat([one[part][place] for one in read]) for part in range(2))
            start = 16 * (3 * replica + place)
            assert x.tolist() == [*range(start, start + 12), *range(start, start + 4)]
            assert torch.equal(y, x + 1)
    assert [data.begins(step) for step in range(7)] == [True, False, False, True, False, False, True]


def test_the_lanes_are_those_of_pytorch_s_example() -> None:
    """word_language_model: batchify cuts the text into columns, get_batch takes rows."""
    text, lanes, length = torch.randint(0, 50, (203,)), 5, 7
    columns = text[: 203 // lanes * lanes].view(lanes, -1).t()
    data = rp.Lanes(text, length, lanes)
    for window in range(data.windows):
        for lane in range(lanes):
            x, y = data[window * lanes + lane]
            assert torch.equal(x, columns[window * length : (window + 1) * length, lane])
            assert torch.equal(y, columns[window * length + 1 : (window + 1) * length + 1, lane])


def test_an_array_of_any_whole_numbers_will_do() -> None:
    x, _ = rp.Lanes(np.arange(30, dtype=np.uint16), length=4, lanes=2)[3]
    assert x.dtype is torch.int64
    assert x.tolist() == [19, 20, 21, 22]
    assert x.is_contiguous()


@pytest.mark.parametrize(("settings", "says"), [
    ({"replicas": 2, "batch": 4}, "give lanes=8"),
    ({"replicas": 2, "batch": 3, "reading.order": "shuffled"}, "leave it out"),
    ({"replicas": 1, "batch": 6, "accumulate": 2}, "more replicas"),
], ids=["lanes", "order", "accumulate"])  # fmt: skip
def test_a_job_that_would_not_read_on_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(DataError, match=says):
        _batches(rp.Lanes(torch.arange(100), length=4, lanes=6), **settings)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(DataError, match="4 in each, and a window needs length"):
        rp.Lanes(torch.arange(12), length=4, lanes=3)
    with pytest.raises(UsageError, match="whole numbers in one row"):
        rp.Lanes(torch.zeros(12), length=1, lanes=1)
    with pytest.raises(UsageError, match="1 or more"):
        rp.Lanes(torch.arange(12), length=0, lanes=1)
    with pytest.raises(IndexError):
        rp.Lanes(torch.arange(12), length=1, lanes=1)[11]
