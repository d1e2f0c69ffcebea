"""The versions of a worker's model: the first is uploaded, later ones are installed, some are stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import torch

from rallypoint.codec.spec import Raw
from rallypoint.core.protocol import NotStored
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.errors import NO_SNAPSHOT, JobAborted
from rallypoint.store.manifest import Compression
from rallypoint.store.writer import SnapshotWriter
from rallypoint.worker.loop.parts import Parts
from rallypoint.worker.precision import HeldParameters

log = logging.getLogger("rallypoint")


class Versions:
    """Moves versions between the exchange buffer and the model. Main thread only, between two micro-batches."""

    def __init__(self, parts: Parts, on_cast: Callable[[], None]) -> None:
        """`on_cast` is called when parameters have got another type: see `HeldParameters`."""
        self._parts, self._exchange = parts, parts.exchange
        self._held = HeldParameters(parts.config, parts.tensors, on_cast)
        self._writer: SnapshotWriter | None = None
        self._updates = -1  # the newest update in the model's version; -1 until one comes from the servers
        self._buffers_at_start: list[torch.Tensor] = []
        self._trace_steps = parts.coordinator.welcome.trace

    def initialise(self) -> None:
        """Upload what all workers start from: this model's values, and the optimizer's state if workers step it.

        It is asked for again when the servers' state is lost before a step is computed. Raises JobAborted if the model
        does not hold the first weights any more.
        """
        exchange, tensors, optimizer = self._exchange, self._parts.tensors, self._parts.optimizer
        if self._parts.streamed is not None:
            exchange.initialise(self._parts.streamed.first_words)
            return
        if optimizer is None:
            if self._updates >= 0:
                self._go_back_to_the_first()
            exchange.initialise(tensors.part)
            return
        if optimizer.version < 0:
            optimizer.version = exchange.holds = 0
            self._keep_buffers()  # the upload may be lost with a link, and is repeated then
        else:
            self.restore_buffers()
        exchange.initialise(tensors.part, optimizer.record)

    def _go_back_to_the_first(self) -> None:
        """The model has had a version, and may have computed since."""
        if self._updates > 0:
            raise JobAborted(NO_SNAPSHOT)
        if self._parts.config.down != Raw():
            raise JobAborted(
                "the servers' state is lost, and here the first weights are rounded, as `down` sends them: start again"
            )
        self._parts.source.show_version()
        self.restore_buffers()

    def install(self, version: int) -> ViewNumber | None:
        """Copy a version from the exchange buffer into the model. Returns the generation in which the model holds it.

        Returns None if another version is to be installed by now, or a roll-back has made this one stale.
        """
        parts, exchange = self._parts, self._exchange
        with parts.tracer.span("install", version=version):
            vector, shards = exchange.begin_install(version), exchange.installing
            if vector is None:
                return None
            self._held.before_install(last=version == parts.config.rounds)
            parts.source.install()
            if parts.optimizer is not None:
                states, skipped = exchange.take_states()
                parts.optimizer.install(version, vector, states, skipped=skipped)
                exchange.holds = version
            elif parts.streamed is not None:
                parts.streamed.install()
            elif shards is None or not parts.alone:
                parts.followers.install(version)
                parts.tensors.read_from(vector)
            else:
                parts.tensors.read_shards_from(vector, shards)
        parts.source.installed(shards)
        self._updates = exchange.updates
        self._keep_buffers()
        generation = exchange.installed(version)
        self._trace(version)
        return generation

    def completed(self, buffers: list[torch.Tensor]) -> None:
        """A forward pass has installed a whole version; `buffers` are the buffers' values in it."""
        self._updates = self._exchange.step
        self._buffers_at_start = buffers
        self._trace(self._exchange.step)

    def _trace(self, version: int) -> None:
        self._parts.tracer.on = self._trace_steps[0] <= version < self._trace_steps[1]

    def _keep_buffers(self) -> None:
        self._buffers_at_start = [placed.tensor.clone() for placed in self._parts.tensors.buffers]

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Set the buffers to the version's values.

        Each replica starts from these, even after an evaluation changed them.
        """
        for placed, start in zip(self._parts.tensors.buffers, self._buffers_at_start, strict=True):
            placed.tensor.copy_(start)

    def store(self, wanted: machine.Store) -> None:
        """Store this worker's share of a snapshot, if the model still holds that version."""
        parts = self._parts
        assert parts.optimizer is not None
        if parts.optimizer.version > wanted.version:
            late = NotStored(wanted.snapshot, "the step was over before the request came", parts.optimizer.version)
            parts.coordinator.send(late)
            return
        me, about = self._exchange.me, parts.coordinator.welcome
        shares = parts.tensors.layout.shards[wanted.writers.index(me) :: len(wanted.writers)]
        if not shares:
            return
        if self._buffers_at_start:
            self.restore_buffers()
        if self._writer is None:
            compression = cast(Compression, about.compression)
            self._writer = SnapshotWriter(about.snapshots, compression, me, parts.coordinator.send)
        with parts.tracer.span("capture", version=wanted.version):
            self._writer.begin(wanted.snapshot, len(shares))
            for shard in shares:
                self._writer.put(parts.optimizer.record(shard))

    def close(self) -> None:
        """End the writer of snapshots, if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def check_last(version: int, rounds: int) -> None:
    """Warn if the job is over and the model, which holds `version`, does not hold its last one. JobAborted if none."""
    if version < 0:
        raise JobAborted("the job was over before this worker had any of its parameters")
    if version < rounds:
        log.warning(
            "the job is over, but this worker's model holds version %d of %d: the job did not wait for it (it was out "
            "of the servers' reach). Use the weights that the others have saved", version, rounds,
        )  # fmt: skip
