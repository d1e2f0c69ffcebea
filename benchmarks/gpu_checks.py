"""What `gpu.py` checks, each in processes of its own with a limit of time, and the forks in which its parts run."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gpu_member
import rallypoint as rp
from gpu_member import Plan
from rallypoint.codec.spec import Bf16
from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.terms import Terms
from rallypoint.errors import RallypointError
from rallypoint.launch import environment
from rallypoint.testing.processes import ClusterProcess, ProcessCluster, server_main

FOLDER = Path(__file__).resolve().parent
_PATIENCE_S = 10.0


class CheckFailed(RallypointError):
    """What was checked is not so."""


# ---- Where parts run -------------------------------------------------------------------------------------------


def call(to: Connection, token: str, name: str, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
    """The main function of a process that calls a function of `gpu_member`, and reports what it returns."""
    gpu_member.pipe = to
    to.send(("value", getattr(gpu_member, name)(*args, **settings)))


def coordinator(to: Connection, token: str, terms: Terms) -> None:
    """The main function of a coordinator's process."""
    service = CoordinatorService(terms=terms, token=token, join_info=JoinInfo())
    service.start()
    to.send(("value", service.address))
    service.wait()
    service.close()


def worker(
    to: Connection, token: str, id: str, address: str, name: str, args: tuple[Any, ...], settings: dict[str, Any]
) -> None:
    """The main function of a worker's process, which joins as one that was started by hand."""
    os.environ |= {environment.COORDINATOR: address, environment.TOKEN: token, environment.ID: id}
    call(to, token, name, args, settings)


class Cluster:
    """A coordinator and servers as forks; workers are started by the check. `replication` etc. are as of `Terms`."""

    def __init__(self, processes: ProcessCluster, **terms: Any) -> None:
        self.processes, self.servers = processes, list[ClusterProcess]()
        self.address = processes.answer(processes.start(coordinator, Terms(**terms)))
        for index in range(terms["servers"]):
            self.servers.append(processes.start(server_main, f"server{index}", self.address))
        self._workers = 0

    def worker(self, name: str, *args: Any, **settings: Any) -> ClusterProcess:
        """Start a worker that calls this function of `gpu_member`."""
        id, self._workers = f"worker{self._workers}", self._workers + 1
        return self.processes.start(worker, id, self.address, name, args, settings)


@dataclass
class Lab:
    """What parts need: torch's name of the device, what is trained, the servers of a run, the log, and a deadline."""

    device: str
    plan: Plan
    servers: int
    log: Path
    deadline: float
    found: dict[str, Any] = field(default_factory=dict)  # of the small job as it is
    lock: threading.Lock = field(default_factory=threading.Lock)

    def left(self, most: float) -> float:
        """Seconds that something may take."""
        return max(5.0, min(most, self.deadline - time.monotonic()))

    @contextlib.contextmanager
    def processes(self, limit: float) -> Iterator[ProcessCluster]:
        """Forks, which end after so many seconds at the latest."""
        limit = self.left(limit)
        with ProcessCluster(0, 0, timeout=limit) as cluster:

            def end() -> None:
                for started in cluster.started:
                    with contextlib.suppress(ValueError):
                        started.process.kill()

            timer = threading.Timer(limit, end)
            timer.start()
            try:
                yield cluster
            finally:
                timer.cancel()
                timer.join()

    @contextlib.contextmanager
    def cluster(
        self, workers: int = 2, servers: int = 2, limit: float = 60.0, **terms: Any
    ) -> Iterator[Cluster]:
        """A cluster of forks."""
        sizes = {"workers_start": workers, "workers_max": workers, "servers": servers}
        with self.processes(limit) as processes:
            yield Cluster(processes, **{"heartbeat": 60.0, **sizes, **terms})

    def alone(self, name: str, *args: Any, limit: float = 60.0, **settings: Any) -> Any:
        """What a function of `gpu_member` returns in a process of its own."""
        with self.processes(limit) as processes:
            return processes.answer(processes.start(call, name, args, settings))

    def together(self, count: int, name: str, *args: Any) -> list[Any]:
        """The same from so many processes at once, which begin together."""
        with self.processes(60.0) as processes:
            started = [processes.start(call, name, args, {}) for _ in range(count)]
            for one in started:
                processes.answer(one)
            for one in started:
                one.pipe.send("go")
            return [processes.answer(one) for one in started]

    def train(self, how: dict[str, Any] | None = None, device: str = "", limit: float = 60.0, **settings: Any) -> Any:
        """What the small job gives in one process; `how` and `settings` as of `gpu_member.train`."""
        return self.alone("train", device or self.device, how or {}, limit=limit, **settings)

    def usual(self) -> dict[str, Any]:
        """What the small job gives in one process as it is, made once."""
        with self.lock:
            self.found = self.found or self.train()
        return self.found

    def program(self, *argv: str, limit: float) -> None:
        """Run a program to its end. CheckFailed with its last words."""
        with self.log.open("ab") as log, tempfile.TemporaryFile() as said:
            process = subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status: object = process.wait(self.left(limit))
            except subprocess.TimeoutExpired:
                status = f"no end after {self.left(limit):.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said.seek(0)
            words = said.read()
            log.write(words)
        if status:
            raise CheckFailed(f"{' '.join(argv[1:4])}: {status}: {words[-600:].decode(errors='replace')}")


# ---- Checks ----------------------------------------------------------------------------------------------------


def same(one: Any, other: Any, what: str) -> str:
    """A sentence if both are equal."""
    if one != other:
        raise CheckFailed(f"{what}: {str(one)[:60]} and {str(other)[:60]}")
    return f"equal: {what}"


def close(ours: Sequence[float], theirs: Sequence[float], within: float, what: str) -> str:
    """A sentence if all losses are as close as that, relatively."""
    if len(ours) != len(theirs) or not all(map(math.isfinite, ours)):
        raise CheckFailed(f"{what}: losses {ours}, {theirs}")
    most = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    if most > within:
        raise CheckFailed(f"{what}: losses differ by up to {most:.2g} of them")
    return f"losses differ by up to {most:.2g} of them: {what}"


HOLD: dict[str, Any] = {"precision": "bf16", "memory.hold": "bf16"}


def tests(lab: Lab) -> str:
    if lab.device == "cpu":
        return "left out: there is no GPU"
    path = FOLDER.parent / "tests" / "test_cuda.py"
    lab.program(sys.executable, "-m", "pytest", "-q", "--noconftest", "-o", "addopts=", str(path), limit=90.0)
    return "tests/test_cuda.py passes"


def loss_on_the_cpu(lab: Lab) -> str:
    moved, here = lab.train({"loss on the CPU": True}), lab.usual()
    return close(moved["losses"], here["losses"], 1e-3, "with the loss on the CPU, and on the device")


def wrap(lab: Lab) -> str:
    ours, plain = (lab.alone("wrapped", lab.device, 6, ours=ours) for ours in (True, False))
    return close(ours, plain, 1e-3, "rp.wrap that logs numbers, and plain PyTorch")


def hold_and_stop(lab: Lab) -> str:
    stopped = lab.train({"stop": 3}, **HOLD)
    same(stopped["types"], ["torch.float32"], "the types of the parameters after run.stop, and fp32")
    whole = lab.train(**{**HOLD, "steps": len(stopped["losses"]) // 2})
    return same(stopped["hash"], whole["hash"], "the masters after run.stop, and after a job of as many steps")


def bits(lab: Lab) -> str:
    same(lab.alone("sums", lab.device), lab.alone("sums", "cpu"), "sums, products and casts on device and host")
    codecs: tuple[dict[str, Any], ...] = ({}, {"codec": Bf16(), "down": Bf16()})
    for codec in codecs:
        there, here = (lab.alone("bits", device, steps=4, **codec) for device in (lab.device, "cpu"))
        same(there, here, f"the tree of 5 replicas, {'bf16' if codec else 'fp32'}, on device and host")
    return "equal on device and host, denormals too: sums, casts, the tree of 5 replicas, in fp32 and bf16"


def one_by_two(lab: Lab) -> str:
    return same(two_workers(lab), lab.usual()["hash"], "2 workers x 1 replica, and 1 x 2")


def two_workers(lab: Lab) -> Any:
    with lab.cluster() as cluster:
        workers = [cluster.worker("train", lab.device, {}) for _ in range(2)]
        first, second = (cluster.processes.answer(worker)["hash"] for worker in workers)
    same(first, second, "the two workers' weights")
    return first


def kill_worker(lab: Lab) -> str:
    with lab.cluster(replication=2) as cluster:
        survivor = cluster.worker("train", lab.device, {})
        killed = cluster.worker("train", lab.device, {"kill": 5})
        got = cluster.processes.answer(survivor)["hash"]
        same(killed.process.exitcode, -signal.SIGKILL, "the killed worker's status, and that of a kill")
    return same(got, lab.usual()["hash"], "a worker killed in backward, and nobody")


def kill_server(lab: Lab) -> str:
    with lab.cluster(replication=2) as cluster:
        first, second = (cluster.worker("train", lab.device, how) for how in ({"pause": 5}, {}))
        cluster.processes.answer(first)
        cluster.servers[0].process.kill()
        first.pipe.send("go")
        got = [cluster.processes.answer(worker)["hash"] for worker in (first, second)]
    return same(got, [lab.usual()["hash"]] * 2, "a server killed in backward, and nobody")


def leave(lab: Lab, *, stopped: bool = False) -> str:
    with lab.cluster(replication=2, heartbeat=3.0) as cluster:
        leaves, stays = (
            cluster.worker("train", lab.device, how, steps=40) for how in ({"leave": 5, "pause": 4}, {})
        )
        cluster.processes.answer(leaves)
        leaves.pipe.send("go")
        cluster.processes.answer(leaves)
        if stopped:
            os.kill(cluster.servers[0].process.pid or 0, signal.SIGSTOP)
        leaves.pipe.send("go")
        began = time.monotonic()
        leaves.process.join(20.0)
        seconds, status = time.monotonic() - began, leaves.process.exitcode
        if status != 0 or seconds > 10.0 or reported(leaves):
            raise CheckFailed(f"{seconds:.1f} s after SIGTERM in backward the worker's status is {status}")
        got = cluster.processes.answer(stays)["hash"]
    same(got, lab.train(steps=40)["hash"], "a worker that left in backward, and nobody")
    return f"a worker told to leave in backward ends after {seconds:.1f} s, and the bytes are the same"


def reported(process: ClusterProcess) -> bool:
    """Whether it has computed on to the job's end."""
    with contextlib.suppress(EOFError, OSError):
        return bool(process.pipe.poll() and process.pipe.recv())
    return False


def fp16(lab: Lab) -> str:
    settings: dict[str, Any] = {"precision": "fp16", "loss_scale": rp.LossScaling(init_scale=1024.0, growth_interval=3)}
    ours, theirs = lab.train(**settings)["losses"], lab.alone("scaled", lab.device, **settings)
    return close(ours, theirs, 0.02, "fp16, and torch.amp.GradScaler")


def streamed_is_local(lab: Lab) -> str:
    kinds: list[dict[str, Any]] = [{"memory.parameters": "streamed"}, {"memory.parameters": "local"}]
    got = [lab.train({"evaluate": 10}, **kind)["digest"] for kind in kinds]
    same(bool(got[0]), True, "an evaluation was made, and one has to be")
    return same(got[0], got[1], "streamed parameters, and local ones")


def standby(lab: Lab) -> str:
    with lab.cluster() as cluster:
        workers = [cluster.worker("train", lab.device, {"evaluate": 4, "together": True}) for _ in range(3)]
        for answered in (cluster.processes.answer, lambda worker: worker.pipe.send("go")):
            for worker in workers:
                answered(worker)
        found = [cluster.processes.answer(worker) for worker in workers]
    idle = [one for one in found if not one["losses"]]
    if not any(one["evaluated"] for one in idle):
        raise CheckFailed(f"no standby has evaluated: {[one['evaluated'] for one in found]}")
    return same({one["hash"] for one in found}, {lab.usual()["hash"]}, "evaluations on a standby, and none")


def compiled(lab: Lab, what: str, **options: Any) -> str:
    options = {"backend": "eager"} if lab.device == "cpu" else options
    how = {"dropout": 0.0, "compile": what, "options": options}
    got, plain = (lab.train(how, limit=100.0, steps=5)["losses"] for how in (how, {"dropout": 0.0}))
    return close(got, plain, 0.01, "compiled, and not")


def accumulate(lab: Lab) -> str:
    cut, whole = (lab.train({"dropout": 0.0}, **HOLD, accumulate=n)["losses"] for n in (4, 1))
    means = [sum(cut[at : at + 4]) / 4 for at in range(0, len(cut), 4)]
    return close(means, whole, 0.02, 'hold="bf16", accumulate=4, and 1')


def current_device(lab: Lab) -> str:
    named = "cpu" if lab.device == "cpu" else "cuda:0"
    return same(lab.train(device=named)["hash"], lab.usual()["hash"], f"a model on {named}, and on {lab.device}")


def local_steps(lab: Lab) -> str:
    settings: dict[str, Any] = {"sync": rp.LocalSteps(5), "replicas": 1}
    got = lab.train(**settings)
    return same(got["hash"], lab.train(**settings)["hash"], "a job with local steps, and the same again")


CHECKS: dict[str, Callable[[Lab], str]] = {
    "tests": tests, "loss on the CPU": loss_on_the_cpu, "rp.wrap": wrap, "hold and stop": hold_and_stop, "bits": bits,
    "1 x 2 and 2 x 1": one_by_two, "kill a worker": kill_worker, "kill a server": kill_server, "fp16": fp16,
    "streamed": streamed_is_local, "standby": standby, "compiled blocks": partial(compiled, what="blocks"),
    "compiled": partial(compiled, what="whole"),
    "reduce-overhead": partial(compiled, what="whole", mode="reduce-overhead"), "SIGTERM": leave,
    "SIGTERM, a server stopped": partial(leave, stopped=True), "accumulate": accumulate,
    "current device": current_device, "local steps": local_steps,
}  # fmt: skip

