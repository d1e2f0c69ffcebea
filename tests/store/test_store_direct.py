"""Files written past the page cache: every byte where it belongs, also where the file system will not have it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.store import files
from rallypoint.store.files import BUFFER_BYTES, DirectFile, new_buffer

BLOCK = 4096
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 2 * BUFFER_BYTES + 777]


def pieces(size: int, largest: int) -> list[bytes]:
    """Random bytes, in pieces of random sizes."""
    generator = random.Random(size)
    found = []
    while size > 0:
        count = min(size, generator.randrange(1, largest))
        found.append(generator.randbytes(count))
        size -= count
    return found


def write(path: Path, chunks: list[bytes]) -> None:
    buffer = new_buffer()
    with DirectFile(str(path), buffer) as file:
        for chunk in chunks:
            file.write(chunk)
        file.sync()
    buffer.close()  # BufferError if the file still held it


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, by: Callable[..., Any]) -> None:
    monkeypatch.setattr(files, "os", SimpleNamespace(**{**vars(os), name: by}))


@pytest.mark.parametrize("largest", [100_000, 10 * BUFFER_BYTES])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(tmp_path: Path, size: int, largest: int) -> None:
    chunks = pieces(size, largest)
    write(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


def test_memory_of_any_type_is_its_bytes(tmp_path: Path) -> None:
    buffer = new_buffer()
    with DirectFile(str(tmp_path / "file"), buffer) as file:
        file.write(memoryview(bytearray(8)).cast("d"))
        file.sync()
    assert (tmp_path / "file").stat().st_size == 8


def test_a_buffer_serves_one_file_after_the_other(tmp_path: Path) -> None:
    buffer = new_buffer()
    for size in SIZES[::-1]:
        chunks = pieces(size, 1 << 20)
        with DirectFile(str(tmp_path / str(size)), buffer) as file:
            for chunk in chunks:
                file.write(chunk)
            file.sync()
        assert (tmp_path / str(size)).read_bytes() == b"".join(chunks)


def test_whole_buffers_go_past_the_cache_and_the_rest_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = []

    def noting(descriptor: int, data: memoryview) -> int:
        how.append((bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return os.write(descriptor, data)

    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    replaced(monkeypatch, "write", noting)
    write(tmp_path / "file", [bytes(BUFFER_BYTES + 3 * BLOCK + 5)])
    assert how == [(True, BUFFER_BYTES), (True, 3 * BLOCK), (False, 5)]


def test_a_file_system_that_will_not_open_it_so_gets_it_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = os.open(path, flags & ~os.O_DIRECT, mode)  # Linux makes the file before it refuses
        if flags & os.O_DIRECT:
            os.close(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return descriptor

    replaced(monkeypatch, "open", refusing)
    chunks = pieces(2 * BUFFER_BYTES + 9, 1 << 20)
    write(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


@pytest.mark.parametrize("after", [0, 1000])
def test_a_disk_with_larger_blocks_or_that_takes_less_gets_the_rest_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    calls = []

    def short(descriptor: int, data: memoryview) -> int:
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        calls.append(bool(is_direct))
        if is_direct and (len(calls) > 1 or not after):
            raise OSError(errno.EINVAL, "Invalid argument")
        if is_direct:  # as if it had taken less than it was given
            fcntl.fcntl(descriptor, fcntl.F_SETFL, is_direct ^ fcntl.fcntl(descriptor, fcntl.F_GETFL))
            written = os.write(descriptor, data[:after])
            fcntl.fcntl(descriptor, fcntl.F_SETFL, is_direct | fcntl.fcntl(descriptor, fcntl.F_GETFL))
            return written
        return os.write(descriptor, data)

    replaced(monkeypatch, "write", short)
    chunks = pieces(BUFFER_BYTES + 9, 1 << 20)
    write(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


def test_another_s_file_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        DirectFile(str(tmp_path / "file"), new_buffer())
    assert (tmp_path / "file").read_bytes() == b"theirs"
