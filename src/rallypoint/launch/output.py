"""Which lines of the processes are shown: all, but an error that several workers end with is shown only once.

Pure: lines and endings come in, lines to show go out. Times are in seconds, of any clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rallypoint.errors import StartAgain
from rallypoint.launch.engines.cluster import Exit

_TRACEBACK = "Traceback (most recent call last):"
_SYNTAX = '  File "'  # the first line of a SyntaxError's report, which has no traceback header
_SENTENCE = "error: "  # how our own errors begin
_HELD_S = 3.0  # seconds: a process that lives on for so long after a traceback has only logged it
_MOST_HELD = 10_000  # lines: more than the traceback of a recursion has
_LAST_WORD_S = 1.0  # seconds in which the coordinator may say that this error has failed the run
_QUIET = ("KeyboardInterrupt", "SystemExit")


@dataclass(frozen=True, slots=True)
class Line:
    """A line to show, and the process that printed it."""

    process: str
    text: str


@dataclass(slots=True)
class _Held:
    """The lines of a process, from the beginning of an error on."""

    began: float
    lines: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """The lines of all processes. An error is held back until its process ends or continues.

    Two processes ended alike if their errors have one type and come from the same lines of code. One of our own errors
    (``error: ...``) is held back a little longer, because the final line ``failed: ...`` may repeat it.
    """

    ending: bool = False  # we are ending the processes: do not show what they print about that
    _held: dict[str, _Held] = field(default_factory=dict)
    _shown: dict[str, list[str]] = field(default_factory=dict)  # kind of error -> the processes that ended with it
    _last: dict[str, str] = field(default_factory=dict)  # process -> the sentence of ours that it ended with
    # (when it ended, the process, its lines)
    _sentences: list[tuple[float, str, list[str]]] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)  # the processes that want another one in their place

    def line(self, process: str, text: str, now: float) -> list[Line]:
        """`process` has printed a line. Returns the lines to show now."""
        if text.endswith(StartAgain.LINE):  # a progress bar may stand before it, without an end of its line
            self._asked.add(process)
            text = text.removesuffix(StartAgain.LINE).rstrip()
            return [Line(process, text)] if text and not self.ending else []
        held = self._held.get(process)
        if held is None and (text == _TRACEBACK or text.startswith((_SENTENCE, _SYNTAX))):
            held = self._held[process] = _Held(now)
        if held is None:
            return [] if self.ending else [Line(process, text)]
        held.lines.append(text)
        if len(held.lines) < _MOST_HELD:
            return []
        del self._held[process]  # no error has so many: it goes on printing
        return [] if self.ending else [Line(process, line) for line in held.lines]

    def ended(self, process: str, now: float, *, well: bool = False) -> list[Line]:
        """`process` has ended, with status 0 if `well`. Returns which of its held lines to show now."""
        held = self._held.pop(process, None)
        if held is None:
            return []
        if well and not self.ending:  # it only printed something that looks like an error, such as "error: 0.25"
            return [Line(process, text) for text in held.lines]
        kind = _kind(held.lines)
        if kind in _QUIET or (self.ending and kind not in self._shown):
            return []
        if kind.startswith(_SENTENCE):
            self._last[process] = held.lines[0].removeprefix(_SENTENCE)
        alike = self._shown.setdefault(kind, [])
        alike.append(process)
        if len(alike) > 1:
            return []
        if kind.startswith(_SENTENCE):
            self._sentences.append((now, process, held.lines))
            return []
        return [Line(process, text) for text in held.lines]

    def exit_of(self, process: str, how: Exit) -> Exit:
        """How `process` has ended, with what it has said about that."""
        return how.having_asked(process in self._asked)

    def due(self, now: float) -> list[Line]:
        """Return the held lines of processes that continued after an error, and the errors that did not end the run."""
        late = [process for process, held in self._held.items() if now - held.began > _HELD_S]
        shown = [Line(process, text) for process in late for text in self._held.pop(process).lines]
        while self._sentences and now - self._sentences[0][0] > _LAST_WORD_S:
            _, process, lines = self._sentences.pop(0)
            shown += [Line(process, text) for text in lines]
        return shown

    def sentence_of(self, process: str) -> str:
        """Return the error message of ours that `process` ended with; "" if it ended in another way."""
        return self._last.get(process, "")

    def rest(self, failure: str) -> list[Line]:
        """At the end of the run: return the held error messages, without those that `failure` repeats."""
        said = {_alike(line) for line in _told(failure)}
        left = [
            Line(process, text) for _, process, lines in self._sentences for text in lines
            if _alike(text.removeprefix(_SENTENCE)) not in said
        ]  # fmt: skip
        self._sentences.clear()
        return left

    def summary(self) -> list[str]:
        """Return a sentence for each error that several workers ended with."""
        return [
            f"{', '.join(others)} ended with the same error as {first}"
            for first, *others in self._shown.values() if others
        ]  # fmt: skip


def _told(failure: str) -> list[str]:
    """Return the lines of ``worker1: a sentence``, with and without the name."""
    lines = failure.splitlines()
    return [*lines, *(line.partition(": ")[2] for line in lines[:1])]


def _alike(sentence: str) -> str:
    """Return the sentence without its numbers: two workers say the same thing of replica 0 and of replica 1."""
    return re.sub(r"\d+", "#", sentence)


def _kind(lines: list[str]) -> str:
    """Return the places in the code and the type of the error; for our own errors the message without its numbers."""
    if lines[0].startswith(_SENTENCE):
        return _alike(lines[0])
    last = next((n for n in range(len(lines) - 1, -1, -1) if lines[n].startswith("  ")), -1)
    error = next((line for line in lines[last + 1 :] if line), "")
    name = error.partition(":")[0]
    if name in _QUIET:
        return name
    return "\n".join([*(line for line in lines if line.startswith(_SYNTAX)), name])
