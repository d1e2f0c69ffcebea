"""A worker's part of a snapshot: a share of the model (AllReduce), the codec states of its replicas, or nothing."""

from __future__ import annotations

from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.slots import Send, Store


class WorkerSnapshots:
    """The interface, for jobs in which nothing of a worker goes into a snapshot: the servers write it alone."""

    def wanted(self, snapshot: Store) -> int:
        """The coordinator asks for this worker's part of `snapshot`.

        Returns -1; if the worker has passed that version already, the version that it has.
        """
        return -1

    def due(self, holds: int) -> Store | None:
        """The share that the main thread has to store now, or None; `holds` is the version of the model."""
        return None

    def begun(self) -> None:
        """The main thread begins to store the share that `due` returned."""

    def copies(self, send: Send) -> bool:
        """True if the codec state before this contribution belongs to the requested snapshot."""
        return False

    def rolled_back(self) -> None:
        """Drop the request for codec states: a new generation has begun."""


class ModelShares(WorkerSnapshots):
    """For AllReduce: each worker stores a share of the model, once its model is at the snapshot's version or later."""

    def __init__(self) -> None:
        self._wanted: Store | None = None

    def wanted(self, snapshot: Store) -> int:
        self._wanted = snapshot
        return -1

    def due(self, holds: int) -> Store | None:
        return self._wanted if self._wanted is not None and holds >= self._wanted.version else None

    def begun(self) -> None:
        self._wanted = None


class CodecStateSnapshots(WorkerSnapshots):
    """For codecs with states: the states of version v are those before the first contribution computed from v."""

    def __init__(self, machine: WorkerMachine) -> None:
        self._machine = machine
        self._captured = -1

    def wanted(self, snapshot: Store) -> int:
        if snapshot.version >= self._machine.steps:
            return -1  # no worker contributes after the last version
        if self._machine.following and self._machine.step >= snapshot.version:
            return self._machine.step
        self._captured = snapshot.version
        return -1

    def copies(self, send: Send) -> bool:
        if self._captured < 0 or send.step <= 0:
            return False
        return send.step == self._machine.cadence.updates_before(send.shard, self._captured)

    def rolled_back(self) -> None:
        self._captured = -1
