"""The factors on the learning rate that operators have ordered, each from a version on: `core.view.Scale`.

They are a part of the job's record: views, the journal and snapshots have the list. So whoever applies an update, of
whichever version and however often, finds the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rallypoint.core.view import Scale

MOST_SCALES = 1000  # of one job: every view and every manifest has the list
LEAST, MOST = 1e-9, 1e9  # the product of all


def scale_at(scales: Iterable[Scale], version: int) -> float:
    """What the learning rate of the update of that version is multiplied by: the product, in the list's order."""
    return math.prod((scale.factor for scale in scales if scale.version <= version), start=1.0)


def with_scale(scales: Iterable[Scale], version: int, factor: float) -> tuple[Scale, ...]:
    """The list with one more factor, which counts from `version` on."""
    known = tuple(scales)
    number = 1 + max((scale.number for scale in known), default=0)
    return _sorted([*known, Scale(version, factor, number)])


def merged(known: Iterable[Scale], others: Iterable[Scale]) -> tuple[Scale, ...]:
    """All of both lists. Where they have another order of the same number, that of `others` counts."""
    return _sorted({scale.number: scale for scale in (*known, *others)}.values())


def refused(scales: Iterable[Scale], factor: float, first: int) -> str:
    """Why there cannot be this factor too, from `first` or a later version on, as a phrase; "" if there can.

    After a roll-back the list may have factors of later versions: with each of them the product stays in its bounds.
    """
    known = tuple(scales)
    if len(known) >= MOST_SCALES:
        return f"the learning rate was changed {MOST_SCALES} times already: more orders are not kept"
    for version in sorted({first, *(scale.version for scale in known if scale.version > first)}):
        whole = scale_at(known, version) * factor
        if not LEAST <= whole <= MOST:
            return f"with that it would be multiplied by {whole:g} in all, and must stay between {LEAST:g} and {MOST:g}"
    return ""


def _sorted(scales: Iterable[Scale]) -> tuple[Scale, ...]:
    return tuple(sorted(scales, key=lambda scale: (scale.version, scale.number)))
