"""A simulated store of snapshots: what was written survives every process; it may be full for a while."""

from __future__ import annotations

from rallypoint.core.deciding.decisions import Decided
from rallypoint.core.view import Scale, Stop
from rallypoint.testing.simulation.replicas.contents import Content

Known = tuple[Stop | None, Decided, tuple[Scale, ...]]  # the job's early end and decisions, and what was ordered
Committed = tuple[str, int, Stop | None, Decided, tuple[Scale, ...]]


class SimulatedStore:
    """Snapshots by id; a shard's record is whole or not there."""

    def __init__(self) -> None:
        self.full = False
        self._parts: dict[str, dict[int, tuple[int, Content]]] = {}
        self._committed: list[Committed] = []

    def write(self, id: str, shard: int, version: int, content: Content) -> bool:
        """Store one shard; False when there is no room."""
        if self.full:
            return False
        self._parts.setdefault(id, {})[shard] = (version, content)
        return True

    def commit(self, id: str, version: int, wanted: list[int | None], known: Known) -> bool:
        """The manifest; False when there is no room. Of each shard that version is wanted (None: any)."""
        if self.full:
            return False
        assert len(self._parts[id]) == len(wanted), f"snapshot {id} is committed with {len(self._parts[id])} shards"
        assert all(self._parts[id][shard][0] == v for shard, v in enumerate(wanted) if v is not None)
        self._committed.append((id, version, *known))
        return True

    def tear(self) -> None:
        """The newest snapshot turns out to be damaged (only if there is one before it)."""
        if len(self._committed) > 1:
            self._committed.pop()

    def newest(self) -> Committed:
        """The newest usable snapshot, its version, and what its manifest knows."""
        return self._committed[-1] if self._committed else ("", -1, None, Decided(), ())

    def read(self, id: str, shard: int) -> tuple[int, Content]:
        """A shard's version and content."""
        return self._parts[id][shard]
