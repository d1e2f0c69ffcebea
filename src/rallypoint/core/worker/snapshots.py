"""A worker's part of a snapshot: a share of the model where workers hold it, and the codec states of its replicas."""

from __future__ import annotations

from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.slots import Send, Store


class Snapshots:
    """The last snapshot that was asked for. No codec states go into it."""

    def __init__(self) -> None:
        self._share: Store | None = None

    def store(self, share: Store) -> None:
        """The coordinator asks for a share, once the model is at its version."""
        self._share = share

    def due(self, holds: int) -> Store | None:
        """The share to store now, if the model is at its version or past it."""
        return self._share if self._share is not None and holds >= self._share.version else None

    def begun(self) -> None:
        """The main thread stores that share."""
        self._share = None

    def capture(self, version: int) -> int:
        """The coordinator asks for a snapshot of `version`, with the codec states of then.

        If that is too late it is the version that is here, else -1.
        """
        return -1

    def copies(self, send: Send) -> bool:
        """Does the codec state before this contribution belong to the snapshot that was asked for?"""
        return False

    def rolled_back(self) -> None:
        """A new generation has begun: no codec state is to be captured any more."""


class CodecStateSnapshots(Snapshots):
    """The codec states of a version are those before the first contribution that is computed from it."""

    def __init__(self, machine: WorkerMachine) -> None:
        super().__init__()
        self._machine = machine
        self._captured = -1

    def capture(self, version: int) -> int:
        if version >= self._machine.steps:
            return -1  # from there on nobody contributes anything
        if self._machine.following and self._machine.step >= version:
            return self._machine.step
        self._captured = version
        return -1

    def copies(self, send: Send) -> bool:
        if self._captured < 0 or send.step <= 0:
            return False
        return send.step == self._machine.cadence.updates_before(send.shard, self._captured)

    def rolled_back(self) -> None:
        self._captured = -1
