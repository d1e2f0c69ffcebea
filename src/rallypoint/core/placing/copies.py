"""Who holds one shard, and who is to: what the next view says of its primary, its backup and a third server.

With `replication=2` a shard whose backup has caught up never gives that backup up for a server that has still to be
filled. The new server is filled beside it (`View.incoming`), and takes its place when it has caught up too:

    a moves to c      a, backup b     a, backup b, c is filled     c, backup b (or a, on another host than c)
    a leaves          a, backup b     b, backup a                  b, backup a, c is filled     b, backup c
    b leaves          a, backup b     a, backup b, c is filled     a, backup c
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rallypoint.core.view import Member


@dataclass(slots=True)
class Copies:
    """The servers with one shard; "": there is none.

    Attributes:
        home: its primary.
        backup: its backup.
        incoming: the server that is filled beside the backup.
        whole: the backup holds all that was published.
        arrived: so does `incoming`.
    """

    home: str
    backup: str = ""
    incoming: str = ""
    whole: bool = False
    arrived: bool = False

    def succeed(self) -> None:
        """The third server is the backup if there is no other."""
        if not self.backup:
            self.backup, self.whole = self.incoming, self.arrived
            self.incoming, self.arrived = "", False

    def may_move(self, home: str) -> bool:
        """True if that server has all that was published."""
        return (home == self.backup and self.whole) or (home == self.incoming and self.arrived)

    def move(self, home: str, servers: Mapping[str, Member], staying: Mapping[str, Member], *, leaving: bool) -> None:
        """Make `home` the primary, and the backup one of those who hold the shard too: on another host than `home` if
        there is one, and a server that is to leave only if there is no other, and with `leaving`."""
        others = [self.home, *([self.backup] if self.whole else []), *([self.incoming] if self.arrived else [])]
        able = [one for one in others if one != home and (leaving or one in staying)]
        self.backup = min(able, key=lambda one: (one not in staying, _beside(servers[one], servers[home])), default="")
        self.home, self.incoming, self.whole, self.arrived = home, "", bool(self.backup), False

    def fill(self, server: str, *, moves: bool) -> None:
        """`server` is to have the shard: as its backup, or, with `moves`, as its primary once it has caught up."""
        if server == self.backup:
            self.incoming = ""
        elif not self.whole or (server == self.incoming and self.arrived and not moves):
            self.backup, self.incoming = server, ""
        else:
            self.incoming = server


def _beside(one: Member, other: Member) -> int:
    """2 if they are on the same host, 1 if they are near the same place, else 0."""
    return 2 if one.host == other.host else int(bool(one.near) and one.near == other.near)
