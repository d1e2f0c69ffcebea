"""What a server reads from its views: which frames wait, which are stale, which other servers to connect to."""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.view import Member, View, ViewNumber

_NONE = ViewNumber()


@dataclass(slots=True)
class Fence:
    """The number of the newest known view, which decides about frames (I10).

    A frame of a newer view waits for that view. A frame of an older generation is stale and is dropped.

    Example: at view 1.7 with generation 1.5, a frame of 1.8 waits, one of 1.6 counts, one of 1.4 is dropped.
    """

    number: ViewNumber = _NONE
    generation: ViewNumber = _NONE
    known: bool = False

    def adopt(self, view: View) -> bool:
        """Adopt a view. Returns False if it is not newer than the known one."""
        if self.known and view.number <= self.number:
            return False
        self.generation = view.generation  # before `number`: another thread that reads the new number reads this too
        self.number = view.number
        self.known = True
        return True

    def has_come(self, number: ViewNumber) -> bool:
        """Is the view of that number, or a newer one, known here?"""
        return self.known and number <= self.number

    def is_stale(self, number: ViewNumber) -> bool:
        """Does this view number belong to an older generation?"""
        return number < self.generation


Key = tuple[str, int]  # id and incarnation: a server that joins again is a new peer


@dataclass(slots=True)
class PeerLinks:
    """The other servers that this server keeps a link to. `decides`: servers exchange measures at every step."""

    me: str
    decides: bool
    _open: dict[Key, Member] = field(default_factory=dict)

    def adopt(self, view: View) -> tuple[list[Key], list[Member]]:
        """Returns the links to close and the members to connect to. Links are needed for measures and for backups."""
        others = {(m.id, m.incarnation): m for m in view.servers if m.id != self.me}
        gone = [key for key in self._open if key not in others]
        for key in gone:
            del self._open[key]
        needed = self.decides or bool(view.backup)
        new = {key: member for key, member in others.items() if needed and key not in self._open}
        self._open |= new
        return gone, list(new.values())
