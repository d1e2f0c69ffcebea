"""A worker's part of a snapshot: a share of the model where workers hold it, or the codec states of its replicas."""

from __future__ import annotations

from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.slots import Send, Store


class Snapshots:
    """The servers write snapshots alone: nothing of this worker goes into one."""

    def wanted(self, snapshot: Store) -> int:
        """The coordinator asks for this worker's part of a snapshot.

        If that is too late it is the version that is here, else -1.
        """
        return -1

    def due(self, holds: int) -> Store | None:
        """The snapshot whose share of the model is to be stored now. `holds` is the model's version."""
        return None

    def begun(self) -> None:
        """The main thread stores that share."""

    def copies(self, send: Send) -> bool:
        """Does the codec state before this contribution belong to the snapshot that was asked for?"""
        return False

    def rolled_back(self) -> None:
        """A new generation has begun: no codec state is to be captured any more."""


class ModelShares(Snapshots):
    """Workers hold the model: each stores a share of it, once its model is at the snapshot's version or past it."""

    def __init__(self) -> None:
        self._wanted: Store | None = None

    def wanted(self, snapshot: Store) -> int:
        self._wanted = snapshot
        return -1

    def due(self, holds: int) -> Store | None:
        return self._wanted if self._wanted is not None and holds >= self._wanted.version else None

    def begun(self) -> None:
        self._wanted = None


class CodecStateSnapshots(Snapshots):
    """The codec states of a version are those before the first contribution that is computed from it."""

    def __init__(self, machine: WorkerMachine) -> None:
        self._machine = machine
        self._captured = -1

    def wanted(self, snapshot: Store) -> int:
        if snapshot.version >= self._machine.steps:
            return -1  # from there on nobody contributes anything
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
