"""Asks a store again where it fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from rallypoint.errors import DataError

log = logging.getLogger("rallypoint")

PAUSES_S = (0.1, 0.4, 1.6, 6.4)  # before each further try
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError)

_BUSY = 429  # the status of HTTP for it; from 500 on a server has failed

_T = TypeVar("_T")


def patiently(call: Callable[[], _T], what: str) -> _T:
    """Return `call()`, repeated with growing pauses where a store fails; not where a file is missing or forbidden.

    Raises DataError, which names `what`, after as many pauses as there are.
    """
    for pause in PAUSES_S:
        try:
            return call()
        except Exception as error:  # stores raise exceptions of any type
            if _lasts(error):
                raise DataError(f"{what} cannot be read: {error or type(error).__name__}") from error
            log.info("%s: %s: %s; trying again in %g s", what, type(error).__name__, error, pause)
        time.sleep(pause)
    try:
        return call()
    except Exception as error:
        raise DataError(
            f"{what} cannot be read: {type(error).__name__}: {error} ({len(PAUSES_S) + 1} tries)"
        ) from error


def _lasts(error: Exception) -> bool:
    """True if a second try cannot help. fsspec says of any failure of an HTTP server that the file is not there: its
    cause tells more."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and type(cause).__module__.partition(".")[0] in ("aiohttp", "asyncio"):
        status = getattr(cause, "status", None)
        return status is not None and status < 500 and status != _BUSY
    return isinstance(error, LASTING) and not isinstance(cause, TimeoutError | ConnectionError)
