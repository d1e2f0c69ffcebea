"""What a primary knows of its shard's backup."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Replication:
    """The backup of one shard, as the primary sees it.

    ```
              a view names          the state            an acknowledgement covers
              a new backup           is sent             all that was published
       none ---------------> needs sync -----> replicating ---------------> caught up
        ^                      ^   ^                |                          |
        |                      |   +-- link lost ---+                          |
        |                      +------ link lost (stays caught up) ------------+
        +-- a view takes the backup away, or this server is no primary any more (from every state)
    ```

    From the first acknowledgement on (`needs_ack`) nothing is published that the backup does not hold (I4). That stays
    so when the link breaks: nothing new is published meanwhile, so a backup that was caught up still is, and may be
    promoted, while `needs_sync` says that its new link begins with the whole state.
    """

    needs_sync: bool = False  # there is a backup that has not been sent the state over the link that stands now
    replicating: bool = False  # the backup is sent every update
    caught_up: bool = False  # the backup may be promoted
    needs_ack: bool = False  # nothing is published that the backup does not hold
    acked: int = -1  # the newest version that the backup holds, said over the link that stands now

    def assigned(self, *, backup: bool) -> None:
        """A view pairs the shard with a new backup, or (False) with none."""
        self.needs_sync = backup
        self.replicating = self.caught_up = self.needs_ack = False
        self.acked = -1

    def filled(self) -> None:
        """The state goes out now, and from here on every update."""
        self.needs_sync, self.replicating = False, True

    def link_lost(self) -> None:
        """The link broke, with what was under way: the backup must be sent the whole state again."""
        if self.replicating:
            self.needs_sync, self.replicating = True, False
            self.acked = -1

    def acknowledged(self, version: int) -> None:
        """The backup holds `version`."""
        self.acked = max(self.acked, version)
        self.needs_ack = True

    def durable(self, version: int) -> int:
        """The newest version that may be published while the primary is at `version`."""
        return min(version, self.acked) if self.needs_ack else version

    def catches_up(self, published: int) -> bool:
        """Does the backup hold all that was published, for the first time?"""
        if self.caught_up or self.acked < published:
            return False
        self.caught_up = True
        return True

    def validate(self, version: int, published: int, *, primary: bool) -> None:
        """AssertionError unless this is one of the states above."""
        assert primary or self == Replication(), f"a shard that is not primary here has a backup: {self}"
        assert not (self.needs_sync and self.replicating), f"{self}: a backup that is replicating needs no sync"
        assert self.needs_ack or not self.caught_up, f"{self}: caught up without an acknowledgement"
        assert self.replicating or self.acked < 0, f"{self}: an acknowledgement counts beyond its link"
        assert self.acked <= version, f"{self}: the backup acknowledged more than version {version}"
        lost = self.caught_up and self.acked >= 0 and published > self.acked
        assert not lost, f"publishes version {published} while its backup, caught up, is at version {self.acked}"
