"""One pull of rows: what was asked of whom, and what has come. Whatever may not have been heard is asked again (I2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rallypoint.core.view import ViewNumber

Asked = tuple[ViewNumber, str, int]  # the view, its primary, and which of our connections to it


@dataclass(slots=True)
class Pull:
    """Rows of some parts of tables: shard -> the payload that names them, and the bytes of the answer.

    With `newest` any version will do; else it is `version`, and `outdated` says that it is not kept any more.
    """

    number: int
    version: int
    newest: bool
    wanted: Mapping[int, tuple[memoryview, int]]
    got: dict[int, bytearray] = field(default_factory=dict)
    outdated: bool = False
    _asked: dict[int, Asked] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """The shards that have not answered."""
        return [shard for shard in self.wanted if shard not in self.got]

    @property
    def over(self) -> bool:
        """Is there nothing to wait for?"""
        return self.outdated or len(self.got) == len(self.wanted)

    def unasked(self, view: ViewNumber, homes: Mapping[int, str], connections: Mapping[str, int]) -> Iterator[int]:
        """Shards whose primary can be asked and has not been, under this view and over this connection."""
        for shard in self.missing:
            home = homes[shard]
            if home in connections and self._asked.get(shard) != (view, home, connections[home]):
                yield shard

    def ask(self, shard: int, view: ViewNumber, home: str, connection: int) -> None:
        """The shard's primary is being asked."""
        self._asked[shard] = (view, home, connection)

    def answered(self, shard: int, number: int, data: bytearray, *, outdated: bool) -> bool:
        """An answer has come; False when it is not to this pull, or not of the right length."""
        if number != self.number or shard not in self.wanted or shard in self.got:
            return False
        if outdated:
            self.outdated = True
        elif len(data) == self.wanted[shard][1]:
            self.got[shard] = data
        else:
            return False
        return True
