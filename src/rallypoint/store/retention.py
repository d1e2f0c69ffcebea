"""Which snapshots are newest and which are kept: pure decisions on names and manifests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from rallypoint.errors import ConfigError
from rallypoint.store.manifest import Manifest, age


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which snapshots are kept. A snapshot is kept if any of these rules asks for it; the newest usable one always is.

    Attributes:
        keep_last: keep this many of the newest.
        keep_every: keep those whose version is a multiple of this number; 0 for none.
        keep_best: keep the one with the best value of this metric; "" for none.
        best_is: whether the smallest or the largest value is the best.
    """

    keep_last: int = 3
    keep_every: int = 0
    keep_best: str = ""
    best_is: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.keep_last < 0 or self.keep_every < 0:
            raise ConfigError(
                f"keep_last={self.keep_last}, keep_every={self.keep_every}: neither can be negative; 0 keeps none"
            )


def newest_first(identifiers: Iterable[str], latest: str | None) -> list[str]:
    """Order snapshot names: the one that `latest` names, then those before it, then those after it.

    There are some after it when the job went on from an older snapshot. They belong to the abandoned course of the job.
    """
    bound = order(latest) if latest is not None else None
    return sorted(identifiers, key=lambda name: (bound is None or order(name) <= bound, order(name)), reverse=True)


def wanted(newest: Sequence[Manifest], retention: Retention) -> set[str]:
    """Return the names of the snapshots (given newest first) that the retention keeps."""
    names = {manifest.id for manifest in newest[: retention.keep_last]}
    if retention.keep_every:
        names |= {manifest.id for manifest in newest if manifest.version % retention.keep_every == 0}
    metric = retention.keep_best
    scored = [manifest for manifest in newest if metric in manifest.metrics]
    if metric and scored:
        best = min if retention.best_is == "min" else max
        names.add(best(scored, key=lambda manifest: manifest.metrics[metric]).id)
    return names


def order(identifier: str) -> tuple[int, int]:
    """Return (version, attempt) of a valid snapshot name."""
    found = age(identifier)
    assert found is not None, f"{identifier} is no snapshot's name"
    return found
