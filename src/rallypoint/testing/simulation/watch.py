"""Every machine of a simulated cluster is checked after every call, and recorded if `RALLYPOINT_RECORD` is set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn, TypeVar

from rallypoint.observe.observed import RECORD, watched
from rallypoint.observe.recording import Recorder

Machine = TypeVar("Machine")


def watch(machine: Machine, name: str) -> Machine:
    """`machine`, whose every call ends with its `validate()`: what that says fails the run."""
    folder = os.environ.get(RECORD, "")
    return watched(machine, name, Recorder(Path(folder), name) if folder else None, _fail)


def _fail(sentence: str) -> NoReturn:
    raise AssertionError(sentence)
