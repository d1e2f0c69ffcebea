"""The cache on a machine's disk: bounded, shared by processes, checked; it costs no sample whatever happens to it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from rallypoint.data import cache as cache_module
from rallypoint.data.cache import Cache, CacheEntries, FilePiece
from rallypoint.errors import UsageError
from rallypoint.own_files import OpenFolder
from support.beside import raising

from cache_writers import hold_and_die, many_reads  # isort: skip

FORK = multiprocessing.get_context("fork")


def piece(number: int, size: int = 100) -> FilePiece:
    return FilePiece(b"f" * 16, number * size, (number + 1) * size)


def data_of(piece: FilePiece) -> bytes:
    return bytes([piece.start % 251]) * (piece.stop - piece.start)


def never() -> bytes:
    raise AssertionError("the store was asked")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def entries(cache: Cache) -> list[Path]:
    return sorted(path for path in (cache._entries.folder / "entries").rglob("*") if path.is_file())


def test_what_was_read_once_is_not_fetched_again_by_a_later_process_either(cache: Cache, tmp_path: Path) -> None:
    assert cache.get(piece(1), lambda: data_of(piece(1))) == data_of(piece(1))
    assert cache.get(piece(1), never) == data_of(piece(1))
    assert Cache(tmp_path / "cache").get(piece(1), never) == data_of(piece(1))


@pytest.mark.parametrize("damage", ["a byte", "cut", "empty", "another entry", "longer"])
def test_a_damaged_entry_is_fetched_again(cache: Cache, damage: str) -> None:
    for number in (1, 2):
        cache.get(piece(number), lambda number=number: data_of(piece(number)))  # type: ignore[misc]
    one, other = entries(cache)
    whole = one.read_bytes()
    one.write_bytes({
        "a byte": whole[:60] + bytes([whole[60] ^ 1]) + whole[61:], "cut": whole[:-1], "empty": b"",
        "another entry": other.read_bytes(), "longer": whole + b"x",
    }[damage])  # fmt: skip
    for number in (1, 2):
        assert cache.get(piece(number), lambda number=number: data_of(piece(number))) == data_of(piece(number))  # type: ignore[misc]
    assert {path.read_bytes() for path in entries(cache)} == {whole, other.read_bytes()}


def test_what_was_used_longest_ago_goes_first_and_the_limit_holds(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=10 * 128)
    for number in range(30):
        cache.get(piece(number), lambda number=number: data_of(piece(number)))  # type: ignore[misc]
        if number >= 3:  # used all the time
            assert cache.get(piece(3), never) == data_of(piece(3))
        for count, path in enumerate(sorted(entries(cache), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(path, ns=(count, count))  # the order is kept; a clock of the file system may be coarse
        assert cache.total <= 10 * 128
    assert cache.total > 6 * 128
    assert cache.get(piece(29), never) == data_of(piece(29))


def test_more_than_the_limit_is_read_and_not_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=50)
    assert cache.get(piece(1), lambda: data_of(piece(1))) == data_of(piece(1))
    assert cache.total == 0


def test_threads_that_need_the_same_bytes_fetch_them_once(cache: Cache) -> None:
    begun, fetched = threading.Barrier(4), list[int]()

    def fetch_it() -> bytes:
        fetched.append(1)
        return data_of(piece(1))

    def read() -> None:
        begun.wait()
        assert cache.get(piece(1), fetch_it) == data_of(piece(1))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1


def test_processes_that_start_at_once_fetch_each_piece_once(tmp_path: Path) -> None:
    queue: Any = FORK.SimpleQueue()
    together = FORK.Barrier(4)
    processes = [FORK.Process(target=many_reads, args=(tmp_path / "new", together, queue, 30)) for _ in range(4)]
    for process in processes:
        process.start()
    fetched = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    assert sum(fetched) == 30


def test_a_process_that_is_killed_while_it_fetches_or_writes_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for when in ("fetching", "writing"):
        ready, never_set = FORK.Event(), FORK.Event()
        process = FORK.Process(target=hold_and_die, args=(cache, piece(7), when, ready, never_set))
        process.start()
        ready.wait()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert [path.suffix for path in entries(cache)] == ([".partial"] if when == "writing" else [])
    assert cache.get(piece(7), lambda: data_of(piece(7))) == data_of(piece(7))
    assert [path.suffix for path in entries(cache)] == [""]


def test_leftovers_of_killed_processes_count_and_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=1000)
    cache.get(piece(1), lambda: data_of(piece(1)))
    (leftover := entries(cache)[0].with_suffix(".partial")).write_bytes(bytes(900))
    os.utime(leftover, (1, 1))
    (tmp_path / "size").unlink()
    cache.get(piece(2), lambda: data_of(piece(2)))
    assert not leftover.exists()
    assert len(entries(cache)) == 2


def test_who_waits_too_long_for_another_process_fetches_by_itself(cache: Cache, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(cache_module, "WAIT_S", 0.0)
    with cache._entries.locked(piece(1).name, 0.0) as alone:
        assert alone
        assert cache.get(piece(1), lambda: data_of(piece(1))) == data_of(piece(1))
    assert "fetched here too" in caplog.text
    assert entries(cache) == []


def test_a_disk_that_fails_costs_no_sample(cache: Cache, monkeypatch: Any, caplog: Any) -> None:
    cache.get(piece(1), lambda: data_of(piece(1)))
    monkeypatch.setattr(CacheEntries, "keep", raising(OSError(28, "No space left on device")))
    fetched = list[int]()
    for _ in range(2):
        assert cache.get(piece(2), lambda: fetched.append(1) or data_of(piece(2))) == data_of(piece(2))
    assert len(fetched) == 2
    assert cache.get(piece(1), never) == data_of(piece(1))
    assert caplog.text.count("No space left") == 1


def test_a_disk_that_is_full_below_the_limit_keeps_what_was_used_last(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    cache, write = Cache(tmp_path), OpenFolder.write

    def on_a_small_disk(folder: OpenFolder, name: str, *parts: bytes, beside: str = "") -> None:
        if cache.total + sum(map(len, parts)) > 10 * 128:
            raise OSError(28, "No space left on device")
        write(folder, name, *parts, beside=beside)

    monkeypatch.setattr(OpenFolder, "write", on_a_small_disk)
    for number in range(30):
        assert cache.get(piece(number), lambda number=number: data_of(piece(number))) == data_of(piece(number))  # type: ignore[misc]
        assert cache.get(piece(number), never) == data_of(piece(number))
        for count, path in enumerate(sorted(entries(cache), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(path, ns=(count, count))
    assert cache.total > 6 * 128
    assert int((tmp_path / "size").read_text()) >= cache.total
    assert "keeps nothing more" not in caplog.text


def test_a_folder_that_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    limits = 0, -1, float("nan"), float("inf")
    for folder, limit in ((tmp_path / "file", 1), ("s3://bucket/cache", 1), *((tmp_path, one) for one in limits)):
        with pytest.raises(UsageError, match=r"rp\.Cache"):
            Cache(folder, limit=limit)


def test_a_cache_that_is_to_ask_other_hosts_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no peers=, .* keep the data in a folder that all hosts share"):
        Cache(tmp_path, peers=True)
