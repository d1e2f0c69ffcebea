"""Push a delta, receive parameters: the worker's machine with its exchange buffer and its links to all servers.

The exchange buffer is one vector as long as the model; each shard's slot in it carries a gradient up and then the new
parameters down (see `core/worker.py`). With the gradients that autograd holds for a moment, it is all that
synchronisation takes of a worker's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from rallypoint.core import worker as machine
from rallypoint.core.layout import Layout
from rallypoint.core.view import View
from rallypoint.core.worker import WorkerMachine
from rallypoint.errors import JobAborted, ProtocolError, RallypointError
from rallypoint.net.frames import NOT_FINITE, Header, Kind
from rallypoint.net.pool import bytes_of
from rallypoint.net.transport import Transport
from rallypoint.observe.trace import Tracer
from rallypoint.observe.waits import wait_until
from rallypoint.worker.link import ServerLink


class Exchange:
    """One worker's data plane in one job.

    The main thread fills slots and waits for versions; each link's thread lands versions. One lock guards the machine;
    tensors are touched outside it, by the slot's current owner only.
    """

    def __init__(
        self, *, layout: Layout, view: View, me: str, token: str, window: int, steps: int, transport: Transport,
        tracer: Tracer, say: Callable[[str], None], pinned: bool = False,
    ) -> None:  # fmt: skip
        self.layout, self.view, self.me = layout, view, me
        self.buffer = torch.empty(layout.words, dtype=torch.float32, pin_memory=pinned)
        self._bytes = bytes_of(self.buffer)
        self._machine = WorkerMachine(
            shards=len(layout.shards),
            buffer_shards=frozenset(s.index for s in layout.shards if s.role == "buffers"),
            replicas=view.deal[me],
            steps=steps,
        )
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._installable = -1
        self._claiming = False
        self._weight, self._finite = 1.0, True
        self._say = say
        self._links: dict[str, ServerLink] = {}
        try:
            for server in view.servers:
                self._links[server.id] = ServerLink(
                    transport=transport, server=server, me=me, token=token, window=window, arrivals=self,
                    on_lost=self._link_lost(server.id), tracer=tracer,
                )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Follow all servers."""
        for link in self._links.values():
            link.start(self.view.number)

    def close(self) -> None:
        """End every link."""
        for link in self._links.values():
            link.close()

    def fail(self, error: BaseException) -> None:
        """Whoever waits here, now or later, gets this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # ---- the main thread ----

    @property
    def step(self) -> int:
        """The version that the model holds; -1 before the first."""
        return self._machine.step

    @property
    def next_replica(self) -> int | None:
        """The replica to compute now, None when this step's are done."""
        return self._machine.next_replica

    def initialise(self) -> None:
        """Push what the buffer holds as version 0 of everything (the lead worker, once)."""
        for shard in self.layout.shards:
            header = Header(Kind.INITIAL, self.view.number, shard=shard.index, length=shard.nbytes)
            self._link_of(shard.index).push(header, self._slot_bytes(shard.index), sent=_nothing)

    def begin_replica(self, weight: float, finite: bool) -> None:
        """What the contributions from now on weigh, and whether their loss was finite."""
        self._weight, self._finite = weight, finite

    def claim(self, shard: int) -> torch.Tensor:
        """The slot's words, once the gradient that was in it has left."""
        with self._changed:
            self._claiming = True
            self._wait(lambda: self._machine.may_fill(shard), lambda: f"room in shard {shard}: {self._where_unsent()}")
            self._claiming = False
        place = self.layout.shards[shard]
        return self.buffer[place.start : place.stop]

    def filled(self, shard: int) -> None:
        """The slot holds the whole gradient of the replica in progress: push it."""
        with self._changed:
            effects = self._machine.handle(machine.Filled(shard))
        self._run(effects)

    def replica_computed(self) -> None:
        """The replica in progress is over."""
        with self._changed:
            effects = self._machine.handle(machine.ReplicaComputed())
        self._run(effects)

    def wait_version(self) -> int:
        """Until every shard of the next version is in the buffer; its number."""
        with self._changed:
            version = self._machine.wanted
            self._wait(lambda: self._installable == version, lambda: f"version {version}: {self._where_missing()}")
        return version

    def installed(self) -> None:
        """The model holds the version that `wait_version` returned; the slots are free."""
        with self._changed:
            effects = self._machine.handle(machine.Installed())
        self._run(effects)

    def _wait(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        wait_until(self._changed, lambda: self._failure is not None or ready(), describe, self._say)
        if self._failure is not None:
            raise self._failure

    # ---- the links' threads ----

    def arriving(self, shard: int, version: int, nbytes: int) -> memoryview | None:
        if not 0 <= shard < len(self.layout.shards) or nbytes != self.layout.shards[shard].nbytes:
            raise ProtocolError(f"a version of {nbytes} bytes for shard {shard}, which is not in this job's layout")
        with self._changed:
            effects = self._machine.handle(machine.Arriving(shard, version))
        return self._slot_bytes(shard) if isinstance(effects[0], machine.Land) else None

    def landed(self, shard: int) -> None:
        with self._changed:
            effects = self._machine.handle(machine.Landed(shard))
            for effect in effects:
                if isinstance(effect, machine.Install):
                    self._installable = effect.version
                    self._changed.notify_all()

    def _sent(self, shard: int, step: int) -> None:
        with self._changed:
            self._machine.handle(machine.Sent(shard, step))
            if self._claiming:  # else the main thread waits for a version, and would wake for every shard in vain
                self._changed.notify_all()

    def _link_lost(self, server: str) -> Callable[[RallypointError], None]:
        def lost(error: RallypointError) -> None:
            self.fail(JobAborted(f"the link to server {server} is gone: {error}"))

        return lost

    # ---- effects ----

    def _run(self, effects: list[machine.Effect]) -> None:
        for effect in effects:
            match effect:
                case machine.Send(shard=shard):
                    self._push(effect, shard)
                case machine.Fetch(shard=shard, version=version):
                    self._link_of(shard).fetch(shard, version, self.view.number)
                case _:
                    raise AssertionError(f"an effect that cannot follow here: {effect}")

    def _push(self, send: machine.Send, shard: int) -> None:
        place = self.layout.shards[shard]
        header = Header(
            Kind.PUSH, self.view.number, shard=shard, replica=send.replica, step=send.step, length=place.nbytes,
            weight=1.0 if place.role == "buffers" else self._weight, flags=0 if self._finite else NOT_FINITE,
        )  # fmt: skip
        self._link_of(shard).push(header, self._slot_bytes(shard), sent=lambda: self._sent(shard, send.step))

    def _slot_bytes(self, shard: int) -> memoryview:
        place = self.layout.shards[shard]
        return self._bytes[place.start * 4 : place.stop * 4]

    def _link_of(self, shard: int) -> ServerLink:
        return self._links[self.view.primary[shard]]

    def _where_missing(self) -> str:
        return self._by_server(self._machine.missing)

    def _where_unsent(self) -> str:
        return self._by_server(self._machine.unsent)

    def _by_server(self, shards: list[int]) -> str:
        homes: dict[str, int] = {}
        for shard in shards:
            homes[self.view.primary[shard]] = homes.get(self.view.primary[shard], 0) + 1
        return "; ".join(
            f"{count} shards from server {home} ({self.view.server(home).address})" for home, count in homes.items()
        )


def _nothing() -> None:
    """Nobody waits for this payload: it stays where it is until version 0 comes back into the same bytes."""
