"""Tables: embeddings whose rows are on the servers only. A table is cut into parts, each on one server.

Row r is in part r modulo the number of parts, so that frequently used rows are spread evenly.
"""

from __future__ import annotations

import msgspec

PART_BYTES = 16 << 20  # quick to move; with an optimizer's two moments far below the limit of a frame
_SPREAD = 8  # the least number of parts, where each has at least a shard's bytes: every server should have some


class Part(msgspec.Struct, frozen=True):
    """Every `parts`-th row of a table, beginning with row `part`: `rows` rows in all.

    `table` is the table's index in the layout. Row r of the table is row ``r // parts`` of part ``r % parts``.
    Example: parts = 8; row 19 of the table is row 2 of part 3.
    """

    table: int
    part: int
    parts: int
    rows: int


def parts_of(table: int, rows: int, columns: int, shard_bytes: int) -> list[Part]:
    """Cut table number `table` (`rows` x `columns`, fp32) into parts of at most about PART_BYTES.

    A small table has up to 8 parts, so that several servers share it. The result does not depend on the number of
    servers: it may change during the job.
    """
    nbytes = rows * columns * 4
    parts = min(rows, max(-(-nbytes // PART_BYTES), min(_SPREAD, -(-nbytes // shard_bytes))))
    return [Part(table, part, parts, len(range(part, rows, parts))) for part in range(parts)]
