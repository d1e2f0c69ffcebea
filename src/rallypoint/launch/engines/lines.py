"""Cuts what a process prints into lines. Pure."""

from __future__ import annotations

LONGEST = 1 << 20  # bytes of a line; a longer one comes in pieces, because nobody knows whether it ever ends


class Lines:
    """The lines of one process, each as a terminal shows it in the end: a ``\\r`` begins the line anew.

    So a progress bar, which may be written a million times without a newline, takes no more memory than one of its
    states.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take the next bytes. Returns the lines that are complete now, without their ends."""
        *whole, rest = (self._rest + data).split(b"\n")
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        pieces = [rest[at : at + LONGEST] for at in range(0, len(rest), LONGEST)] or [b""]
        self._rest = pieces.pop()
        return [_shown(line) for line in (*whole, *pieces)]

    def rest(self) -> list[str]:
        """Nothing more comes. Returns the last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return [_shown(rest)] if rest else []


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
