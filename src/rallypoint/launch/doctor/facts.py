"""The facts about a machine that matter to a job. Collecting them changes nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import msgspec

from rallypoint.core.typed import Count, Name
from rallypoint.net.frames import PROTOCOL

_GPU_S = 20.0  # a driver that does not answer is a finding, not a reason to wait
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU as its driver tells of it. `memory` is in bytes."""

    name: Name
    driver: Name
    memory: Count


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is true of one machine.

    Attributes:
        host: its name.
        rallypoint: the version of this package; `protocol`: the number that both sides of a link must have.
        python: its version; `torch`: its version, "" if there is none.
        processor: its model; `capability`: which instructions torch uses ("AVX2", "AVX512", ...).
        cores: those that this process may use; `memory`: bytes; `files`: how many a process may open.
        threads: the environment variables that set a number of threads.
        cubic: is the congestion control there that links ask for?
        clock: unix time in seconds when it was asked; in a table of machines, how far it is ahead of the first one's.
        gpus: what `nvidia-smi` lists; `gpu_trouble`: why it could not.
        cuda: what torch says: the version of CUDA that it was built for, "" for none.
        gpus_seen: how many GPUs torch can use.
        kernels: the digest of a small computation, in fp32 and bf16: machines with another one compute other bytes. On
            the first GPU that torch can use, else on the processor, with one thread; "" without torch.
    """

    host: Name
    rallypoint: Name
    protocol: Count
    python: Name
    torch: Name
    processor: Name
    capability: Name
    cores: Count
    memory: Count
    files: Count
    threads: dict[Name, Name]
    cubic: bool
    clock: float
    gpus: Annotated[tuple[Gpu, ...], msgspec.Meta(max_length=256)] = ()
    gpu_trouble: Name = ""
    cuda: Name = ""
    gpus_seen: Count = 0
    kernels: Name = ""


def collect() -> Facts:
    """Collect the facts about this machine. It imports torch, which takes seconds."""
    capability, cuda, seen = _torch()
    gpus, trouble = _gpus()
    return Facts(
        host=socket.gethostname(), rallypoint=_version("rallypoint"), protocol=PROTOCOL,
        python=platform.python_version(), torch=_version("torch"), processor=_processor(), capability=capability,
        cores=_cores(), memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), files=_files(),
        threads={name: os.environ[name] for name in _THREADS if name in os.environ}, cubic=_cubic(),
        clock=time.time(), gpus=gpus, gpu_trouble=trouble, cuda=cuda, gpus_seen=seen,
        kernels=_kernels(seen) if capability else "",
    )  # fmt: skip


def free_bytes(folder: Path) -> int:
    """Return the bytes that this process may still write to the file system where `folder` is, or will be."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(there).free


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _torch() -> tuple[str, str, int]:
    """What torch says of the processor, of CUDA, and how many GPUs it can use."""
    try:
        import torch
    except ImportError:
        return "", "", 0
    return torch.backends.cpu.get_cpu_capability(), torch.version.cuda or "", torch.cuda.device_count()


def _kernels(gpus: int) -> str:
    import torch

    from rallypoint.worker.kernels import kernels_of

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a job says how many there are: machines are not unlike because of their cores
    try:
        return kernels_of("cuda" if gpus else "cpu").hex()
    finally:
        torch.set_num_threads(threads)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _files() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 53 if soft == resource.RLIM_INFINITY else soft


def _cubic() -> bool:
    try:
        return "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    except OSError:
        return False


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """What the driver lists, and why it could not."""
    if shutil.which("nvidia-smi") is None:
        return (), ""
    argv = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_GPU_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi does not answer: {type(error).__name__}"
    if done.returncode:
        return (), " ".join((done.stdout or done.stderr).split())[:120] or f"nvidia-smi ended with {done.returncode}"
    return gpus_of(done.stdout.splitlines()), ""


def gpus_of(lines: Iterable[str]) -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi has listed: ``NVIDIA H200, 560.35, 143771`` (MiB)."""
    words = [[word.strip() for word in line.split(",")] for line in lines if line.count(",") == 2]
    return tuple(Gpu(name, driver, int(mib) << 20 if mib.isdigit() else 0) for name, driver, mib in words)
