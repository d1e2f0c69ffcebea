"""Modes as data: one description per mode, and one table of which features each mode supports."""

from __future__ import annotations

from rallypoint.core.modes.conflicts import ALONE, CONFLICTS, Conflict, StandsAlone
from rallypoint.core.modes.table import TABLE, YES, No, Only, refusal, why_not
from rallypoint.core.modes.traits import (
    Bytes,
    Clock,
    Contribution,
    Feature,
    ModeName,
    ModeTraits,
    Pace,
    StateHolder,
    describe,
)

__all__ = [
    "ALONE",
    "CONFLICTS",
    "TABLE",
    "YES",
    "Bytes",
    "Clock",
    "Conflict",
    "Contribution",
    "Feature",
    "ModeName",
    "ModeTraits",
    "No",
    "Only",
    "Pace",
    "StandsAlone",
    "StateHolder",
    "describe",
    "refusal",
    "why_not",
]
