"""What a primary knows about the copies of its shard."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from rallypoint.core.shard.events import Assigned


@dataclass(slots=True)
class CopyState:
    """The backup of one shard, or the third server, as the primary sees it.

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

    A backup that held all that was published when this server became the primary is caught up from the beginning. It
    may be at the same version: so it is asked first (`asks`), and filled only if it is not.
    """

    needs_sync: bool = False  # there is a backup, and the state has not been sent over its current link
    replicating: bool = False  # the primary sends every update to the backup
    caught_up: bool = False  # the backup may be promoted
    needs_ack: bool = False  # publish only versions that the backup has
    asks: bool = False  # it may hold the state already
    acked: int = -1  # the newest version acknowledged over the current link
    chose: int = -1  # the step of the newest choice of contributions acknowledged over the current link

    def assigned(self, *, backup: bool, proven: bool = False) -> None:
        """A view pairs the shard with a new backup, or (False) with none. `proven`: it holds all that was published."""
        self.needs_sync = backup
        self.replicating = False
        self.caught_up = self.needs_ack = self.asks = backup and proven
        self.acked = self.chose = -1

    def filled(self) -> None:
        """The caller sends the whole state now, and every update from now on."""
        self.needs_sync, self.replicating = False, True

    def link_lost(self) -> None:
        """The link broke, and everything in transit is lost: the whole state must be sent again."""
        if self.replicating:
            self.needs_sync, self.replicating = True, False
            self.acked = self.chose = -1

    def refuted(self) -> None:
        """The backup does not hold the same state: it is to be filled."""
        self.asks = False
        self.link_lost()

    def acknowledged(self, version: int, *, chosen: bool = False) -> None:
        """The backup acknowledged `version`, and perhaps a choice for the next one."""
        self.acked = max(self.acked, version)
        self.chose = version if chosen else self.chose
        self.needs_ack, self.asks = True, False

    @property
    def limits(self) -> bool:
        """True if the backup may be promoted, or will be as soon as the state that is on its way has come."""
        return self.replicating or self.needs_ack

    def catches_up(self, published: int) -> bool:
        """Returns True once: when the backup has all published versions for the first time."""
        if self.caught_up or self.acked < published:
            return False
        self.caught_up = True
        return True

    def validate(self, version: int, published: int, *, primary: bool) -> None:
        """Raise AssertionError unless this is one of the states above."""
        assert primary or self == CopyState(), f"a shard that is not primary here has a backup: {self}"
        assert not (self.needs_sync and self.replicating), f"{self}: a backup that is replicating needs no sync"
        assert self.needs_ack or not self.caught_up, f"{self}: caught up without an acknowledgement"
        assert self.replicating or self.acked < 0, f"{self}: an acknowledgement counts beyond its link"
        assert self.acked <= version, f"{self}: the backup acknowledged more than version {version}"
        lost = self.caught_up and self.acked >= 0 and published > self.acked
        assert not lost, f"publishes version {published} while its backup, caught up, is at version {self.acked}"


@dataclass(slots=True)
class ShardCopies:
    """The backup of one shard, and the third server (`incoming`) that is filled beside it: see `View.incoming`."""

    backup: CopyState = field(default_factory=CopyState)
    incoming: CopyState = field(default_factory=CopyState)

    def of(self, incoming: bool) -> CopyState:
        """The third server, or the backup."""
        return self.incoming if incoming else self.backup

    def assigned(self, event: Assigned, *, promoted: bool) -> None:
        """A view names the backup and the third server; `promoted`: this server is the primary from now on."""
        if event.arrived:
            self.backup, self.incoming = self.incoming, CopyState()
        elif event.fresh or not event.backup or promoted:
            self.backup.assigned(backup=event.primary and event.backup, proven=event.proven)
        if event.incoming_fresh or not event.incoming:
            self.incoming.assigned(backup=event.incoming)

    @property
    def replicating(self) -> tuple[bool, ...]:
        """To whom updates are sent: the backup (False), the third server (True)."""
        if not self.incoming.replicating:
            return (False,) if self.backup.replicating else ()
        return (False, True) if self.backup.replicating else (True,)

    @property
    def limits(self) -> bool:
        """True if somebody may be promoted, or soon."""
        return self.backup.limits or self.incoming.limits

    def durable(self, version: int) -> int:
        """The newest version that may be published while the primary is at `version`."""
        for one in (self.backup, self.incoming):
            if one.needs_ack and one.acked < version:
                version = one.acked
        return version

    def chose(self, step: int) -> bool:
        """True if all who may be promoted know the contributions that were chosen for `step`."""
        return all(one.chose == step or not one.limits for one in (self.backup, self.incoming))

    def validate(self, version: int, published: int, *, primary: bool) -> None:
        """Raise AssertionError unless both are in one of their states."""
        assert self.backup.needs_sync or self.backup.limits or not self.incoming.limits, f"{self}: no backup, a third"
        for one in (self.backup, self.incoming):
            one.validate(version, published, primary=primary)


# How the servers that have a copy of a shard prove what they acknowledge.


Digest = Hashable  # of what a shard holds at a version: bytes; in the simulation the content itself


@dataclass(slots=True)
class Proofs:
    """The digests that acknowledgements must carry: of the state that was sent, and of each version after it.

    Only who has loaded the state and applied the updates knows the digest of the version that they make. So a server
    that acknowledges everything and holds nothing is found out by its first acknowledgement.
    """

    _expected: dict[tuple[int, str], dict[int, Digest]] = field(default_factory=dict)  # shard, server -> by version

    def filled(self, shard: int, server: str, version: int, digest: Digest) -> None:
        """The whole state is sent to that server, or it is asked whether it holds it."""
        self._expected[shard, server] = {version: digest}

    def sent(self, shard: int, server: str, version: int, digest: Digest) -> None:
        """The update that makes `version` is sent."""
        self._expected.setdefault((shard, server), {})[version] = digest

    def keep(self, servers: Collection[str]) -> None:
        """Forget all others."""
        self._expected = {copy: known for copy, known in self._expected.items() if copy[1] in servers}

    def check(self, shard: int, server: str, version: int, digest: Digest) -> bool | None:
        """Is the digest right? None if this version is not awaited: an earlier one, or one that was never sent."""
        expected = self._expected.get((shard, server), {})
        if version not in expected:
            return None
        self._expected[shard, server] = {later: known for later, known in expected.items() if later >= version}
        return expected[version] == digest
