"""Processes that use one cache at once, or are killed while they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rallypoint import own_files
from rallypoint.data.cache import Cache, FilePiece


def many_reads(folder: Path, together: Any, queue: Any, pieces: int) -> None:
    """Read the same pieces as all others; tell how many this process has fetched."""
    together.wait()
    cache, fetched = Cache(folder), 0
    for number in range(pieces):

        def fetch(number: int = number) -> bytes:
            nonlocal fetched
            fetched += 1
            return bytes([number]) * 1000

        assert cache.get(FilePiece(b"f" * 16, number * 1000, number * 1000 + 1000), fetch) == bytes([number]) * 1000
    queue.put(fetched)


def hold_and_die(cache: Cache, piece: FilePiece, when: str, ready: Any, never_set: Any) -> None:
    """Wait for the SIGKILL, with a part of the entry written if `when` is "writing"."""

    replace = own_files.os.replace

    def wait(*names: Any, **folders: int) -> bytes:
        if names and not names[0].endswith(".partial"):
            replace(*names, **folders)  # the folder's size, not an entry
            return b""
        ready.set()
        never_set.wait()
        return b""

    if when == "writing":
        own_files.os.replace = wait  # type: ignore[assignment]
    cache.get(piece, wait if when == "fetching" else lambda: bytes(piece.stop - piece.start))
