"""A real cluster for tests: coordinator, servers and workers as processes of this machine, from a fork server.

The fork server imports torch once, so a process costs milliseconds instead of seconds.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from rallypoint.aggregator import AggregatorService
from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.terms import Terms
from rallypoint.errors import RallypointError
from rallypoint.net.handshake import new_token
from rallypoint.server.service import ServerService, run_servers
from rallypoint.worker.loop.session import Job

TrainFunction = Callable[..., Any]
_TIMEOUT_S = 120.0
_PATIENT_S = 60.0  # a heartbeat


class ClusterFailed(RallypointError):
    """A process of the test cluster failed. The message is that process's error."""


@dataclass(frozen=True, slots=True)
class ClusterProcess:
    """One process of the cluster, and the pipe on which it reports its result."""

    process: ForkServerProcess
    pipe: Connection


@dataclass(slots=True)
class ProcessCluster:
    """`workers` worker processes, `servers` servers and `aggregators` around one coordinator; a context manager.

    ``cluster.run(train, *args)`` calls ``train(job, *args)`` (a module-level function) in every worker and returns the
    results in worker order. It raises ClusterFailed with the first failure's message. All processes are ended in both
    cases. `relays` are the aggregators' processes.
    """

    workers: int
    servers: int
    overrides: dict[str, Any] = field(default_factory=dict)
    terms: Terms | None = None  # None: nobody is given up because this machine is busy
    folder: str = ""
    timeout: float = _TIMEOUT_S
    started: list[ClusterProcess] = field(default_factory=list)
    token: str = field(default_factory=new_token, repr=False)
    aggregators: int = 0
    relays: list[ClusterProcess] = field(default_factory=list)

    def __enter__(self) -> ProcessCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for started in self.started:
            if started.process.is_alive():
                started.process.kill()
        for started in self.started:
            started.process.join()
            started.process.close()
            started.pipe.close()

    def run(self, train: TrainFunction, *args: Any) -> list[Any]:
        terms = self.terms or Terms(
            workers_start=self.workers, workers_max=self.workers, servers=self.servers, heartbeat=_PATIENT_S
        )
        about = JoinInfo(self.overrides, self.folder, snapshots=self.folder and f"{self.folder}/snapshots")
        coordinator = self.start(_coordinator_main, terms, about)
        address = self.answer(coordinator)
        for index in range(self.aggregators):  # they are in the first view, so that workers use them from it on
            self.relays.append(self.start(aggregator_main, f"aggregator{index}", address))
            self.answer(self.relays[-1])
        for index in range(self.servers):
            self.start(server_main, f"server{index}", address)
        workers = [self.start(worker_main, f"worker{i}", address, train, args) for i in range(self.workers)]
        return [self.answer(worker) for worker in workers]

    def start(self, main: Callable[..., None], *args: Any) -> ClusterProcess:
        """Start a process that calls ``main(pipe, token, *args)``. It ends with the cluster at the latest."""
        context = fork_server()
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, main, self.token, *args), daemon=True)
        process.start()
        theirs.close()
        started = ClusterProcess(process, ours)
        self.started.append(started)
        return started

    def answer(self, asked: ClusterProcess) -> Any:
        """Return the next report of this process. Raises ClusterFailed if any process fails first."""
        failure = None
        if asked.pipe in wait([asked.pipe], self.timeout):
            with suppress(EOFError):
                kind, value = asked.pipe.recv()
                if kind == "value":
                    return value
                failure = value
        raise ClusterFailed(failure or f"{asked.process.name} said nothing for {self.timeout:.0f} s")


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Return the context whose children have already imported torch and this package.

    There is one fork server for a process. Code that uses multiprocessing directly may start it first, with other
    imports.
    """
    context = multiprocessing.get_context("forkserver")
    # (torch imports its compiler when the first optimizer is made: more than a second of every process)
    ours = ("rallypoint.testing.processes", "rallypoint.testing.reference", "rallypoint.launch.join", "rallypoint.cli")
    context.set_forkserver_preload(["torch._dynamo", *ours])
    return context


def _child(pipe: Connection, main: Callable[..., None], token: str, *args: Any) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        main(pipe, token, *args)
    except RallypointError as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    except Exception:
        pipe.send(("error", traceback.format_exc()))


def _coordinator_main(pipe: Connection, token: str, terms: Terms, join_info: JoinInfo) -> None:
    service = CoordinatorService(terms=terms, token=token, join_info=join_info)
    service.start()
    pipe.send(("value", service.address))
    service.wait()
    service.close()


def server_main(pipe: Connection, token: str, id: str, address: str) -> None:
    """The main function of a server's process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as `rallypoint server` does
    run_servers([ServerService(id=id, coordinator=address, token=token)])


def aggregator_main(pipe: Connection, token: str, id: str, address: str) -> None:
    """The main function of an aggregator's process: reports when it has joined, and at the end its `counts`."""
    service = AggregatorService(id=id, coordinator=address, token=token)
    service.start()
    pipe.send(("value", id))
    service.wait()
    service.close()
    pipe.send(("value", service.counts))


def worker_main(pipe: Connection, token: str, id: str, address: str, train: TrainFunction, args: Sequence[Any]) -> None:
    """The main function of a worker's process: calls ``train(job, *args)`` and reports what it returns."""
    with Job(id=id, coordinator=address, token=token) as job:
        value = train(job, *args)
    pipe.send(("value", value))
