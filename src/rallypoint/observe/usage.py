"""What this machine and this process have used until now: processor, memory, disks, network, GPUs, links."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rallypoint.core.protocol import MOST_GPUS, GpuSample

_LOOPBACK = "lo"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def most_files() -> int:
    """How many files this process may open; 2^53 where there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 53 if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class Usage:
    """Counters that only rise, and sizes as they are. Times in seconds, sizes in bytes.

    Attributes:
        busy, capacity: processor time that was used, and that there was, on all cores together.
        used, total: memory.
        read, written: of all disks.
        sent, received: over all network interfaces but loopback.
        own_busy, own_memory: this process's processor time and resident memory.
        gpus: those that this process may see; none where nothing reads them (``nvidia-ml-py`` does).
    """

    busy: float
    capacity: float
    used: int
    total: int
    read: int
    written: int
    sent: int
    received: int
    own_busy: float
    own_memory: int
    gpus: tuple[GpuSample, ...] = ()


def can_read() -> bool:
    return importlib.util.find_spec("psutil") is not None


def usage(nvidia: Any = None) -> Usage:
    """Return the usage as it is now. It takes about a millisecond. `nvidia`: what `nvidia_library` has returned.

    What the system does not tell is 0. Call it only if `can_read()`.
    """
    import psutil

    times, memory, own = psutil.cpu_times(), psutil.virtual_memory(), psutil.Process()
    capacity = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # user has those already
    idle = times.idle + getattr(times, "iowait", 0.0)
    disks, wires = None, {}
    with contextlib.suppress(OSError, RuntimeError, psutil.Error):  # a container may hide them
        disks = psutil.disk_io_counters()
    with contextlib.suppress(OSError, RuntimeError, psutil.Error):
        wires = psutil.net_io_counters(pernic=True)
    outside = [wire for name, wire in wires.items() if name != _LOOPBACK]
    own_times = own.cpu_times()
    return Usage(
        busy=capacity - idle, capacity=capacity, used=memory.total - memory.available, total=memory.total,
        read=disks.read_bytes if disks else 0, written=disks.write_bytes if disks else 0,
        sent=sum(wire.bytes_sent for wire in outside), received=sum(wire.bytes_recv for wire in outside),
        own_busy=own_times.user + own_times.system, own_memory=own.memory_info().rss,
        gpus=() if nvidia is None else _gpus(nvidia),
    )  # fmt: skip


def nvidia_library() -> Any:
    """Return the module that reads NVIDIA's GPUs (``pynvml``, of the package nvidia-ml-py), ready for use.

    None if it is not installed, or there is no such GPU.
    """
    try:
        pynvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpus(nvidia: Any) -> tuple[GpuSample, ...]:
    try:
        handles = [nvidia.nvmlDeviceGetHandleByIndex(i) for i in range(min(MOST_GPUS, nvidia.nvmlDeviceGetCount()))]
        return tuple(_gpu(nvidia, handle) for handle in handles)
    except nvidia.NVMLError:
        return ()  # a driver that fails: the next look may find it again


def _gpu(nvidia: Any, handle: Any) -> GpuSample:
    memory = nvidia.nvmlDeviceGetMemoryInfo(handle)
    return GpuSample(min(1.0, nvidia.nvmlDeviceGetUtilizationRates(handle).gpu / 100), memory.used, memory.total)


class LinkUsage(NamedTuple):
    """The connections to one address: bytes until now, and the round trip (s; 0: unknown)."""

    sent: int = 0
    received: int = 0
    round_trip: float = 0.0


class LinkPace(NamedTuple):
    """Bytes that the other side has acknowledged until now, and seconds in which some were on their way."""

    acknowledged: int = 0
    busy: float = 0.0


class Flow:
    """The bytes of one connection. One thread adds to `sent`, another to `received`; any may read.

    `address`: where it was dialed; "" if it was accepted. `round_trip` returns seconds; `pace` what it says.
    """

    __slots__ = ("address", "pace", "received", "round_trip", "sent")

    def __init__(
        self, address: str = "", round_trip: Callable[[], float] = lambda: 0.0, pace: Callable[[], LinkPace] = LinkPace
    ) -> None:
        self.sent = self.received = 0
        self.address, self.round_trip, self.pace = address, round_trip, pace


class Traffic:
    """The bytes of all connections of a transport, those that have ended included. Thread-safe.

    Counting costs a connection one addition for each system call, and no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Flow, None] = {}
        self._ended = Flow()

    def opened(
        self, address: str = "", round_trip: Callable[[], float] = lambda: 0.0, pace: Callable[[], LinkPace] = LinkPace
    ) -> Flow:
        """A connection begins. Returns what it counts in. For the arguments see `Flow`."""
        flow = Flow(address, round_trip, pace)
        with self._lock:
            self._open[flow] = None
        return flow

    def closed(self, flow: Flow) -> None:
        """That connection has ended: it counts no more. May be called more than once."""
        with self._lock:
            if flow in self._open:
                del self._open[flow]
                self._ended.sent += flow.sent
                self._ended.received += flow.received

    def links(self) -> dict[str, LinkUsage]:
        """The links that are open and were dialed, by address."""
        with self._lock:
            flows = [flow for flow in self._open if flow.address]
        found: dict[str, LinkUsage] = {}
        for flow in flows:
            also = found.get(flow.address, LinkUsage())
            round_trip = max(also.round_trip, flow.round_trip())
            found[flow.address] = LinkUsage(also.sent + flow.sent, also.received + flow.received, round_trip)
        return found

    def paces(self) -> dict[Flow, LinkPace]:
        with self._lock:
            flows = [*self._open]
        return {flow: flow.pace() for flow in flows}

    def totals(self) -> tuple[int, int]:
        """The bytes sent and received until now, by all connections together."""
        with self._lock:
            flows = [self._ended, *self._open]
            return sum(flow.sent for flow in flows), sum(flow.received for flow in flows)
