"""Texts without secrets: of reports, of trackers, and of the lines that a run keeps of what its processes print."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from rallypoint.launch.folder import CONSOLE, CONSOLE_BEFORE

MOST_BYTES = 1 << 20  # of kept lines: then the file becomes the one before, and that one goes
_LONGEST = 2000  # characters of a line that is kept
_MOST_WAITING = 10_000  # lines that wait for a disk that hangs
_END_S = 1.0
HIDDEN = "***"
LONGEST_LINE = 4000  # characters
_LEAST = 6  # a shorter value is in too many words that are no secret
_SECRET_NAME = re.compile(
    r"token(?!s)|secret|passw|passphrase|api_?key|access_?key|private_?key|_key$|credential|auth", re.I
)
_NAME = (
    r"(?:token(?!s)|secret|passw(?:or)?d|passphrase|(?:api|access|private)[_-]?key|credentials?|authorization)"
    r"[\w-]{0,40}"
)
_ANY_NAME = re.compile(_NAME, re.I)
_QUOTED = re.compile(rf"({_NAME}\\?[\"']?\s{{0,4}}[=:]\s{{0,4}}\\?([\"']))(?:(?!\\?\2).)+", re.I)
_NAMED = re.compile(
    rf"({_NAME}\\?[\"']?\s{{0,4}}[=:]\s{{0,4}}\\?[\"']?(?:(?:bearer|basic)\s{{1,4}})?)([^\s\"',;&(){{}}\[\]\\]+)",
    re.I,
)
_OPTION = re.compile(rf"((?<!\S)--?[\w-]{{0,40}}{_NAME}\s{{1,4}})([^\s\"'-][^\s\"',;]*)", re.I)
_BEARER = re.compile(r"\b(bearer\s{1,4})([\w.~+/=-]{8,})", re.I)
_LOGIN = re.compile(r"([a-z][a-z0-9+.-]{0,20}://)(?:[^/\s@\"']{1,300}|[^/\s@:\"']{1,300}:[^\s@\"']{1,300})@", re.I)
_QUERY = re.compile(r"([a-z][a-z0-9+.-]{0,20}://[^\s\"'?]{1,1000}\?)[^\s\"']+", re.I)
_KNOWN_FORMS = re.compile(
    r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|xox[abpr]-|sk-|rk_live_|sk_live_|AKIA|ASIA|AIza|eyJ)[\w.-]{8,}"
)
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z0-9 ]{1,40}-----.*?(?:-----END [A-Z0-9 ]{1,40}-----|\Z)", re.S)
_HEX = re.compile(r"(?<!sha256 )(?<![\w.])[0-9a-fA-F]{32,}(?![\w.])")
_RANDOM = re.compile(r"(?<![\w/.-])[\w-]{32,}={0,2}(?![\w/.-])")


def secret_name(name: str) -> bool:
    """True if a variable or an option of this name may hold a secret: ``WANDB_API_KEY``, ``--token``."""
    return _SECRET_NAME.search(name.replace("-", "_")) is not None


def secrets_among(environment: Mapping[str, str]) -> list[str]:
    """The values of environment variables that may be secrets, by their names."""
    return [value for name, value in environment.items() if secret_name(name)]


def secrets_in(arguments: Sequence[str]) -> list[str]:
    """The values of options that may be secrets, by their names: of ``--token=X``, and of ``--token X``."""
    found = []
    for option, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = option.partition("=")
        if name.startswith("-") and secret_name(name):
            found.append(value if equals else following)
    return found


class Redaction:
    """Makes texts fit to be shown to others: ``redact(text)``.

    `known` are secrets by their value: they are replaced wherever they stand. Beside them goes what looks like one: the
    value after a name such as ``token=``, logins and queries in URLs, private keys, tokens of well-known forms, long
    random words. Control characters are escaped, except newlines, and long lines are cut.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        parts = {part for value in known for part in (value, value.strip(), *value.splitlines()) if len(part) >= _LEAST}
        values = parts | {json.dumps(part, ensure_ascii=False)[1:-1] for part in parts}  # as it stands in the log
        longest_first = sorted(values, key=len, reverse=True)  # one may be a part of another
        self._known = re.compile("|".join(map(re.escape, longest_first))) if values else None

    def __call__(self, text: str) -> str:
        """The text without secrets and without escapes."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        text = _KEY_BLOCK.sub(HIDDEN, text)
        return "\n".join(self._line(line) for line in text.split("\n"))

    def _line(self, line: str) -> str:
        line = line.rstrip("\r").expandtabs()
        if len(line) > LONGEST_LINE:
            line = f"{line[:LONGEST_LINE]}... ({len(line)} characters)"
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        if _ANY_NAME.search(line) is not None:
            for named in (_QUOTED, _NAMED, _OPTION):
                line = named.sub(rf"\1{HIDDEN}", line)
        line = _BEARER.sub(rf"\1{HIDDEN}", line)
        line = _QUERY.sub(rf"\1{HIDDEN}", _LOGIN.sub(rf"\1{HIDDEN}@", line))
        line = _HEX.sub(HIDDEN, _KNOWN_FORMS.sub(HIDDEN, line))
        return _RANDOM.sub(lambda found: HIDDEN if _looks_random(found[0]) else found[0], line)


def _looks_random(word: str) -> bool:
    """True for a long word of mixed cases with several digits: no name that a person has given looks so."""
    digits = sum(c.isdigit() for c in word)
    return digits >= 4 and any(c.isupper() for c in word) and any(c.islower() for c in word)


class KeptLines:
    """Appends lines to ``console.log`` in `folder`, with the time of day; only its owner may read it.

    Secrets among `known` are not written, nor what looks like one: see `Redaction`. A thread of its own writes: a disk
    that hangs delays nobody. What cannot be written is dropped.
    """

    def __init__(self, folder: Path, known: Iterable[str] = (), most: int = MOST_BYTES) -> None:
        self._folder, self._most, self._redact = folder, most, Redaction(known)
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="console log", daemon=True)

    def add(self, process: str, line: str) -> None:
        """Keep a line that a process has printed. Only one thread may call it."""
        if self._thread.ident is None:
            self._thread.start()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(f"{time.strftime('%H:%M:%S')} {process[:100]} | {line[: 2 * _LONGEST]}")

    def close(self) -> None:
        """Write what waits. May be called more than once."""
        if self._thread.ident is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(None)
            self._thread.join(_END_S)

    def _run(self) -> None:
        file: BinaryIO | None = None
        while (line := self._lines.get()) is not None:
            try:
                if file is None:
                    file = _opened(self._folder / CONSOLE)
                shown = self._redact(line)[:_LONGEST]  # cut before, a secret's first half would stand at the end
                file.write(f"{shown}\n".encode(errors="replace"))
                if self._lines.empty():
                    file.flush()
                if file.tell() > self._most:
                    file.close()
                    file = None
                    (self._folder / CONSOLE).replace(self._folder / CONSOLE_BEFORE)
            except OSError:  # a full disk, a folder that is gone
                file = None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _opened(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "ab")
