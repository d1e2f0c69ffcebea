"""Reading ahead: the process that fetches what comes next changes speed, and nothing else."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import rallypoint as rp
from rallypoint.config import JobConfig
from rallypoint.core.policy import LocalSteps
from rallypoint.data import processes
from rallypoint.data.cache import FilePiece
from rallypoint.data.dataset import fetch
from rallypoint.data.loader import MicroBatches
from rallypoint.data.order import Forecast, Place, places_after, places_from
from rallypoint.data.processes import LoaderProcesses, Position, ReadAhead, Upcoming
from rallypoint.data.spec import Loader
from rallypoint.errors import DataError

CPU = torch.device("cpu")
GROUPS, ROWS = 24, 8  # row groups, and rows in each
CONFIG = JobConfig(replicas=2, batch=4, steps=GROUPS, reading=rp.Reading(order="windowed", mixed_shards=2))


class SlowStore(LocalFileSystem):
    """`slow://` has the files of this machine, and notes what is read, by which process. What fails is noted too."""

    protocol = "slow"
    log = ""
    fails_ahead = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("slow://")))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        random.random(), np.random.random(), torch.rand(1)  # as a client does that waits before it tries again
        is_ahead = multiprocessing.current_process().name == "reading ahead"
        with Path(self.log).open("a") as log:
            log.write(f"{'ahead' if is_ahead else 'itself'} {start} {end}\n")
        if is_ahead and self.fails_ahead:
            raise OSError("the store is gone")
        return bytes(super().cat_file(path, start, end, **kwargs))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    SlowStore.log, SlowStore.fails_ahead = str(tmp_path / "log"), False
    table = pa.table({"x": pa.array(range(GROUPS * ROWS)), "bytes": [os.urandom(500) for _ in range(GROUPS * ROWS)]})
    (tmp_path / "rows").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "rows" / "0.parquet", row_group_size=ROWS)
    return f"slow://{tmp_path}/rows"


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["x"], "drawn": (random.random(), np.random.random(), torch.rand(2))}


def read() -> list[tuple[str, int, int]]:
    lines = [line.split() for line in Path(SlowStore.log).read_text().splitlines()]
    return [(who, int(start), int(stop)) for who, start, stop in lines]


def data(rows: str, cache: Path, **settings: Any) -> rp.Parquet:
    return rp.Parquet(rows, transform=noisy, cache=rp.Cache(cache, **settings))


def load(dataset: Any, *, kills: bool = False) -> list[tuple[Place, Any]]:
    """All micro-batches of a worker with both replicas, from two loader processes."""
    processes = LoaderProcesses(MicroBatches(dataset, CONFIG, CPU, loader=Loader(workers=2)), lambda _: None)
    found = []
    try:
        processes.expect(0, 0, (0, 1))
        for place in places_from(0, 0, (0, 1), CONFIG):
            found.append((place, processes.take(place)))
            if kills and len(found) == 1:
                os.kill(reader(), signal.SIGKILL)
    finally:
        processes.close()
    assert not multiprocessing.active_children()
    return found


def reader() -> int:
    return next(one.pid or 0 for one in multiprocessing.active_children() if one.name == "reading ahead")


def same(found: list[tuple[Place, Any]], rows: str) -> bool:
    """True if these are the micro-batches that one process loads from the store, without a cache."""
    alone = MicroBatches(rp.Parquet(rows, transform=noisy), CONFIG, CPU)
    for place, batch in found:
        expected = alone.loaded(*place)[0]
        equal = [torch.equal(batch["x"], expected["x"]), torch.equal(batch["drawn"][2], expected["drawn"][2])]
        equal += [torch.equal(batch["drawn"][i], expected["drawn"][i]) for i in (0, 1)]
        if not all(equal):
            return False
    return True


def test_reading_ahead_changes_no_byte_and_no_random_number_and_fetches_nothing_twice(
    rows: str, tmp_path: Path
) -> None:
    found = load(data(rows, tmp_path / "cache"))
    ranges = Counter((start, stop) for _, start, stop in read())
    assert max(ranges.values()) == 1
    assert same(found, rows)


@pytest.mark.parametrize("kills", [False, True], ids=["the store fails it", "it is killed"])
def test_what_reading_ahead_does_not_manage_the_loaders_read(rows: str, tmp_path: Path, kills: bool) -> None:
    SlowStore.fails_ahead = not kills
    found = load(data(rows, tmp_path / "cache"), kills=kills)
    assert len(found) == 2 * GROUPS
    assert same(found, rows)


@pytest.mark.parametrize("columns", [None, ["x"], ["nested.b", "text"], ["nested"]])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_filled_row_group_is_read_from_the_cache(
    rows: str, tmp_path: Path, columns: list[str] | None, compression: str
) -> None:
    table = pa.table({
        "x": range(200), "text": [f"text {number % 7}" for number in range(200)],
        "nested": [{"a": number, "b": {"c": [number] * 3, "d": None}} for number in range(200)],
    })  # fmt: skip
    path = Path(rows.removeprefix("slow://")) / "0.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=50, compression=compression)
    made = rp.Parquet(rows, columns=columns, cache=tmp_path / "cache")
    assert all(made.fill(shard) for shard in range(4))
    filled = len(read())
    found = fetch(made, range(200))
    assert len(read()) == filled
    assert fetch(rp.Parquet(rows, columns=columns), [0, 117]) == [found[0], found[117]]


def test_one_error_of_the_store_is_no_error_of_the_caches_disk(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, errors = rp.Parquet(rows, cache=tmp_path / "cache"), [OSError("the store hiccups")]
    read_file = SlowStore.cat_file

    def cat_file(self: SlowStore, *arguments: Any, **settings: Any) -> bytes:
        if errors:
            raise errors.pop()
        return read_file(self, *arguments, **settings)

    monkeypatch.setattr(SlowStore, "cat_file", cat_file)
    with pytest.raises(DataError, match="the store hiccups"):
        made.fill(0)
    assert made.fill(0)
    assert made.fill(1)


def test_tars_are_filled_too(rows: str, tmp_path: Path) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number in range(20):
            about = tarfile.TarInfo(f"{number:03d}.bin")
            about.size = 100_000
            tar.addfile(about, io.BytesIO(os.urandom(about.size)))
    made = rp.WebDataset(f"slow://{tmp_path}/0.tar", cache=tmp_path / "cache")
    assert made.fill(0)
    filled = len(read())
    assert len(fetch(made, range(20))) == 20
    assert len(read()) == filled


def test_no_more_is_ahead_than_the_bound_and_it_grows_when_the_loop_waits(
    rows: str, tmp_path: Path, monkeypatch: Any
) -> None:
    made = data(rows, tmp_path / "cache")
    size = max(sum(stop - start for _, start, stop in made.ranges(shard)) for shard in range(GROUPS))
    monkeypatch.setattr(processes, "LEAST", 3 * size)
    upcoming = Upcoming(MicroBatches(made, CONFIG, CPU), made, most=6 * size)
    places = list(places_from(0, 0, (0, 1), CONFIG))

    def popped() -> list[int]:
        return list(iter(upcoming.pop, None))

    upcoming.at(places[0], (0, 1), 0)
    first = popped()
    assert len(first) == 3
    assert popped() == []
    upcoming.at(places[1], (0, 1), 5)
    more = popped()
    assert 3 <= len(more) <= 4  # six are ahead of the new place, and the first of all may be behind it
    order = list(dict.fromkeys(
        shard for place in places[1:] for shard in made.shards_of(MicroBatches(made, CONFIG, CPU).indices(*place))
    ))  # fmt: skip
    assert first + more == order[: len(first) + len(more)]


def test_before_the_first_micro_batch_is_asked_for_its_shards_are_fetched_too(rows: str, tmp_path: Path) -> None:
    made = data(rows, tmp_path / "cache")
    batches = MicroBatches(made, CONFIG, CPU)
    upcoming = Upcoming(batches, made, most=1 << 30)
    first, second, *_ = places_from(0, 0, (0, 1), CONFIG)
    upcoming.at(first, (0, 1), 0, True)
    before = list(iter(upcoming.pop, None))
    assert before[0] in made.shards_of(batches.indices(*first))
    assert sorted(before) == list(range(GROUPS))
    for place in (first, second):  # once it is asked for, nothing is fetched a second time
        upcoming.at(place, (0, 1), 0)
    assert upcoming.pop() is None


def test_the_store_is_read_before_the_first_version_is_here(rows: str, tmp_path: Path) -> None:
    processes = LoaderProcesses(
        MicroBatches(data(rows, tmp_path / "cache"), CONFIG, CPU, loader=Loader(workers=2)), lambda _: None
    )
    made = data(rows, tmp_path / "cache")
    try:
        processes.coming(0, 0, (0, 1))
        while not all(made._store.cache.has(FilePiece(file.digest, *range_)) for file, *range_ in pieces(made)):
            multiprocessing.active_children()[0].join(0.01)
        places = list(places_from(0, 0, (0, 1), CONFIG))
        found = [(place, processes.take(place)) for place in places]
    finally:
        processes.close()
    groups = [(who, start) for who, start, stop in read() if (start, stop) in {(a, b) for _, a, b in pieces(made)}]
    assert [who for who, _ in groups] == ["ahead"] * GROUPS
    assert same(found, rows)


def pieces(made: rp.Parquet) -> list[tuple[Any, int, int]]:
    return [range_ for shard in range(GROUPS) for range_ in made.ranges(shard)]


def test_nothing_is_fetched_that_the_job_does_not_need(rows: str, tmp_path: Path) -> None:
    made = data(rows, tmp_path / "cache")
    upcoming = Upcoming(MicroBatches(made, CONFIG, CPU), made, most=1 << 30)
    places = list(places_from(0, 0, (0, 1), CONFIG))
    upcoming.at(places[-3], (0, 1), 0)
    batches = MicroBatches(made, CONFIG, CPU)
    needed = {shard for place in places[-2:] for shard in made.shards_of(batches.indices(*place))}
    assert set(iter(upcoming.pop, None)) == needed


def test_without_a_cache_and_for_files_of_this_machine_no_process_begins(rows: str, tmp_path: Path) -> None:
    assert rp.Parquet(rows).fills == 0
    assert rp.Parquet(rows.removeprefix("slow://"), cache=tmp_path / "cache").fills == 0
    assert rp.Parquet(rows, cache=rp.Cache(tmp_path / "cache", limit=1000)).fills == 1000


def test_a_position_of_many_replicas_comes_whole_or_not_at_all_to_a_process_that_does_not_read(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []

    class Stuck:
        def __init__(self, *, args: tuple[Any, ...], **_: Any) -> None:
            ends.append(args[0].dup())

        def start(self) -> None:
            """It does nothing, and keeps its end."""

    monkeypatch.setattr(multiprocessing, "get_context", lambda _: SimpleNamespace(Process=Stuck))
    ahead = ReadAhead(MicroBatches(data(rows, tmp_path / "cache"), CONFIG, CPU), "fork")
    ahead.begin()
    sent = [((step, 2, 0), tuple(range(step, step + 5000)), step, False) for step in range(40)]
    for position in sent:
        ahead.at(position)
    ends[0].setblocking(False)
    heard = list[Any]()
    with contextlib.suppress(BlockingIOError):
        while True:
            heard.append(msgspec.msgpack.decode(ends[0].recv(1 << 20), type=Position))
    ends[0].close()
    assert 1 < len(heard) < len(sent)
    assert heard == sent[: len(heard)]


# ---- The forecast of what a worker loads next ----


SYNC = JobConfig(replicas=4, batch=4, steps=9)


def test_replicas_take_turns_within_a_step() -> None:
    assert list(islice(places_after((7, 2, 0), (2, 3), SYNC), 3)) == [(7, 3, 0), (8, 2, 0), (8, 3, 0)]
    assert list(places_after((8, 2, 0), (2, 3), SYNC)) == [(8, 3, 0)], "the job has nine steps"


def test_micro_batches_of_a_replica_come_before_the_next_replica() -> None:
    config = JobConfig(replicas=2, batch=4, accumulate=2, steps=9)
    assert list(islice(places_after((0, 0, 0), (0, 1), config), 4)) == [(0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0)]


def test_a_replica_makes_all_steps_of_a_round_before_the_next() -> None:
    config = JobConfig(replicas=2, batch=4, steps=5, sync=LocalSteps(steps=3))
    expected = [(step, replica, 0) for steps in (range(3), range(3, 5)) for replica in (0, 1) for step in steps]
    for index, place in enumerate(expected):
        assert list(places_after(place, (0, 1), config)) == expected[index + 1 :]
    assert list(places_from(1, 0, (0, 1), config)) == expected[6:]


def test_a_replica_that_is_somebody_elses_now_is_followed_by_the_workers_own() -> None:
    assert list(islice(places_after((4, 1, 0), (0, 3), SYNC), 3)) == [(4, 3, 0), (5, 0, 0), (5, 3, 0)]
    assert list(places_after((4, 1, 0), (), SYNC)) == []


def test_a_forecast_gives_back_what_is_put_in_front() -> None:
    places: list[Place] = [(0, 0, 0), (1, 0, 0)]
    forecast = Forecast(places)
    assert not forecast.ended
    assert forecast.pop() == places[0]
    assert not forecast.ended
    forecast.again(places[:1])
    assert [forecast.pop(), forecast.pop(), forecast.pop()] == [*places, None]
    assert forecast.ended
