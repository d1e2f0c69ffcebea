"""Compares digests: of a replay with those of its run, and of two runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rallypoint.coordinator.recording.fingerprints import KeptFingerprints
from rallypoint.core.layout import Layout
from rallypoint.core.sums.digests import DIGEST_BYTES, dense_shards, pieces_of
from rallypoint.errors import DataError

_UNKNOWN = bytes(DIGEST_BYTES)


class Compared(msgspec.Struct, frozen=True):
    """A replica's contribution: what its shards have, then and now.

    Attributes:
        worker: who computed it then; "" if the run has recorded nothing of it.
        digests: those of the replay, in hexadecimal, by shard.
        equal, unknown: how many shards have the recorded digest, and of how many none is recorded.
        differ: the shards that have another one, each with its tensors.
    """

    worker: str
    digests: dict[int, str]
    equal: int
    unknown: int
    differ: dict[int, tuple[str, ...]]


class Version(msgspec.Struct, frozen=True):
    """A version, then and now: how many pieces of tensors are equal, and the names of the tensors that are not."""

    version: int
    equal: int
    differ: tuple[str, ...]


def contribution(layout: Layout, then: KeptFingerprints, now: KeptFingerprints, step: int, replica: int) -> Compared:
    """Compare one contribution."""
    shards, names = dense_shards(layout), pieces_of(layout)
    recorded, found = then.contributions(step).get(replica), now.contributions(step).get(replica)
    ours = cut(found.digests, len(shards)) if found is not None else [_UNKNOWN] * len(shards)
    theirs = cut(recorded.digests, len(shards)) if recorded is not None else [_UNKNOWN] * len(shards)
    known = [(s, a, b) for s, a, b in zip(shards, ours, theirs, strict=True) if _UNKNOWN not in (a, b)]
    differ = {shard: tuple(piece.name for piece in names[shard]) for shard, a, b in known if a != b}
    digests = {shard: digest.hex() for shard, digest in zip(shards, ours, strict=True)}
    worker = "" if recorded is None else recorded.worker
    return Compared(worker, digests, len(known) - len(differ), len(shards) - len(known), differ)


def version(layout: Layout, then: KeptFingerprints, now: KeptFingerprints, number: int) -> Version:
    """Compare one version."""
    equal, differ = 0, dict[str, None]()
    theirs, ours = then.version(number), now.version(number)
    for shard, pieces in enumerate(pieces_of(layout)):
        if shard in theirs and shard in ours:
            for piece, a, b in zip(pieces, *(cut(of[shard], len(pieces)) for of in (ours, theirs)), strict=True):
                equal += a == b
                if a != b:
                    differ[piece.name] = None
    return Version(number, equal, tuple(differ))


def first_difference(layout: Layout, one: KeptFingerprints, other: KeptFingerprints, steps: Sequence[int]) -> str:
    """Return the first of these steps at which a replica contributed something else, as a phrase; "": at none."""
    for step in steps:
        ours, theirs = one.contributions(step), other.contributions(step)
        for replica in sorted(ours.keys() & theirs.keys()):
            compared = contribution(layout, one, other, step, replica)
            if compared.differ:
                names = ", ".join(next(iter(compared.differ.values())))
                return f"replica {replica} at step {step} (then on {compared.worker}), first in {names}"
    return ""


def cut(digests: bytes, count: int) -> list[bytes]:
    """Return the single digests. Raises DataError if there are not so many."""
    if len(digests) != count * DIGEST_BYTES:
        raise DataError(f"{len(digests)} bytes of digests are recorded where the model has {count * DIGEST_BYTES}")
    return [digests[n : n + DIGEST_BYTES] for n in range(0, len(digests), DIGEST_BYTES)]
