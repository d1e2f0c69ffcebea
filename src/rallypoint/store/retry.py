"""Repeats reads of a store that fails temporarily, reports each error, and finally raises one that says what to do."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from rallypoint.errors import RallypointError, SnapshotError

log = logging.getLogger("rallypoint")

DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further try
READ_AGAIN_S = (0.05, 0.2, 1.0)  # seconds before each further try after a read error of the disk
_T = TypeVar("_T")


class StoreSilent(SnapshotError):
    """The filesystem of the snapshots did not answer. It may answer the next time."""


def patiently(
    call: Callable[[], _T], say: Callable[[str], None], doing: str, pause: Callable[[float], object] | None = None
) -> _T:
    """Return `call()`, repeated after a transient error up to `len(DELAYS_S)` times, with growing pauses.

    `say` gets a sentence for each error. `pause` (default: `time.sleep`) gets the seconds to wait before the next try;
    an exception from it ends the tries. Damage and a wrong format are raised at once. The last transient error is
    raised as a SnapshotError that says what to do.
    """
    for delay in DELAYS_S:
        try:
            return call()
        except Exception as error:  # remote filesystems raise exceptions of any type
            if not _is_transient(error):
                raise
            say(f"{doing}: {_sentence(error)}; trying again in {delay:g} s")
        (pause or time.sleep)(delay)
    try:
        return call()
    except Exception as error:
        if not _is_transient(error):
            raise
        raise SnapshotError(
            f"{_sentence(error)} ({len(DELAYS_S) + 1} tries, {doing}): when it answers again, go on with "
            "`rallypoint resume`"
        ) from error


def read_again(call: Callable[[], _T]) -> _T:
    """Return `call()`, repeated after a read error of the disk (EIO): `len(READ_AGAIN_S)` times, with short pauses.

    Raises the last OSError, and every other error at once. A wrong checksum is damage, which a second read would not
    repair.
    """
    for pause in READ_AGAIN_S:
        try:
            return call()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            log.warning("a file of a snapshot cannot be read: %s; trying again in %g s", error, pause)
        time.sleep(pause)
    return call()


def _is_transient(error: Exception) -> bool:
    return isinstance(error, StoreSilent) or not isinstance(error, RallypointError)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, (RallypointError, OSError)) else f"{type(error).__name__}: {error}"
