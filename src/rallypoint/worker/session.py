"""Joining a job: `Job` is this process's membership, `Job.train` starts the one run it takes part in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Unpack

import msgspec
import torch

from rallypoint.config import JobConfig, Settings, resolve
from rallypoint.core.job import JobRecord
from rallypoint.core.view import View
from rallypoint.data.loader import MapDataset, MicroBatches
from rallypoint.errors import JobAborted, ProtocolError, RallypointError, UsageError
from rallypoint.net.member import CoordinatorLink
from rallypoint.net.messages import Aborted, Done, Finished, GiveUp, Message, Propose, Refused, Say, Start
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.trace import Tracer
from rallypoint.observe.waits import wait_until
from rallypoint.worker.exchange import Exchange
from rallypoint.worker.run import Run
from rallypoint.worker.staging import Staging, staging_for
from rallypoint.worker.tensors import ModelTensors


class Job:
    """This process as a worker of a job; made by `rallypoint.join`. A context manager.

    AccessDenied, LinkError when the coordinator cannot be joined.
    """

    def __init__(self, *, id: str, coordinator: str, token: str = "", transport: Transport | None = None) -> None:
        self.id = id
        self._token = token
        self._transport: Transport = transport or TcpTransport()
        self._tracer = Tracer(id)
        self._changed = threading.Condition()
        self._view: View | None = None
        self._finished = False
        self._failure: BaseException | None = None
        self._exchange: Exchange | None = None
        self._staging: Staging | None = None
        self._run: Run | None = None
        self._link = CoordinatorLink(
            transport=self._transport, address=coordinator, token=token, role="worker", id=id,
            on_message=self._on_message, on_lost=self._on_lost,
        )  # fmt: skip
        self._link.start()

    def train(self, model: torch.nn.Module, dataset: MapDataset, **settings: Unpack[Settings]) -> Run:
        """Train `model` (in place) on `dataset` (map-style) with the settings of `JobConfig`; iterate over the result.

        Returns once all workers and servers are here and agree. ConfigError, ModelError, DataError on bad input;
        JobAborted when the job ends before it begins.
        """
        if self._exchange is not None:
            raise UsageError("this job has its run already: one job.train for one rp.join")
        config = resolve(settings, self._link.welcome.overrides)
        tensors = ModelTensors(model, config)
        batches = MicroBatches(dataset, config, tensors.device)
        record = JobRecord(msgspec.to_builtins(config), tensors.layout, tensors.frozen_hashes())
        exchange = self.open_exchange(record, config, tensors.write_to, pinned=tensors.device.type == "cuda")
        staging = self._staging = staging_for(tensors.device, exchange.fail)
        self._run = Run(
            model=model, tensors=tensors, config=config, batches=batches, exchange=exchange, staging=staging,
            coordinator=self._link, tracer=self._tracer, finish=self.done,
        )  # fmt: skip
        return self._run

    def open_exchange(
        self, record: JobRecord, config: JobConfig, initial: Callable[[torch.Tensor], None], *, pinned: bool = False
    ) -> Exchange:
        """Propose `record`, wait until all members are here and agree, and connect to every server.

        `initial` writes version 0 into the flat vector; it is called on the lead worker only. This is the data plane
        under `train`, without a model: what `benchmarks/reduce.py` measures.
        """
        self._link.send(Propose(record))
        view = self._wait_for_view()
        exchange = self._exchange = Exchange(
            layout=record.layout, view=view, me=self.id, token=self._token, window=config.window, steps=config.steps,
            transport=self._transport, tracer=self._tracer, say=self._complain, pinned=pinned,
        )  # fmt: skip
        with self._changed:
            if self._failure is not None:
                exchange.fail(self._failure)
        if view.lead == self.id:
            initial(exchange.buffer)
            exchange.initialise()
        exchange.start()
        return exchange

    def done(self) -> None:
        """Say that this worker holds the last version; wait until all do."""
        self._link.send(Done())
        self._wait_finished()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and not isinstance(error, JobAborted):
            self._link.send(GiveUp(_sentence(error)))
        elif error is None and self._exchange is not None and not self._finished:
            self._link.send(GiveUp("its loop ended before the last step"))
        self.close()

    def close(self) -> None:
        """Leave the job: take the hooks off the model, end every link and thread."""
        if self._run is not None:
            self._run.release_model()
        if self._exchange is not None:
            self._exchange.close()
        if self._staging is not None:
            self._staging.close()
        self._link.close()
        if self._link.welcome.folder:
            self._tracer.save(Path(self._link.welcome.folder))

    # ---- waiting ----

    def _wait_for_view(self) -> View:
        with self._changed:
            self._wait(lambda: self._view is not None, lambda: "the other members of the job")
            assert self._view is not None
            return self._view

    def _wait_finished(self) -> None:
        with self._changed:
            self._wait(lambda: self._finished, lambda: "the other workers to finish")

    def _wait(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        wait_until(self._changed, lambda: self._failure is not None or ready(), describe, self._complain)
        if self._failure is not None:
            raise self._failure

    def _complain(self, sentence: str) -> None:
        self._link.send(Say(f"{self.id} on {socket.gethostname()} is {sentence}"))

    # ---- the coordinator's words, on the link's thread ----

    def _on_message(self, message: Message) -> None:
        match message:
            case Start(view=view):
                with self._changed:
                    self._view = view
                    self._changed.notify_all()
            case Finished():
                with self._changed:
                    self._finished = True
                    self._changed.notify_all()
            case Aborted(reason=reason) | Refused(reason=reason):
                self._fail(JobAborted(reason))
            case _:
                raise ProtocolError(f"a worker has no use for a {type(message).__name__} message")

    def _on_lost(self, error: RallypointError) -> None:
        if not self._finished:
            self._fail(JobAborted(f"the coordinator is gone: {error}"))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        if self._exchange is not None:
            self._exchange.fail(error)


def _sentence(error: BaseException) -> str:
    if isinstance(error, RallypointError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return f"{type(error).__name__}: {error}"
