"""What a version contains: parameters from the servers, or (AllReduce) the update for this worker's own optimizer."""

from __future__ import annotations

from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.modes import Holder
from rallypoint.core.view import View
from rallypoint.errors import ProtocolError
from rallypoint.net.frames import SKIP, Header
from rallypoint.store.record import ShardRecord, read_state

States = dict[int, ShardRecord]


class ServerState:
    """The servers hold the optimizer's state: a version is the parameters and nothing else."""

    def starts(self, shard: Shard) -> bool:
        """True if a worker can start from this shard's versions."""
        return True

    def skips(self, header: Header) -> bool:
        """True if this version only says that its step is skipped. Then it has no bytes."""
        return False

    def read(self, header: Header, data: bytearray, shard: Shard) -> ShardRecord:
        """Read a shard's whole state. Raises ProtocolError if it cannot be read."""
        raise ProtocolError(f"a state of shard {header.shard}, though this job's workers have none")

    def lands(self, shard: int, *, skips: bool = False, record: ShardRecord | None = None) -> None:
        """Record that a version of the shard, or its whole state, may land. Needs the exchange's lock."""

    def begin_install(self) -> None:
        """Begin to install what has landed. Needs the exchange's lock."""

    def take(self) -> tuple[States, bool]:
        """Return what is being installed: the shards' states, if all start from them; is the step skipped?"""
        return {}, False

    def rolled_back(self) -> None:
        """A new generation has begun: drop what has landed. Needs the exchange's lock."""

    def where_missing(self, view: View, step: int) -> str:
        """What a worker without a model waits for, as a phrase; "" for nothing special."""
        return ""


class ReplicatedState(ServerState):
    """Every worker holds the model and the optimizer's state: a version is the mean gradient, or a whole state."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._states: States = {}  # of the version that all start from, filled as they land
        self._skipped: set[int] = set()  # shards whose landed version says that its step is skipped
        self._taken: tuple[States, bool] = ({}, False)

    def starts(self, shard: Shard) -> bool:
        return shard.role == "buffers"

    def skips(self, header: Header) -> bool:
        return bool(header.flags & SKIP)

    def read(self, header: Header, data: bytearray, shard: Shard) -> ShardRecord:
        return read_state(data, shard, header.step, self._config)

    def lands(self, shard: int, *, skips: bool = False, record: ShardRecord | None = None) -> None:
        (self._skipped.add if skips else self._skipped.discard)(shard)
        if record is not None:
            self._states[shard] = record

    def begin_install(self) -> None:
        self._taken, self._states = (self._states, bool(self._skipped)), {}

    def take(self) -> tuple[States, bool]:
        taken, self._taken = self._taken, ({}, False)
        return taken

    def rolled_back(self) -> None:
        self._states.clear()

    def where_missing(self, view: View, step: int) -> str:
        if step >= 0 or not view.uploader:
            return ""
        return "the model's state" + ("" if view.origin else f", which {view.uploader} uploads")


def optimizer_state(config: JobConfig) -> ServerState:
    """Return the part that fits who holds the optimizer's state in this job: the servers or every worker."""
    match config.mode.holder:
        case Holder.SERVERS:
            return ServerState()
        case Holder.WORKERS:
            return ReplicatedState(config)
