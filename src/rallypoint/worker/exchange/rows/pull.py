"""One pull of rows: which server was asked for what, and what has arrived. A lost request is sent again (I2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.machine import SlotMachine
from rallypoint.net.frames import LATEST

Asked = tuple[ViewNumber, str, int]  # the view, the primary asked, and the number of our connection to it


@dataclass(slots=True)
class Pull:
    """Rows of some parts of tables: shard -> the payload that names the rows, and the size of the answer in bytes.

    With `newest` any version is accepted. Otherwise it must be `version`; `outdated` is set when a server does not keep
    that version any more. `own` has the shards whose own number of that version is another one.
    """

    number: int
    version: int
    newest: bool
    wanted: Mapping[int, tuple[memoryview, int]]
    got: dict[int, bytearray] = field(default_factory=dict)
    outdated: bool = False
    own: Mapping[int, int] = field(default_factory=dict)
    _asked: dict[int, Asked] = field(default_factory=dict)

    @classmethod
    def of(
        cls, number: int, machine: SlotMachine, wanted: Mapping[int, tuple[memoryview, int]], *, newest: bool
    ) -> Pull:
        """A pull of rows as they are at the step in progress.

        With `newest` a newer version is accepted; a streaming job gets the newest.
        """
        version = machine.row_version
        return cls(number, LATEST if version is None else version, version is None or newest, wanted)

    @property
    def missing(self) -> list[int]:
        """The shards that have not answered yet."""
        return [shard for shard in self.wanted if shard not in self.got]

    @property
    def over(self) -> bool:
        """True when there is nothing left to wait for."""
        return self.outdated or len(self.got) == len(self.wanted)

    def version_of(self, shard: int) -> int:
        """The shard's own version that is wanted."""
        return self.own.get(shard, self.version)

    def unasked(self, view: ViewNumber, homes: Mapping[int, str], connections: Mapping[str, int]) -> Iterator[int]:
        """The shards whose primary is connected and was not asked under this view and over this connection."""
        for shard in self.missing:
            home = homes[shard]
            if home in connections and self._asked.get(shard) != (view, home, connections[home]):
                yield shard

    def ask(self, shard: int, view: ViewNumber, home: str, connection: int) -> None:
        """Record that the shard's primary is asked."""
        self._asked[shard] = (view, home, connection)

    def answered(self, shard: int, number: int, data: bytearray, *, outdated: bool) -> bool:
        """Record an answer. Returns False when it does not belong to this pull or has the wrong length."""
        if number != self.number or shard not in self.wanted or shard in self.got:
            return False
        if outdated:
            self.outdated = True
        elif len(data) == self.wanted[shard][1]:
            self.got[shard] = data
        else:
            return False
        return True
