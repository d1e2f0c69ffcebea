"""Everything that only a machine with a GPU can tell: facts, correctness, what a step costs, a model that does not fit.

    python benchmarks/gpu.py                           # at most 8 minutes; a second run makes what is not there yet
    python benchmarks/gpu.py --only check --again      # only parts whose names begin so, and those that are there too
    python benchmarks/gpu.py --cpu                     # the same on the CPU, with tiny sizes: does the script work?

Each part's result is in the JSON file as soon as it is there. What the parts' processes say is in a file beside it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from gpu_checks import CHECKS, FOLDER, CheckFailed, Lab
from gpu_member import Plan
from rallypoint.testing import processes
from rallypoint.testing.processes import ClusterFailed

GPU = Plan("cuda", 24, 1024, 16, 50304, 1024, 16, (1, 4, 32), 3.0, 36.0)  # 355 M parameters
TINY = Plan("cpu", 2, 80, 2, 256, 64, 2, (1, 2, 4), 0.1, 30.0, round=6)  # 0.2 M
STREAMED = {"small": 0.2e9, "large": 1.5e9}  # parameters
SERVED = 24  # bytes of the hosts' memory for each parameter: master, AdamW's state, two versions, what is under way
_LEAST_S = 10.0  # a part has


class Part(msgspec.Struct):
    """One part's result. `outcome`: ok, failed (it is not so) or error (it could not be found out)."""

    outcome: str
    says: str
    seconds: float
    figures: Any = None


# ---- Facts -----------------------------------------------------------------------------------------------------


def card(lab: Lab) -> dict[str, Any]:
    """The card, its driver, torch, the host's memory."""
    found: dict[str, Any] = lab.alone("card", lab.device)
    query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current",
             "--format=csv,noheader"]  # fmt: skip
    with contextlib.suppress(OSError):
        found["driver, PCIe"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {**found, "host GiB free": available() / 2**30}


def available() -> int:
    """Bytes of the host's memory that are free for use: its own, or the control group's."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


def facts(lab: Lab) -> dict[str, Callable[[], Any]]:
    """Measurements by name, in the order in which they are made, one after the other."""
    tiny = lab.device == "cpu"
    mib, counts = (8, (1, 2)) if tiny else (512, (1, 4, 16))

    def adamw() -> dict[str, float]:
        return {
            f"{kind}, {count} processes": max(lab.together(count, "adamw", kind, 4 if tiny else 64, 2 if tiny else 4))
            for kind in ("foreach", "fused") for count in counts
        }  # fmt: skip

    return {
        "card": lambda: card(lab),
        "copies, GB/s": lambda: lab.alone("copies", lab.device, mib),
        "host memory, GB/s": lambda: {f"{n} threads": lab.alone("memory", n, 2 * mib) for n in counts},
        "AdamW, ms a MiB": adamw,
        "loopback, GB/s": lambda: {f"{n} connections": lab.alone("loopback", n, 4 * mib) for n in (1, 4)},
        "shared memory, GB/s": lambda: {"1 thread": lab.alone("shared", mib)},
    }


# ---- What a step costs -----------------------------------------------------------------------------------------

ROWS = {
    "plain": "plain PyTorch", "alone": "python train.py", "fp32": "run, fp32 on the wire",
    "bf16": "run, bf16 on the wire", "hold": 'run, hold="bf16"', "allreduce": "run, AllReduce",
    "local": "run, LocalSteps",
}  # fmt: skip


def trained(lab: Lab, name: str, row: str, plan: Plan, limit: float) -> list[dict[str, float]]:
    """Train the GPT as a row says; the figures of each number of tokens."""
    if lab.device == "cpu" and row not in ("plain", "alone", "fp32"):  # as forks: imports take longest
        arguments = (row, plan) if name == "tax" else (plan,)
        with lab.cluster(workers=1, servers=1, limit=limit) as cluster:
            found: list[dict[str, float]] = cluster.processes.answer(cluster.worker(name, *arguments))
            return found
    with tempfile.TemporaryDirectory() as folder:
        member = [str(FOLDER / "gpu_member.py"), name, f"{folder}/out", row, msgspec.json.encode(plan).decode()]
        run = ["-m", "rallypoint.cli", "run", "--workers", "1", "--servers", str(lab.servers), "--replication", "1",
               "--snapshots", "none", "--no-watch", "--folder", f"{folder}/run"]  # fmt: skip
        lab.program(sys.executable, *(run if row not in ("plain", "alone") else []), *member, limit=limit)
        return msgspec.json.decode(Path(folder, "out").read_bytes(), type=list[dict[str, float]])


def streamed(lab: Lab, size: str) -> list[dict[str, float]]:
    """A GPT of about so many parameters, or as many as the host's memory allows."""
    plan = msgspec.structs.replace(lab.plan, passes=(1,), seconds=10.0 * (lab.device != "cpu"))
    if lab.device != "cpu":
        width = 2048
        parameters = min(STREAMED[size], 0.7 * available() / SERVED)
        layers = max(1, round((parameters - plan.vocabulary * width) / (12 * width * width)))
        memory = max(10 << 30, int(9 * parameters))  # with AdamW's state it would be 16 bytes for each parameter
        plan = msgspec.structs.replace(plan, layers=layers, width=width, batch=4, memory=memory)
    return trained(lab, "streamed", size, plan, 150.0)


# ---- All of it -------------------------------------------------------------------------------------------------


class Results:
    """The parts' results: in a file, as soon as they are there."""

    def __init__(self, path: Path, lab: Lab, only: str, *, again: bool) -> None:
        self.path, self._lab, self._only, self._again = path, lab, only, again
        self.parts: dict[str, Part] = {}
        self._lock = threading.Lock()
        if path.exists():
            self.parts = msgspec.json.decode(path.read_bytes(), type=dict[str, Part])

    def make(self, name: str, part: Callable[[], Any]) -> None:
        """Make a part, unless it is there and was not in error, or there is no time left."""
        there = name in self.parts and self.parts[name].outcome == "ok" and not self._again
        if there or not name.startswith(self._only) or time.monotonic() > self._lab.deadline - _LEAST_S:
            return
        began, made = time.monotonic(), Part("ok", "", 0.0)
        try:
            made.figures = part()
            if isinstance(made.figures, str):
                made.says, made.figures = made.figures, None
        except CheckFailed as error:
            made.outcome, made.says = "failed", str(error)
        except Exception as error:  # whatever it is, the others are made
            lines = str(error).strip().splitlines() or [type(error).__name__]
            made.outcome, made.says = "error", lines[-1]
            with self._lab.log.open("a") as log:
                log.write(f"--- {name}: {error}\n")
        made.seconds = time.monotonic() - began
        with self._lock:
            self.parts[name] = made
            temporary = self.path.with_suffix(".new")
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self.parts)) + b"\n")
            temporary.replace(self.path)
            print(f"{made.seconds:6.1f} s  {made.outcome:6}  {name}  {made.says[:200]}", flush=True)

    def of(self, kind: str) -> dict[str, Part]:
        """The parts of a kind, by the rest of their names."""
        return {name.partition(": ")[2]: part for name, part in self.parts.items() if name.startswith(f"{kind}: ")}


def tables(results: Results) -> Iterator[Table]:
    """All that is known."""
    table = Table("fact", "", title="facts", title_justify="left")
    for name, part in results.of("fact").items():
        figures = part.figures or {part.outcome: part.says}
        values = {what: f"{value:.3g}" if isinstance(value, float) else str(value) for what, value in figures.items()}
        table.add_row(name, ", ".join(f"{what}: {value}" for what, value in values.items()))
    yield table
    table = Table("check", "", "s", "", title="correctness", title_justify="left")
    for name, part in results.of("check").items():
        table.add_row(name, part.outcome, f"{part.seconds:.0f}", part.says)
    yield table
    rows = results.of("tax")
    plain = {one["tokens"]: one["seconds"] for one in (rows["plain"].figures if "plain" in rows else None) or ()}
    columns = ("", "tokens an update", "s a step", "to plain", "GB at most", "steps", "")
    table = Table(*columns, title="what a step costs", title_justify="left")
    for name, part in rows.items():
        for one in part.figures or [dict[str, float]()]:
            table.add_row(ROWS[name], *cells(one, plain), part.says[-200:])
    yield table
    columns = ("", "parameters", "tokens/s", "s a step", "GB at most", "steps", "GB allowed")
    table = Table(*columns, title="streamed parameters", title_justify="left")
    for name, part in results.of("streamed").items():
        for one in part.figures or ():
            rate = one["tokens"] / one["seconds"]
            table.add_row(name, f"{one['parameters'] / 1e6:.1f} M", f"{rate:.0f}", f"{one['seconds']:.3f}",
                          f"{one['peak'] / 1e9:.2f}", f"{one['steps']:.0f}", f"{one['allowed'] / 1e9:.1f}")  # fmt: skip
        if not part.figures:
            table.add_row(name, "", "", "", "", "", part.says[-200:])
    yield table


def cells(one: dict[str, float], plain: dict[float, float]) -> list[str]:
    """A row's figures as text."""
    if not one:
        return [""] * 5
    ratio = f"{one['seconds'] / plain[one['tokens']]:.2f}" if one["tokens"] in plain else ""
    return [f"{one['tokens']:.0f}", f"{one['seconds']:.3f}", ratio, f"{one['peak'] / 1e9:.2f}", f"{one['steps']:.0f}"]


def prepare(lab: Lab) -> None:
    """Start the process that the parts are forks of. It never uses the GPU; what it and they say goes to the log.

    Where forks cannot use the GPU all the same, parts are new interpreters.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or a fork could not use it after `is_available` was asked
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the forks are daemons, and start no processes
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    processes.fork_server()
    kept = os.dup(1), os.dup(2)
    with lab.log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    forkserver.ensure_running()
    for number, before in enumerate(kept, 1):
        os.dup2(before, number)
        os.close(before)
    try:
        lab.alone("card", lab.device)
    except ClusterFailed:
        processes.fork_server = partial(multiprocessing.get_context, "spawn")  # type: ignore[assignment]
        try:
            lab.alone("card", lab.device)
        except ClusterFailed as error:
            sys.exit(f"error: {str(error).strip().splitlines()[-1]} (--cpu tries this script without a GPU)")


def command(
    cpu: Annotated[bool, typer.Option("--cpu", help="On the CPU, with tiny sizes, in 90 s: does this work?")] = False,
    again: Annotated[bool, typer.Option("--again", help="Make parts that are there once more.")] = False,
    only: Annotated[str, typer.Option(help="Only parts whose names begin so: fact, check, tax, streamed.")] = "",
    minutes: Annotated[float, typer.Option(help="Begin nothing after so many minutes.")] = 8.0,
    servers: Annotated[int, typer.Option(min=1, help="Servers of a run.")] = 4,
    json: Annotated[Path, typer.Option(help="The results' file.")] = Path("gpu.json"),
) -> None:
    """Find out all that needs a GPU."""
    lab = Lab("cpu" if cpu else "cuda", TINY if cpu else GPU, 1 if cpu else servers, json.with_suffix(".log"),
              time.monotonic() + 60 * minutes)  # fmt: skip
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    prepare(lab)
    results = Results(json, lab, only, again=again)
    for name, fact in facts(lab).items():
        results.make(f"fact: {name}", fact)
    with ThreadPoolExecutor(2 if cpu else 4) as pool:
        for name, check in CHECKS.items():
            pool.submit(results.make, f"check: {name}", partial(check, lab))
    for row in ROWS:
        results.make(f"tax: {row}", partial(trained, lab, "tax", row, lab.plan, 90.0))
    for size in ("small",) if cpu else STREAMED:
        results.make(f"streamed: {size}", partial(streamed, lab, size))
    console = Console(highlight=False, width=160)
    for table in tables(results):
        console.print(table)
    bad = [name for name, part in results.parts.items() if part.outcome != "ok"]
    print(f"{len(results.parts) - len(bad)} parts are ok, {len(bad)} are not: {', '.join(bad) or 'none'}; {json}")


if __name__ == "__main__":
    typer.run(command)
