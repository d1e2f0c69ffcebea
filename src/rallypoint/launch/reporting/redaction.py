"""Takes secrets and terminal escapes out of texts that leave the run's folder. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

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
_HEX = re.compile(r"(?<![\w.])[0-9a-fA-F]{32,}(?![\w.])")
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
