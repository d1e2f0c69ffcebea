"""Numbers with units, as people write them on a command line: 7B, 25Gbit, 80GB, 90d."""

from __future__ import annotations

import math
import re

from rallypoint.errors import ConfigError

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {**_PREFIXES, "b": 1e9}
_BINARY = {prefix: 1024.0**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?)\s*([a-z/]*)", re.ASCII)


def count_of(text: str, what: str) -> float:
    """``7e9``, ``7B`` or ``350M``: a number. ConfigError if it is none; `what` says where it stands."""
    number, unit = _parts(text, what, "7e9, 7B or 350M")
    if unit not in _COUNTS:
        raise ConfigError(f"{what} {text}: write a number, as 7e9, 7B or 350M")
    return number * _COUNTS[unit]


def rate_of(text: str, what: str) -> float:
    """``25Gbit`` or ``3.1GB/s``: bytes a second. A small b alone (``25Gb/s``) is refused: people mean either by it."""
    number, unit = _parts(text, what, "25Gbit or 3GB/s")
    bits = re.fullmatch(r"([kmgt]?)(?:bit|bps|bit/s)", unit)
    whole = re.fullmatch(r"([kmgt]?)b/s", unit)  # B/s, in small letters
    found = bits or whole
    if found is None or ((whole or unit.endswith("bps")) and ("B" in text) is not bool(whole)):
        raise ConfigError(f"{what} {text}: write a rate of one direction, as 25Gbit or 3GB/s")
    return number * _PREFIXES[found[1]] / (8 if bits else 1)


def bytes_of(text: str, what: str) -> float:
    """``80GB``, ``512MB`` or ``80GiB``: bytes."""
    number, unit = _parts(text, what, "80GB")
    found = re.fullmatch(r"([kmgt])(i?)b", unit)
    if found is None:
        raise ConfigError(f"{what} {text}: write a size, as 80GB")
    return number * (_BINARY if found[2] else _PREFIXES)[found[1]]


def seconds_of(text: str, what: str) -> float:
    """``90d``, ``5000h``, ``10min``, ``30s``, or a number of seconds."""
    number, unit = _parts(text, what, "90d, 5000h, 10min or 30s")
    if unit not in _TIMES:
        raise ConfigError(f"{what} {text}: write a time, as 90d, 5000h, 10min or 30s")
    return number * _TIMES[unit]


def _parts(text: str, what: str, example: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text.strip().lower())
    if found is None or not 0 < float(found[1]) < math.inf:
        raise ConfigError(f"{what} {text}: write a number above 0 with its unit, as {example}")
    return float(found[1]), found[2]
