"""Hosts that ask each other at the same time do not wait for each other; what a machine lost is made again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rallypoint as rp
from rallypoint.data.cache import FilePiece

FILE = bytes(16)


def alike() -> tuple[FilePiece, FilePiece]:
    """Two pieces whose entries have the same lock."""
    seen: dict[int, FilePiece] = {}
    for start in range(10_000):
        piece = FilePiece(FILE, start, start + 1)
        if (other := seen.setdefault(int(piece.name[:8], 16) % 1024, piece)) is not piece:
            return other, piece
    raise AssertionError


class Crossed:
    """Asks the other cache, when both hosts ask."""

    def __init__(self, other: rp.Cache, both: threading.Barrier) -> None:
        self._other, self._both, self._answers = other, both, ThreadPoolExecutor(1)

    def ask(self, piece: FilePiece, fetch: Callable[[], bytes]) -> bytes | None:
        self._both.wait(20)
        with self._answers:
            return self._answers.submit(self._other.serve, piece, fetch).result(20)


def test_two_hosts_that_ask_each_other_for_pieces_with_the_same_lock_both_get_them(tmp_path: Path) -> None:
    caches, both = [rp.Cache(tmp_path / name) for name in "ab"], threading.Barrier(2)
    for cache, other in (caches, caches[::-1]):
        cache.join(Crossed(other, both).ask)
    with ThreadPoolExecutor(2) as hosts:
        got = [hosts.submit(cache.get, piece, lambda: b"x") for cache, piece in zip(caches, alike(), strict=True)]
        assert [one.result(60) for one in got] == [b"x", b"x"]


def test_a_folder_whose_name_was_lost_gets_another_one(tmp_path: Path) -> None:
    name = rp.Cache(tmp_path).id
    (tmp_path / "id").write_bytes(b"")
    again = rp.Cache(tmp_path).id
    assert len(again) == len(name) == 16
    assert rp.Cache(tmp_path).id == again
