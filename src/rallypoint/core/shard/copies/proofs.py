"""How the servers that have a copy of a shard prove what they acknowledge."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

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
