"""Tables: embeddings whose rows live on the servers only, cut into parts that each lie on one server.

Row r belongs to part r modulo the number of parts, so the popular rows, wherever they are, are spread evenly.
"""

from __future__ import annotations

import msgspec

PART_BYTES = 16 << 20  # with an optimizer's two moments far below what a frame may carry, and quick to move
_SPREAD = 8  # parts of a table that fits into fewer: so that every server has some of it


class Part(msgspec.Struct, frozen=True):
    """Every `parts`-th row of a table, beginning with row `part`: `rows` of them.

    `table` is the table's index in the layout. Row r of the table is row ``r // parts`` of part ``r % parts``.
    """

    table: int
    part: int
    parts: int
    rows: int


def parts_of(table: int, rows: int, columns: int, shard_bytes: int) -> list[Part]:
    """The parts of a table of fp32 rows: as many as keep each within PART_BYTES, and some for every server.

    How many servers there are does not matter: a job may go on with another number of them.
    """
    nbytes = rows * columns * 4
    parts = min(rows, max(-(-nbytes // PART_BYTES), min(_SPREAD, -(-nbytes // shard_bytes))))
    return [Part(table, part, parts, len(range(part, rows, parts))) for part in range(parts)]
