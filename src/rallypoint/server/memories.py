"""What workers' codecs remember of replicas, while it is between two workers: see `core/relay.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint.codec.memory import Memory
from rallypoint.core.relay import Answer, Relay
from rallypoint.core.view import View
from rallypoint.net.frames import Header, Kind

Send = Callable[[str, Header, memoryview | None], None]


class Memories:
    """The shell around `Relay`; the reducer's thread owns it.

    `send(worker, header, payload)` queues a frame to a worker that is connected; whoever sends fills in the view's
    number. At most one memory of each replica is held for each shard that is primary here.
    """

    def __init__(self, me: str, send: Send) -> None:
        self._relay: Relay[Memory] = Relay(me)
        self._send = send

    def adopt(self, view: View) -> None:
        """A new view."""
        self._tell(self._relay.adopt(view))

    def contributed(self, header: Header, worker: str, upcoming: int) -> None:
        """A contribution has come (whatever becomes of it); `upcoming`: the next step that the shard takes."""
        self._relay.contributed(header.shard, header.replica, header.step, worker, upcoming)

    def given(self, header: Header, data: memoryview, worker: str, upcoming: int) -> None:
        """A worker hands a memory over, or says that it has nothing new."""
        self._send(worker, Header(Kind.TAKEN, shard=header.shard, replica=header.replica, step=header.step), None)
        memory = (header.step, Memory(header.step, header.codec, data)) if data else None
        self._tell(self._relay.given(header.shard, header.replica, worker, upcoming, memory))

    def recalled(self, header: Header, worker: str, upcoming: int) -> None:
        """A worker asks for one."""
        self._tell(self._relay.recalled(header.shard, header.replica, worker, upcoming))

    def _tell(self, answers: Sequence[Answer[Memory]]) -> None:
        for worker, shard, replica, step, memory in answers:
            header = Header(Kind.MEMORY, shard=shard, replica=replica, step=step)
            if memory is not None:
                header = header._replace(codec=memory.code, length=len(memory.data))
            self._send(worker, header, None if memory is None else memory.data)
