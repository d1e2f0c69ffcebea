"""Compares digests: of a replay with those of its run, and of two runs (``rallypoint replay RUN RUN``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rallypoint.coordinator.fingerprints import KeptFingerprints
from rallypoint.coordinator.journal import JOURNAL, kept_state
from rallypoint.core import layout as layouts
from rallypoint.core.layout import Layout
from rallypoint.core.sums import DIGEST_BYTES, dense_shards, pieces_of
from rallypoint.core.typed import printable
from rallypoint.errors import DataError, UsageError

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


class Difference(msgspec.Struct, frozen=True):
    """What two runs have in common.

    Attributes:
        versions: how many versions both have recorded.
        equal: the last version up to which all are equal; -1: none.
        version: the first that differs; -1: none does.
        parameters: the tensors that differ in it.
        contribution: the first replica's contribution that differs at or before its step, as a phrase; "": none does.
    """

    versions: int
    equal: int
    version: int
    parameters: tuple[str, ...]
    contribution: str


def diff(one: Path, other: Path, step: int = -1) -> Difference:
    """Compare the digests of two runs, whose folders are only read; with `step` those of the version after that step.

    Raises UsageError when they cannot be compared: another model, or nothing that both have recorded.
    """
    layout, theirs = _layout(one), _layout(other)
    if layout.fingerprint != theirs.fingerprint:
        raise UsageError(
            f"{one} and {other} have different models: {_shown(str(layouts.first_difference(theirs, layout)))}"
        )
    with KeptFingerprints(one) as ours, KeptFingerprints(other) as others:
        versions = sorted({*ours.versions()} & {*others.versions()})
        if step >= 0:
            versions = [version for version in versions if version == step + 1]
        if not versions:
            what = "have no version in common of which both recorded digests"
            what = f"have not both recorded digests of version {step + 1}" if step >= 0 else what
            raise UsageError(
                f"{one} and {other} {what}: give both runs the same fingerprints=N (versions N, 2N, ... are recorded)"
            )
        equal = -1
        for number in versions:
            compared = version(layout, ours, others, number)
            if compared.differ:
                steps = range(max(equal, 0), number)
                phrase = first_difference(layout, ours, others, steps)
                return Difference(len(versions), equal, number, compared.differ, phrase)
            equal = number
        return Difference(len(versions), equal, -1, (), "")


def words_of(found: Difference) -> str:
    """Return what was found, as a sentence that is `printable`: names of parameters may be somebody else's."""
    if found.version < 0:
        return f"equal: all {found.versions} versions that both have recorded, up to version {found.equal}"
    before = f"equal up to version {found.equal}; " if found.equal >= 0 else ""
    names = ", ".join(found.parameters[:8]) + (f" and {len(found.parameters) - 8} more" if found.parameters[8:] else "")
    first = f"; the first contribution that differs: {found.contribution}" if found.contribution else ""
    return _shown(f"{before}version {found.version} (after step {found.version - 1}) differs in {names}{first}")


def _shown(text: str) -> str:
    return printable(text, len(text))


def _layout(run: Path) -> Layout:
    if not (run / JOURNAL).exists():
        raise UsageError(f"{run} is not the folder of a run: there is no {JOURNAL} in it")
    state = kept_state(run)
    if state is None or state.record is None:
        raise UsageError(f"the job in {run} has not begun: nothing is recorded")
    return state.record.layout
