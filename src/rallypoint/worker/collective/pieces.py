"""How sums of any length are cut into the shards of one fixed layout, the same way on all workers.

The layout has shards of a few sizes. A sum takes as many large ones as fit, then smaller ones for the rest, in turn
among those of a size. Which shard a piece gets depends only on the lengths of the sums before it, so workers that ask
for the same sums in the same order need not tell each other anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rallypoint.core.layout import Layout, TensorSpec, build_layout

CLOCK = 0  # the shard that counts: it is used for no sum but the last one, with which the job ends
_SMALLEST, _SMALL = 64, 1024  # words
_WASTE = 8  # a piece may be smaller than its shard by so much: 1/8 of what was asked for
_ROWS = "sums.{words}.{number}"


class Piece(NamedTuple):
    """Words [start, stop) of a sum, in the first words of a shard."""

    start: int
    stop: int
    shard: int


def layout_of(under_way_bytes: int, shard_bytes: int) -> Layout:
    """Return a layout for sums of which about so many bytes are under way at once, in shards of at most `shard_bytes`
    (at least 16 KiB; at least two of these)."""
    largest = max(shard_bytes // 4, 4 * _SMALL)
    counts = {largest: max(2, under_way_bytes // (4 * largest))}
    size = largest // 4
    while size > _SMALL:
        counts[size], size = 4, size // 4
    counts |= {_SMALL: 8, _SMALLEST: 8}
    specs = [
        TensorSpec(_ROWS.format(words=words, number=number), (1, words), "float32", 0)
        for words, count in counts.items() for number in range(count)
    ]  # fmt: skip
    specs.append(TensorSpec("sums.clock", (1, 16), "float32", 0))  # the last one has the first shard
    return build_layout(specs, matrices=frozenset(spec.name for spec in specs))


class Cutter:
    """Cuts one sum after the other. Not thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._shards: dict[int, list[int]] = {}
        for shard in layout.shards:
            if shard.index != CLOCK:
                self._shards.setdefault(shard.words, []).append(shard.index)
        self._next = dict.fromkeys(self._shards, 0)
        self._sizes = sorted(self._shards, reverse=True)

    def cut(self, words: int) -> list[Piece]:
        """Return the pieces of the next sum, which has so many words (at least 1)."""
        start, pieces = 0, []
        for size in self._chosen(words):
            stop = min(words, start + size)
            pieces.append(Piece(start, stop, self._take(size)))
            start = stop
        return pieces

    def _chosen(self, words: int) -> Iterator[int]:
        """The sizes of the shards for a sum of so many words."""
        left = words
        for size, smaller in zip(self._sizes, [*self._sizes[1:], 0], strict=True):
            while left >= size or (left > 0 and (not smaller or size - left <= max(words // _WASTE, smaller - 1))):
                yield size
                left -= size

    def _take(self, size: int) -> int:
        number, own = self._next[size], self._shards[size]
        self._next[size] = (number + 1) % len(own)
        return own[number]
