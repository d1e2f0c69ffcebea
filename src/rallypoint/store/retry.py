"""Reading a store that fails for a moment: try again, say so, give up with what to do."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from rallypoint.errors import RallypointError, SnapshotError

log = logging.getLogger("rallypoint")

DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # before each further try
READ_AGAIN_S = (0.05, 0.2, 1.0)  # before each further try after the disk's read error
_T = TypeVar("_T")


class StoreSilent(SnapshotError):
    """The filesystem of the snapshots did not answer; it may the next time."""


def patiently(
    call: Callable[[], _T], say: Callable[[str], None], doing: str, pause: Callable[[float], object] | None = None
) -> _T:
    """`call()`, again after a transient error: `len(DELAYS_S)` times, after longer and longer pauses.

    `say` gets a sentence for each error, `pause` (default: `time.sleep`) the seconds to wait before the next try; what
    `pause` raises ends the tries. What is damaged or of another format is raised at once, and so is the last
    error, as a SnapshotError with what to do.
    """
    for delay in DELAYS_S:
        try:
            return call()
        except Exception as error:  # a remote filesystem raises anything
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
    """`call()`, again after a read error of the disk (EIO): `len(READ_AGAIN_S)` times, after short pauses.

    Raises the last OSError, and every other error at once. What was read and has the wrong checksum is damage: reading
    it again would not help.
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
