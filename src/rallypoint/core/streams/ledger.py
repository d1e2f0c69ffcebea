"""The ledger of a stream that comes only once: how many samples of whom a version has. Pure.

Each replica carries a row of numbers from step to step, as a part of the version: who has read samples for it, and how
many of them it has used. So whatever survives a version survives with its ledger, and what is rolled back is rolled
back in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

READERS = 32  # of one replica that a row can name; the oldest ones are then counted together
_FIELDS, _NAME_WORDS = 6, 3  # key, the name in three words, used, read
ROW = READERS * _FIELDS  # numbers of a row
_EARLIER = 1  # the key of readers that are counted together; processes have higher ones


class ReadBy(NamedTuple):
    """What one process has read of a stream.

    Attributes:
        key: a random number of the process.
        name: its worker's name; at most 24 bytes of it.
        used: samples that the version has of it.
        read: samples that it had read when it contributed last. A process that was killed may have read more since.
    """

    key: int
    name: str
    used: int
    read: int

    @property
    def lost(self) -> int:
        """Samples that it has read and the version does not have, as far as is known."""
        return max(0, self.read - self.used)


def readers_in(row: Sequence[int]) -> list[ReadBy]:
    """Return the readers in one replica's row, in the order in which they came."""
    fields = (row[at : at + _FIELDS] for at in range(0, len(row), _FIELDS))
    return [ReadBy(one[0], _name_in(one[1:4]), one[4], one[5]) for one in fields if one[0]]


def noted(row: Sequence[int], key: int, name: str, *, used: int, read: int) -> list[int]:
    """Return the row after `used` more samples of this process, which has read `read` in all."""
    readers = readers_in(row)
    mine = next((one for one in readers if one.key == key), ReadBy(key, name, 0, 0))
    others = [one for one in readers if one.key != key]
    while len(others) >= READERS:
        first, second = others[:2]
        both = first.used + second.used
        others[:2] = [ReadBy(_EARLIER, "earlier workers", both, both)]
    return _row_of([*others, mine._replace(used=mine.used + used, read=max(mine.read, read))])


def ledger_of(rows: Iterable[Sequence[int]]) -> list[ReadBy]:
    """Return what each process has read, of the rows of all replicas, sorted by name."""
    found: dict[int, ReadBy] = {}
    for one in (one for row in rows for one in readers_in(row)):
        known = found.get(one.key)
        if known is None:
            found[one.key] = one
        else:
            read = known.read + one.read if one.key == _EARLIER else max(known.read, one.read)
            found[one.key] = known._replace(used=known.used + one.used, read=read)
    return sorted(found.values(), key=lambda one: (one.name, one.key))


def sentence_of(ledger: Sequence[ReadBy]) -> str:
    """Return what to tell of a ledger: ``12,800 samples used; read and not used: 37 by worker1 (as of ...)``.

    Nobody knows what a process that was killed had read after its last contribution, so the sentence says that too.
    What a process has used may be counted with earlier workers in some rows: then the others are upper bounds.
    """
    most = "at most " if any(one.key == _EARLIER for one in ledger) else ""
    unused = ", ".join(f"{most}{one.lost:,} by {one.name}" for one in ledger if one.lost)
    known = f"{unused} (as of their last contributions)" if unused else "none"
    return f"{sum(one.used for one in ledger):,} samples used; read and not used: {known}"


def _row_of(readers: Sequence[ReadBy]) -> list[int]:
    row = [number for one in readers for number in (one.key, *_words_of(one.name), one.used, one.read)]
    return row + [0] * (ROW - len(row))


def _words_of(name: str) -> list[int]:
    raw = name.encode()[: 8 * _NAME_WORDS].ljust(8 * _NAME_WORDS, b"\0")
    return [int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, len(raw), 8)]


def _name_in(words: Sequence[int]) -> str:
    raw = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    return raw.rstrip(b"\0").decode(errors="replace")
