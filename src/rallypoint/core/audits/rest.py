"""State at rest must not change: digests that a server takes of a shard, and compares before it uses it again.

A server audits some versions of its shards (`audit_servers=`). Right after the update that makes such a version it
takes the digest of the whole state. Right before the state is used again (for the next update, a backup or a snapshot)
it takes another one. Where they differ, a bit has changed in this server's memory: it knows itself that it is wrong.

With a backup, the two servers' digests of the same version are compared too (`core.shard.copies.proofs.Proofs`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class AtRest:
    """The digests of the shards that are at an audited version now. `every`: see `audit_servers`; 0 audits nothing."""

    every: int
    _kept: dict[int, tuple[int, Hashable]] = field(default_factory=dict)  # shard -> version, digest
    _also: dict[int, int] = field(default_factory=dict)  # shard -> one more version that is audited

    def also(self, shard: int, version: int) -> None:
        """Audit this version too: a snapshot has it, or the shard was loaded at it."""
        if self.every:
            self._also[shard] = version

    def audited(self, shard: int, version: int) -> bool:
        """Is this version of the shard audited?"""
        return self.every > 0 and (version % self.every == 0 or self._also.get(shard) == version)

    def keep(self, shard: int, version: int, digest: Hashable) -> None:
        """The shard is at `version` now, and has this digest."""
        self._kept[shard] = (version, digest)

    def kept(self, shard: int) -> tuple[int, Hashable] | None:
        """The version that the shard is at, and its digest then; None if that version is not audited."""
        return self._kept.get(shard)

    def moved(self, shard: int) -> None:
        """The shard has another version now, or is not here any more."""
        self._kept.pop(shard, None)
