"""What a primary knows about its shard's backup, and how the backup proves what it acknowledges."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


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
        +-- a view takes the backup away, or this server is no longer primary (from every state)
    ```

    From the first acknowledgement on (`needs_ack`), the primary publishes only versions that the backup has (I4). While
    the link is broken it publishes nothing new. So a backup that was caught up stays caught up and may be promoted;
    `needs_sync` then says that the whole state must be sent first on the new link.
    """

    needs_sync: bool = False  # there is a backup, and the state has not been sent over its current link
    replicating: bool = False  # the primary sends every update to the backup
    caught_up: bool = False  # the backup may be promoted
    needs_ack: bool = False  # publish only versions that the backup has
    acked: int = -1  # the newest version acknowledged over the current link

    def assigned(self, *, backup: bool) -> None:
        """A view pairs the shard with a new backup, or (False) with none."""
        self.needs_sync = backup
        self.replicating = self.caught_up = self.needs_ack = False
        self.acked = -1

    def filled(self) -> None:
        """The caller sends the whole state now, and every update from now on."""
        self.needs_sync, self.replicating = False, True

    def link_lost(self) -> None:
        """The link broke, and everything in transit is lost: the whole state must be sent again."""
        if self.replicating:
            self.needs_sync, self.replicating = True, False
            self.acked = -1

    def acknowledged(self, version: int) -> None:
        """The backup acknowledged `version`."""
        self.acked = max(self.acked, version)
        self.needs_ack = True

    @property
    def limits(self) -> bool:
        """True if the backup may be promoted, or will be as soon as the state that is on its way has come."""
        return self.replicating or self.needs_ack

    def durable(self, version: int) -> int:
        """The newest version that may be published while the primary is at `version`."""
        return min(version, self.acked) if self.needs_ack else version

    def catches_up(self, published: int) -> bool:
        """Returns True once: when the backup has all published versions for the first time."""
        if self.caught_up or self.acked < published:
            return False
        self.caught_up = True
        return True

    def validate(self, version: int, published: int, *, primary: bool) -> None:
        """Raise AssertionError unless this is one of the states above."""
        assert primary or self == Replication(), f"a shard that is not primary here has a backup: {self}"
        assert not (self.needs_sync and self.replicating), f"{self}: a backup that is replicating needs no sync"
        assert self.needs_ack or not self.caught_up, f"{self}: caught up without an acknowledgement"
        assert self.replicating or self.acked < 0, f"{self}: an acknowledgement counts beyond its link"
        assert self.acked <= version, f"{self}: the backup acknowledged more than version {version}"
        lost = self.caught_up and self.acked >= 0 and published > self.acked
        assert not lost, f"publishes version {published} while its backup, caught up, is at version {self.acked}"


Digest = Hashable  # of what a shard holds at a version: bytes; in the simulation the content itself


@dataclass(slots=True)
class Proofs:
    """The digests that acknowledgements must carry: of the state that was sent, and of each version after it.

    Only who has loaded the state and applied the updates knows the digest of the version that they make. So a server
    that acknowledges everything and holds nothing is found out by its first acknowledgement.
    """

    _expected: dict[int, dict[int, Digest]] = field(default_factory=dict)  # shard -> version -> digest

    def filled(self, shard: int, version: int, digest: Digest) -> None:
        """The whole state is sent to the shard's backup."""
        self._expected[shard] = {version: digest}

    def sent(self, shard: int, version: int, digest: Digest) -> None:
        """The update that makes `version` is sent."""
        self._expected.setdefault(shard, {})[version] = digest

    def check(self, shard: int, version: int, digest: Digest) -> bool | None:
        """Is the digest right? None if this version is not awaited: an earlier one, or one that was never sent."""
        expected = self._expected.get(shard, {})
        if version not in expected:
            return None
        self._expected[shard] = {later: known for later, known in expected.items() if later >= version}
        return expected[version] == digest
