"""What runs in processes of its own for `gpu.py`: measurements, small jobs that are compared, and the trained GPTs.

``gpu_member.py tax|streamed OUT ROW PLAN`` trains a GPT and writes its figures. All else is called in forks.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

import rallypoint as rp
from rallypoint.codec.spec import Bf16
from rallypoint.config import resolve
from rallypoint.launch import environment
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.recipes import gpt_model
from rallypoint.testing.reference import loss_scales
from rallypoint.worker.tensors import weights_hash

MIB = 1 << 20
CPU = torch.device("cpu")
pipe: Connection | None = None  # to `gpu.py`, in a fork


def joined() -> AbstractContextManager[Any]:
    """The job of this process: that of its cluster, or one with two servers inside of it."""
    return rp.join() if environment.COORDINATOR in os.environ else EmbeddedJob(servers=2)


def meet(what: str) -> None:
    """Tell `gpu.py`, and wait until it answers."""
    assert pipe is not None
    pipe.send(("value", what))
    pipe.recv()


# ---- Facts -----------------------------------------------------------------------------------------------------


def card(device: str) -> dict[str, Any]:
    """The device, and torch."""
    found: dict[str, Any] = {"torch": str(torch.__version__), "python": sys.version.split()[0], "cores": os.cpu_count()}
    if device != "cpu":
        about = torch.cuda.get_device_properties(0)
        found |= {"card": about.name, "GiB": about.total_memory / 2**30, "cards": torch.cuda.device_count()}
        found["cuda"] = torch.version.cuda
    return found


def copies(device: str, mib: int) -> dict[str, float]:
    """GB/s of copies to the host, to the device, and of both at once (the sum), through pinned memory."""
    gpu, words = device != "cpu", mib * MIB // 4
    hosts = [torch.ones(words, pin_memory=gpu) for _ in range(2)]
    there = [torch.ones(words, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if gpu else []  # type: ignore[no-untyped-call]

    def rate(pairs: list[tuple[torch.Tensor, torch.Tensor]], rounds: int = 8) -> float:
        for timed in (False, True):
            began = time.perf_counter()
            for _ in range(rounds if timed else 1):
                for index, (into, values) in enumerate(pairs):
                    with torch.cuda.stream(streams[index]) if gpu else nullcontext():
                        into.copy_(values, non_blocking=True)
            synchronise(device)
        return len(pairs) * rounds * words * 4 / (time.perf_counter() - began) / 1e9

    down, up = (hosts[0], there[0]), (there[1], hosts[1])
    return {"to the host": rate([down]), "to the device": rate([up]), "both": rate([down, up])}


def memory(threads: int, mib: int) -> float:
    """GB/s of the host's memory in a copy by so many threads, what is read and what is written together."""
    torch.set_num_threads(threads)
    one, other = torch.ones(mib * MIB // 4), torch.ones(mib * MIB // 4)
    return best(lambda: one.copy_(other), 5, 2 * mib * MIB)


def best(copy: Callable[[], object], rounds: int, nbytes: int) -> float:
    """GB/s of the best of some rounds."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds) / 1e9


def adamw(kind: str, mib: int, rounds: int) -> float:
    """Milliseconds for each MiB of fp32 parameters, one optimizer for each 1 MiB shard, as servers have."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as servers: else torch asks NVML at each step
    shards = [torch.nn.Parameter(torch.randn(MIB // 4)) for _ in range(mib)]
    steps = [torch.optim.AdamW([shard], lr=1e-3, weight_decay=0.1, **{kind: True}) for shard in shards]  # type: ignore[arg-type]
    for shard, step in zip(shards, steps, strict=True):
        shard.grad = torch.randn(MIB // 4)
        step.step()
    meet("ready")
    began = time.perf_counter()
    for _ in range(rounds):
        for step in steps:
            step.step()
    return (time.perf_counter() - began) / rounds / mib * 1e3


def loopback(connections: int, mib: int) -> float:
    """GB/s of TCP over loopback, on so many connections at once."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        outs = [socket.create_connection(listening.getsockname()) for _ in range(connections)]
        ins = [listening.accept()[0] for _ in range(connections)]

    def receive(one: socket.socket) -> None:
        into = memoryview(bytearray(4 * MIB))
        while one.recv_into(into):
            pass

    def send(one: socket.socket) -> None:
        with one:
            for _ in range(mib // 4):
                one.sendall(chunk)

    chunk = bytes(4 * MIB)
    began = time.perf_counter()
    with ThreadPoolExecutor(2 * connections) as pool:
        pool.map(receive, ins)
        pool.map(send, outs)
    seconds = time.perf_counter() - began
    for one in ins:
        one.close()
    return connections * mib * MIB / seconds / 1e9


def shared(mib: int) -> float:
    """GB/s of a copy into a memfd that is mapped already."""
    values = torch.ones(mib * MIB // 4)
    handle = os.memfd_create("gpu")
    os.ftruncate(handle, mib * MIB)
    into = torch.frombuffer(mmap.mmap(handle, mib * MIB), dtype=torch.float32)
    os.close(handle)
    return best(lambda: into.copy_(values), 5, mib * MIB)


# ---- Small jobs ------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "replicas": 2, "batch": 8, "steps": 10, "seed": 4, "network.shard_bytes": 4096, "optimizer": rp.AdamW(lr=1e-3),
}  # fmt: skip


def build(device: str, dropout: float = 0.1) -> tuple[torch.nn.Sequential, torch.utils.data.TensorDataset]:
    """A small classifier, and its samples."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 200), torch.nn.GELU(), torch.nn.LayerNorm(200), torch.nn.Dropout(dropout),
        torch.nn.Linear(200, 4),
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    return model.to(device), data


def train(device: str, how: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Train it. `how`: what is out of the ordinary; by a step's number, what happens in the middle of its backward."""
    model, data = build(device, how.get("dropout", 0.1))
    at, losses, evaluated, digest = 0, [], list[int](), ""
    for part in model if how.get("compile") == "blocks" else [model] if "compile" in how else []:
        part.compile(**how["options"])

    def within(gradient: torch.Tensor) -> None:
        if at == how.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if at == how.get("pause"):
            how["pause"] = None
            time.sleep(1.0)  # so that every shard is on two servers
            meet("in backward")
        if at == how.get("leave"):
            how["leave"] = None
            meet("leaving")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    if {"kill", "pause", "leave"} & how.keys():
        model[2].register_forward_hook(lambda module, given, made: made.register_hook(within) and None)
    with joined() as job:
        if "together" in how:
            meet("joined")
        run: rp.Run = job.train(model, data, **{**SETTINGS, **settings})
        if "evaluate" in how:

            @run.every(how["evaluate"])
            def evaluate(step: int) -> dict[str, float]:
                nonlocal digest
                evaluated.append(step)
                digest = digest_of(dict(model.named_parameters()))
                return {"sum": float(model(data.tensors[0].to(device)).sum())}

        for micro in run:
            with micro:
                at, (x, y) = micro.step, micro.batch
                scores = model(x)
                if "loss on the CPU" in how:
                    scores, y = scores.cpu(), y.cpu()
                loss = F.cross_entropy(scores, y)
                micro.backward(loss)
            losses.append(float(loss.detach()))
            if at == how.get("stop"):
                run.stop("enough")
    types = sorted({str(parameter.dtype) for parameter in model.parameters()})
    held = how.get("evaluate") is None or settings.get("memory.parameters") != "streamed"
    return {
        "hash": weights_hash(model) if held else "", "digest": digest, "losses": losses, "types": types,
        "evaluated": evaluated,
    }  # fmt: skip


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of all bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def wrapped(device: str, steps: int, *, ours: bool) -> list[float]:
    """The losses of a loop of its own that logs numbers, with `rp.wrap` or without."""
    model, data = build(device, 0.0)
    x, y = (tensor.to(device) for tensor in data.tensors)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    if ours:
        optimizer = rp.wrap(model, optimizer, steps=steps)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if ours:
            optimizer.log(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def scaled(device: str, **settings: Any) -> list[float]:
    """The losses of the small job in plain PyTorch, with torch.amp.GradScaler."""
    model, data = build(device)
    losses: list[float] = []

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        losses.append(float(loss.detach()))
        return loss

    loss_scales(model, data, loss_of, resolve({**SETTINGS, **settings}))
    return losses


class Exact(torch.nn.Module):
    """A parameter whose gradient is the sample itself, so devices must agree in every bit."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(5000))

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return (self.values * sample).sum()


def samples_of_all_sizes() -> torch.Tensor:
    """From 1e-44, which is denormal, to 1."""
    torch.manual_seed(0)
    return torch.randn(40, 5000) * 10.0 ** -torch.linspace(0, 44, 5000, dtype=torch.float64).float()


def bits(device: str, **settings: Any) -> str:
    """A hash of what the trees of 5 replicas here give."""
    model = Exact().to(device)
    with joined() as job:
        data = torch.utils.data.TensorDataset(samples_of_all_sizes())
        run = job.train(model, data, **{**SETTINGS, "replicas": 5, "batch": 1, "optimizer": rp.SGD(lr=1.0), **settings})
        for micro in run:
            with micro:
                micro.backward(model(micro.batch[0][0]))
    return weights_hash(model)


def sums(device: str) -> dict[str, str]:
    """Hashes of the operations on fp32 that have to give the same bits on every device."""
    one, other = samples_of_all_sizes()[:2].to(device)
    denormal = (one != 0) & (one.abs() < torch.finfo(torch.float32).tiny)
    made = {"a sum": one + other, "a product": one * 0.3, "bf16": one.bfloat16(), "bf16 back": one.bfloat16().float()}
    made["denormals"] = denormal & (one * 0.5 + other * 0 != 0)
    return {name: digest_of({name: tensor}) for name, tensor in made.items()}


# ---- A GPT -----------------------------------------------------------------------------------------------------


class Plan(msgspec.Struct, frozen=True):
    """What is trained. `passes` of `batch` samples make a step; `seconds` for each of these numbers, and of a row."""

    device: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    block: int
    batch: int
    passes: tuple[int, ...]
    seconds: float
    row_seconds: float
    round: int = 30  # steps of local steps
    memory: int = 0  # bytes of the device that the process may have; 0: all

    def model(self) -> gpt_model.GPT:
        """The model on torch's default device."""
        gpt_model.VOCABULARY = self.vocabulary
        return gpt_model.GPT(gpt_model.GPTConfig(self.layers, self.heads, self.width, self.block))

    def data(self) -> torch.utils.data.TensorDataset:
        """Random tokens."""
        tokens = torch.randint(0, self.vocabulary, (256, self.block + 1), device=CPU)
        return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])


ROWS: dict[str, dict[str, Any]] = {
    "alone": {}, "fp32": {}, "bf16": {"codec": Bf16(), "down": Bf16()}, "hold": {"memory.hold": "bf16"},
    "allreduce": {"sync": rp.AllReduce()},
}  # fmt: skip
"""Settings by row; "plain" is torch alone, "local" has local steps."""


class Phases:
    """Says how many passes the next step makes, and measures the steps of each number: `found`."""

    def __init__(self, plan: Plan, round: int = 0, warm: int = 3) -> None:
        """`round`: a number of passes is measured for exactly so many steps; 0: for its seconds, at least 3, after
        `warm` steps."""
        self.found: list[dict[str, float]] = []
        self._plan, self._round, self._warm = plan, round, round or warm
        self._phase = self._count = 0
        self._at = self._first = time.monotonic()

    def begin(self) -> int:
        """A step begins. Returns its passes; 0: all is measured."""
        if self._phase == len(self._plan.passes):
            return 0
        done = self._done()
        if done == 0:
            synchronise(self._plan.device)
            self._at = time.monotonic()
            if self._plan.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
        elif done > 0 and self._enough(done):
            self.end()
            return self.begin()
        self._count += 1
        return self._plan.passes[self._phase]

    def end(self) -> None:
        """The steps of this number of passes are over, if they have begun."""
        if self._phase == len(self._plan.passes) or self._done() < 1:
            return
        synchronise(self._plan.device)
        passes, plan, now = self._plan.passes, self._plan, time.monotonic()
        tokens, seconds = passes[self._phase] * plan.batch * plan.block, (now - self._at) / self._done()
        self.found.append({"tokens": tokens, "seconds": seconds, "steps": self._done(), "peak": peak(plan.device)})
        self._phase, self._count = self._phase + 1, 0
        if self._phase < len(passes):
            needed = 4 * seconds * passes[self._phase] / passes[self._phase - 1]
            if not self._round and now - self._first + needed > plan.row_seconds:
                self._phase = len(passes)

    def _done(self) -> int:
        warm = self._warm if self._phase == 0 else 0 if self._round else 1
        return self._count - warm

    def _enough(self, done: int) -> bool:
        if self._round:
            return done == self._round
        return done >= 3 and time.monotonic() - self._at > self._plan.seconds


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def peak(device: str) -> int:
    """Bytes at most: of the device, else of the process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tax(row: str, plan: Plan) -> list[dict[str, float]]:
    """Train the GPT as this row of the table says."""
    torch.manual_seed(0)
    if plan.device == "cpu":
        torch.set_num_threads(1)  # as many as workers have
    with torch.device(plan.device):
        model = plan.model()
    if row == "plain":
        return plain(model, plan)
    phases, steps, settings = Phases(plan), 100_000, ROWS.get(row, {})
    if row == "local":
        plan = msgspec.structs.replace(plan, passes=plan.passes[:2])
        phases, steps, settings = Phases(plan, plan.round), 3 * plan.round, {"sync": rp.LocalSteps(plan.round)}
    return by_job(model, plan, phases, precision="bf16", steps=steps, **settings)


def by_job(model: gpt_model.GPT, plan: Plan, phases: Phases, **settings: Any) -> list[dict[str, float]]:
    """Train it as any script would."""
    with rp.join() as job:
        run = job.train(model, plan.data(), replicas=1, batch=plan.batch, optimizer=rp.AdamW(lr=1e-4), **settings)
        for micro in run:
            passes = phases.begin()
            if not passes:
                run.stop("all is measured")
            with micro:
                for left in reversed(range(passes or 1)):
                    loss = model.loss(*micro.batch) / (passes or 1)
                    micro.backward(loss, more=left > 0)
    phases.end()  # with the last round
    return phases.found


def plain(model: gpt_model.GPT, plan: Plan) -> list[dict[str, float]]:
    """Train it with torch alone."""
    phases, optimizer = Phases(plan), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = (tensor[: plan.batch].to(plan.device) for tensor in plan.data().tensors)
    while passes := phases.begin():
        for _ in range(passes):
            with torch.autocast(plan.device, dtype=torch.bfloat16):
                loss = model.loss(tokens, targets) / passes
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return phases.found


def streamed(plan: Plan) -> list[dict[str, float]]:
    """Train a GPT whose parameters stay on the servers."""
    torch.set_float32_matmul_precision("high")
    with torch.device("meta"):
        model = plan.model()
    if plan.device != "cpu":
        torch.cuda.set_per_process_memory_fraction(plan.memory / torch.cuda.get_device_properties(0).total_memory)
    model.register_buffer("place", torch.zeros(1, device=plan.device), persistent=False)  # says on which device
    settings = {"memory.parameters": "streamed", "memory.recompute": "blocks"}
    found = by_job(model, plan, Phases(plan, warm=2), steps=100_000, **settings)
    return [{**one, "parameters": sum(p.numel() for p in model.parameters()), "allowed": plan.memory} for one in found]


if __name__ == "__main__":
    name, out, row, about = sys.argv[1:]
    given = msgspec.json.decode(about, type=Plan)
    Path(out).write_text(json.dumps(tax(row, given) if name == "tax" else streamed(given)))
