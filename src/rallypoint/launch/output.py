"""Which lines of the processes are shown: all of them, but an error that several workers end with only once.

Pure: lines and endings come in, lines to show go out; time is a number of seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_TRACEBACK = "Traceback (most recent call last):"
_SYNTAX = '  File "'  # the first line of a SyntaxError's report, which has no header
_SENTENCE = "error: "  # how our own errors begin
_HELD_S = 3.0  # a process that lives on for so long after a traceback has only logged it
_LAST_WORD_S = 1.0  # the coordinator may say within so long that a sentence of ours has failed the run
_QUIET = ("KeyboardInterrupt", "SystemExit")


@dataclass(frozen=True, slots=True)
class Line:
    """A line to show, and the process that printed it."""

    process: str
    text: str


@dataclass(slots=True)
class _Held:
    """The lines of a process from the beginning of an error on."""

    began: float
    lines: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """The lines of all processes. An error is held back until its process ends, or goes on.

    Two processes ended alike if their errors are of one type and came from the same lines of code. A sentence of ours
    (``error: ...``) is held back a little longer: the line ``failed: ...`` at the end may say the same.
    """

    ending: bool = False  # processes are being ended by us: what they print about that is nobody's concern
    _held: dict[str, _Held] = field(default_factory=dict)
    _shown: dict[str, list[str]] = field(default_factory=dict)  # by kind of error: who ended with it
    _sentences: list[tuple[float, str, list[str]]] = field(default_factory=list)  # when it ended, who, the lines

    def line(self, process: str, text: str, now: float) -> list[Line]:
        """`process` has printed a line: what to show now."""
        held = self._held.get(process)
        if held is None and (text == _TRACEBACK or text.startswith((_SENTENCE, _SYNTAX))):
            held = self._held[process] = _Held(now)
        if held is None:
            return [] if self.ending else [Line(process, text)]
        held.lines.append(text)
        return []

    def ended(self, process: str, now: float, *, well: bool = False) -> list[Line]:
        """`process` has ended, with status 0 if `well`: what to show of its last words now."""
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
        if len(alike) > 1:
            return []
        if kind.startswith(_SENTENCE):
            self._sentences.append((now, process, held.lines))
            return []
        return [Line(process, text) for text in held.lines]

    def due(self, now: float) -> list[Line]:
        """The lines of processes that have gone on after an error, and the sentences of those that did not end the
        run."""
        late = [process for process, held in self._held.items() if now - held.began > _HELD_S]
        shown = [Line(process, text) for process in late for text in self._held.pop(process).lines]
        while self._sentences and now - self._sentences[0][0] > _LAST_WORD_S:
            _, process, lines = self._sentences.pop(0)
            shown += [Line(process, text) for text in lines]
        return shown

    def sentence_of(self, process: str) -> str:
        """The sentence of ours that `process` has ended with; "" if it ended in another way."""
        kinds = (kind for kind, alike in self._shown.items() if process in alike and kind.startswith(_SENTENCE))
        return next(kinds, "").removeprefix(_SENTENCE)

    def rest(self, failure: str) -> list[Line]:
        """At the end of the run: the sentences that were held back, without what `failure` says."""
        said = {f"{_SENTENCE}{line}" for line in _told(failure)} | set(_told(failure))
        left = [Line(process, text) for _, process, lines in self._sentences for text in lines if text not in said]
        self._sentences.clear()
        return left

    def summary(self) -> list[str]:
        """Of each error that several workers ended with: a sentence that says so."""
        return [
            f"{', '.join(others)} ended with the same error as {first}"
            for first, *others in self._shown.values() if others
        ]  # fmt: skip


def _told(failure: str) -> list[str]:
    """The lines of ``worker1: a sentence``, with and without the name."""
    lines = failure.splitlines()
    return [*lines, *(line.partition(": ")[2] for line in lines[:1])]


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
