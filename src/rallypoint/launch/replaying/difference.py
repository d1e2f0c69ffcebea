"""``rallypoint diff``: which parameter of two runs differs first, and at which step, by their recorded digests."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rallypoint.coordinator.journal import JOURNAL, kept_state
from rallypoint.coordinator.recording.fingerprints import KeptFingerprints
from rallypoint.core.layout import Layout, first_difference
from rallypoint.errors import UsageError
from rallypoint.launch.replaying import comparing
from rallypoint.observe.lines import printable


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
        raise UsageError(f"{one} and {other} have different models: {_shown(str(first_difference(theirs, layout)))}")
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
            compared = comparing.version(layout, ours, others, number)
            if compared.differ:
                steps = range(max(equal, 0), number)
                phrase = comparing.first_difference(layout, ours, others, steps)
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
