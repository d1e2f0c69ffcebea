"""Which lines of the processes are shown: all of them, but an error that several workers end with only once.

Pure: lines and endings come in, lines to show go out; time is a number of seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_TRACEBACK = "Traceback (most recent call last):"
_SYNTAX = '  File "'  # the first line of a SyntaxError's report, which has no header
_SENTENCE = "error: "  # how our own errors begin
_HELD_S = 3.0  # a process that lives on for so long after a traceback has only logged it
_QUIET = ("KeyboardInterrupt", "SystemExit")


@dataclass(frozen=True, slots=True)
class Line:
    """A line to show, and the process that printed it."""

    process: str
    text: str


@dataclass(slots=True)
class _Held:
    """What a process has printed since an error began."""

    since: float
    lines: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """The lines of all processes. An error is held back until its process ends, or goes on.

    Two processes ended alike if their errors are of one type and came from the same lines of code.
    """

    ending: bool = False  # processes are being ended by us: what they print about that is nobody's concern
    _held: dict[str, _Held] = field(default_factory=dict)
    _shown: dict[str, list[str]] = field(default_factory=dict)  # by kind of error: who ended with it

    def line(self, process: str, text: str, now: float) -> list[Line]:
        """`process` has printed a line: what to show now."""
        held = self._held.get(process)
        if held is None and (text == _TRACEBACK or text.startswith((_SENTENCE, _SYNTAX))):
            held = self._held[process] = _Held(now)
        if held is None:
            return [] if self.ending else [Line(process, text)]
        held.lines.append(text)
        return []

    def ended(self, process: str, *, well: bool = False) -> list[Line]:
        """`process` has ended, with status 0 if `well`: what to show of its last words."""
        held = self._held.pop(process, None)
        if held is None:
            return []
        if well and not self.ending:  # it only printed something that looks like an error, as "error: 0.25"
            return [Line(process, text) for text in held.lines]
        kind = _kind(held.lines)
        if kind in _QUIET or (self.ending and kind not in self._shown):
            return []
        alike = self._shown.setdefault(kind, [])
        alike.append(process)
        return [Line(process, text) for text in held.lines] if len(alike) == 1 else []

    def due(self, now: float) -> list[Line]:
        """The lines of processes that have gone on after an error."""
        late = [process for process, held in self._held.items() if now - held.since > _HELD_S]
        return [Line(process, text) for process in late for text in self._held.pop(process).lines]

    def summary(self) -> list[str]:
        """Of each error that several workers ended with: a sentence that says so."""
        return [
            f"{', '.join(others)} ended with the same error as {first}"
            for first, *others in self._shown.values() if others
        ]  # fmt: skip


def _kind(lines: list[str]) -> str:
    """The places in the code and the type of the error; for our own errors the sentence itself."""
    if lines[0].startswith(_SENTENCE):
        return lines[0]
    last = next((n for n in range(len(lines) - 1, -1, -1) if lines[n].startswith("  ")), -1)
    error = next((line for line in lines[last + 1 :] if line), "")
    name = error.partition(":")[0]
    if name in _QUIET:
        return name
    return "\n".join([*(line for line in lines if line.startswith(_SYNTAX)), name])
