"""The page of a run that is under way: ``rallypoint watch`` in a process that the launcher starts."""

from __future__ import annotations

import importlib.util

from rallypoint.errors import UsageError, to_install
from rallypoint.launch.observing.companion import Companion

_NEEDS = ("starlette", "uvicorn")


class PageProcess(Companion):
    """The process that serves the page of the run in the folder `run` (`wanted`: False: nothing does)."""

    def __init__(self, run: str, *, wanted: bool) -> None:
        super().__init__("watch", run, what="the page cannot be served", wanted=wanted)


def missing() -> str:
    """Return which package that serves the page is not installed; "": none."""
    return next((name for name in _NEEDS if importlib.util.find_spec(name) is None), "")


def check_page() -> None:
    """UsageError if what serves the page is not installed."""
    if name := missing():
        raise UsageError(f"the page needs {name}: {to_install('watch')}")
