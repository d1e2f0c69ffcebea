"""What an exchange is for a script that has a loop of its own, and asks for sums from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rallypoint.worker.exchange.links import Links
from rallypoint.worker.exchange.locked import LockedShell


class OwnLoop:
    """The shell of an exchange under its lock, for a thread in place of the main one.

    Attributes:
        locked: the shell.
        busy: the script does what it likes, and needs nothing of the servers: this worker counts as active.
    """

    def __init__(self, locked: LockedShell, links: Links) -> None:
        self.locked, self._links = locked, links
        self.busy = False

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """In the body the script is `busy`."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    @property
    def finished(self) -> bool:
        """True when the job is over."""
        return self.locked.shell.finished

    def where(self, shards: Iterable[int]) -> str:
        """Name the servers that these shards come from, as a phrase."""
        return self._links.describe(shards, self.locked.shell.view.primary)
