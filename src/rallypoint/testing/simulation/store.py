"""A simulated store of snapshots: what was written survives every process; it may be full for a while."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.core.decisions import Decided
from rallypoint.core.view import EarlyEnd
from rallypoint.testing.simulation.replicas.contents import Content

Known = tuple[EarlyEnd | None, Decided]  # the job's early end and decisions
Committed = tuple[str, int, EarlyEnd | None, Decided]


class SimulatedStore:
    """Snapshots by id; a shard's record is whole or not there.

    `keep`: so many of the newest are kept, and what `commit` is told to keep; 0: all. `elsewhere`: another store, whose
    snapshots are called ``elsewhere/NAME``. Nothing may be written into a store that is `closed`.
    """

    def __init__(self, keep: int = 0, elsewhere: SimulatedStore | None = None) -> None:
        self.full = self.closed = False
        self._keep, self._elsewhere = keep, elsewhere
        self._parts: dict[str, dict[int, tuple[int, Content]]] = {}
        self._committed: list[Committed] = []

    def write(self, id: str, shard: int, version: int, content: Content) -> bool:
        """Store one shard; False when there is no room."""
        assert not self.closed, f"{id} is written into another job's store"
        if self.full:
            return False
        self._parts.setdefault(id, {})[shard] = (version, content)
        return True

    def commit(self, id: str, version: int, wanted: list[int | None], known: Known, kept: str = "") -> bool:
        """The manifest; False when there is no room. Of each shard that version is wanted (None: any).

        Others than the newest and `kept` are deleted then.
        """
        assert not self.closed, f"{id} is committed in another job's store"
        if self.full:
            return False
        assert id not in self.names, f"there is a snapshot {id} already"
        assert len(self._parts[id]) == len(wanted), f"snapshot {id} is committed with {len(self._parts[id])} shards"
        assert all(self._parts[id][shard][0] == v for shard, v in enumerate(wanted) if v is not None)
        self._committed.append((id, version, *known))
        old = self.names[: -self._keep] if self._keep else ()
        for unwanted in set(old) - {kept}:
            del self._parts[unwanted]
        self._committed = [one for one in self._committed if one[0] in self._parts]
        return True

    def tear(self) -> None:
        """The newest snapshot turns out to be damaged (only if there is one before it)."""
        if len(self._committed) > 1:
            self._committed.pop()

    @property
    def names(self) -> Sequence[str]:
        """The usable snapshots, the newest last."""
        return [id for id, *_ in self._committed]

    def newest(self) -> Committed:
        """The newest usable snapshot, its version, and what its manifest knows."""
        return self._committed[-1] if self._committed else ("", -1, None, Decided())

    def find(self, name: str) -> Committed:
        """That snapshot. AssertionError if it is there no more."""
        found = [one for one in self._committed if one[0] == name]
        assert found, f"snapshot {name} is deleted, and a coordinator begins with it"
        return found[0]

    def read(self, id: str, shard: int) -> tuple[int, Content]:
        """A shard's version and content."""
        elsewhere, _, name = id.rpartition("/")
        if elsewhere:
            assert self._elsewhere is not None, f"no store but this one, and {id} is not in it"
            return self._elsewhere.read(name, shard)
        return self._parts[name][shard]
