"""The sentences that refuse the features that a job's mode does not support."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from rallypoint.core.modes.conflicts import CONFLICTS
from rallypoint.core.modes.features import UNASKED, Feature
from rallypoint.core.modes.table import TABLE, Cell, No, Only
from rallypoint.core.modes.traits import ModeName, name_of
from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Mode, Sync


def refusal(mode: ModeName, features: Set[Feature]) -> str:
    """The sentence why a job cannot use these `features` in this mode; "" if it can."""
    return next(_refusals(mode, frozenset(features) - UNASKED), "")


# Settings that are fields of one mode's class only.
_FIELDS = {
    "keep_inner": Feature.FRESH_INNER, "fragments": Feature.FRAGMENTS, "delay": Feature.DELAY, "fold": Feature.FOLD,
    "delay_compensation": Feature.COMPENSATION,
}  # fmt: skip
_TYPES: dict[str, Mode] = {
    "sync": Sync(), "bounded-staleness": BoundedStaleness(1), "async": Async(), "all-reduce": AllReduce(),
    "local-steps": LocalSteps(1),
}  # fmt: skip


def of_another_mode(sync: Mapping[str, Any]) -> str:
    """The sentence that refuses a field of `sync` (as plain data) that only another mode has; "" if there is none."""
    mode, over = _TYPES.get(sync.get("type", "sync")), sync.get("over")
    if mode is None:
        return ""
    strange = _strange(mode, sync)
    if isinstance(over, Mapping) and (policy := _TYPES.get(over.get("type", "sync"))) is not None:
        strange |= _strange(policy, over)
    return refusal(name_of(mode), strange)


def _strange(mode: Mode, fields: Iterable[str]) -> set[Feature]:
    return {_FIELDS[field] for field in fields if field in _FIELDS and field not in type(mode).__struct_fields__}


def why_not(mode: ModeName, feature: Feature, features: Set[Feature] = frozenset()) -> str:
    """The reason, without the sentence, why `feature` does not work in this mode with `features`; "" if it does."""
    together = frozenset({*features, feature})
    return next((why for pair, why in _unsupported(mode, together) if feature in pair), "")


def _refusals(mode: ModeName, features: frozenset[Feature]) -> Iterator[str]:
    for pair, why in _unsupported(mode, features):
        where = f"under rp.{mode.value}" if len(pair) == 1 else f"together with {pair[1].value}"
        yield f"{pair[0].value} is not supported {where}: {why}"


def _unsupported(mode: ModeName, features: frozenset[Feature]) -> Iterator[tuple[tuple[Feature, ...], str]]:
    """Each feature that is not supported, or pair that conflicts, and why."""
    for feature in Feature:
        if feature in features and (why := _why_not(TABLE[feature][mode], features)):
            yield (feature,), why
    for conflict in CONFLICTS:
        if mode in conflict.modes and {conflict.first, conflict.second} <= features:
            yield (conflict.first, conflict.second), conflict.why


def _why_not(cell: Cell, features: frozenset[Feature]) -> str:
    match cell:
        case No(why=why):
            return why
        case Only(beside=beside, why=why) if beside not in features:
            return why
        case _:
            return ""
