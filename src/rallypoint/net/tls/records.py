"""Where the records of a TLS stream end: how many bytes are sure to come."""

from __future__ import annotations

_HEADER_BYTES = 5  # RFC 8446, section 5.1: type, version, length
_OVERHEAD = _HEADER_BYTES + 1 + 16  # around the bytes of a record: its header, its inner type, its tag


class Records:
    """Follows the record headers of one direction of a TLS stream.

    A receiver that waits for many bytes at once wakes up seldom; but it must not wait for more than the other side
    sends. Lengths are believed only for that: a wrong one costs its sender this connection.
    """

    def __init__(self) -> None:
        self._header = bytearray()  # of the record in progress; less than all of it while it is coming
        self._left = 0  # bytes of its body that have not come

    def came(self, data: memoryview) -> None:
        """These bytes are the next of the stream."""
        at, size = 0, len(data)
        while at < size:
            if len(self._header) < _HEADER_BYTES:
                part = data[at : at + _HEADER_BYTES - len(self._header)]
                self._header += part
                at += len(part)
                if len(self._header) < _HEADER_BYTES:
                    return
                self._left = self._body
            step = min(self._left, size - at)
            self._left -= step
            at += step
            if self._left == 0:
                self._header.clear()

    def to_come(self, wanted: int) -> int:
        """How many more bytes are sure to come before `wanted` (at least 1) more bytes of data can be read.

        All records that are here are read already.
        """
        here = len(self._header)
        if here == _HEADER_BYTES:
            here += self._body - self._left
        return max(self._left, wanted + _OVERHEAD - here, 1)

    @property
    def _body(self) -> int:
        return int.from_bytes(self._header[3:], "big")
