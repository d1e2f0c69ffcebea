"""What a server's views say of its connections: what has to wait, what is stale, which other servers to connect to."""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.view import Member, View, ViewNumber


@dataclass(slots=True)
class Fence:
    """The newest view that is known: a frame of a newer one has to wait, a frame of an older generation is stale (I10).

    Example: at view 1.7 with generation 1.5, a frame of 1.8 waits, one of 1.6 counts, one of 1.4 is dropped.
    """

    number: ViewNumber = ViewNumber()
    generation: ViewNumber = ViewNumber()
    known: bool = False

    def adopt(self, view: View) -> bool:
        """Take a view; False if it is no newer than the one that is known."""
        if self.known and view.number <= self.number:
            return False
        self.generation = view.generation  # first: who sees the number, perhaps in another thread, sees this too
        self.number = view.number
        self.known = True
        return True

    def has_come(self, number: ViewNumber) -> bool:
        """Is the view of that number, or a newer one, known here?"""
        return self.known and number <= self.number

    def is_stale(self, number: ViewNumber) -> bool:
        """Was it said in a generation that is over?"""
        return number < self.generation


Key = tuple[str, int]  # id and incarnation: a server that comes back is somebody new


@dataclass(slots=True)
class PeerLinks:
    """Which other servers this one keeps a link to. `decides`: servers exchange measures of every step."""

    me: str
    decides: bool
    _open: dict[Key, Member] = field(default_factory=dict)

    def adopt(self, view: View) -> tuple[list[Key], list[Member]]:
        """The links to end, and the members to open one to. Links are needed for measures and for backups."""
        others = {(m.id, m.incarnation): m for m in view.servers if m.id != self.me}
        gone = [key for key in self._open if key not in others]
        for key in gone:
            del self._open[key]
        needed = self.decides or bool(view.backup)
        new = {key: member for key, member in others.items() if needed and key not in self._open}
        self._open |= new
        return gone, list(new.values())
