"""What facts mean for a job: findings, each with what to do. Nothing here touches a machine."""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rallypoint.launch.doctor.facts import Facts

FEWEST_FILES = 1024
_CLOCKS_S = 60.0  # nothing compares clocks; but logs of machines that differ more cannot be read side by side
_SLOW = 0.5  # of the median throughput: such a link is what everybody waits for
_TIGHT = 0.25  # of the heartbeat: a longer round trip makes false alarms likely
LITTLE_SPACE = 10 << 30


class Level(enum.IntEnum):
    """How bad a finding is: a BAD one will break a job, or its bytes; a WARNING may cost time."""

    FINE = 0
    WARNING = 1
    BAD = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, and what to do about it ("" if nothing)."""

    level: Level
    text: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """What was measured from one machine to another. `round_trip` in seconds, `rate` in bytes a second; `trouble`: why
    there are no figures."""

    source: str
    target: str
    round_trip: float = 0.0
    rate: float = 0.0
    trouble: str = ""


def of_machine(facts: Facts) -> list[Finding]:
    """What the facts about one machine mean."""
    found = []
    if not facts.torch:
        found.append(Finding(Level.BAD, f"{facts.host} has no torch", "pip install torch (2.9 or newer)"))
    if facts.files < FEWEST_FILES:
        found.append(Finding(
            Level.WARNING, f"{facts.host}: a process may open {facts.files} files",
            f"`ulimit -n {4 * FEWEST_FILES}` before roles start: each link needs one",
        ))  # fmt: skip
    if not facts.cubic:
        found.append(Finding(
            Level.WARNING, f"{facts.host} has no TCP congestion control named cubic, which links ask for",
            "`modprobe tcp_cubic`; without it links use the system's own, and share a line less evenly",
        ))  # fmt: skip
    if facts.gpu_trouble:
        found.append(Finding(Level.BAD, f"{facts.host}: {facts.gpu_trouble}", "mend the driver, or train on the CPU"))
    if facts.gpus and facts.gpus_seen < len(facts.gpus):
        found.append(_unused(facts))
    return found


def _unused(facts: Facts) -> Finding:
    listed = f"{facts.host}: the driver lists {_count(len(facts.gpus), 'GPU')}, torch can use {facts.gpus_seen}"
    if not facts.cuda:
        return Finding(Level.WARNING, listed, "this torch is a CPU build: install one for CUDA to train on them")
    driver = facts.gpus[0].driver
    return Finding(
        Level.WARNING, listed, f"CUDA_VISIBLE_DEVICES, or a driver ({driver}) too old for CUDA {facts.cuda}"
    )


_SAME: tuple[tuple[str, Level, Callable[[Facts], str], str], ...] = (
    ("protocol numbers", Level.BAD, lambda facts: str(facts.protocol), "install the same rallypoint everywhere"),
    ("versions of rallypoint", Level.WARNING, lambda facts: facts.rallypoint, "install the same one everywhere"),
    ("versions of torch", Level.WARNING, lambda facts: facts.torch.partition("+")[0],
     "the same one everywhere: another may add up in another order, and then bytes depend on who computes what"),
    ("processor capabilities", Level.WARNING, lambda facts: facts.capability,
     "ATEN_CPU_CAPABILITY=avx2 for every process makes torch's kernels the same; BLAS may still differ by processor, "
     "so the bytes are promised only among like machines"),
    ("numbers of threads", Level.WARNING, lambda facts: facts.threads.get("OMP_NUM_THREADS", "not set"),
     "a job decides how many it computes with (--threads); only `python train.py` alone takes OMP_NUM_THREADS (or 1)"),
    ("kinds of GPU", Level.WARNING, lambda facts: ", ".join(sorted({gpu.name for gpu in facts.gpus})) or "none",
     "a replica's bytes depend on the kind of device that computes it: all of one kind for the same bytes"),
    ("results of the probe computation", Level.WARNING, lambda facts: facts.kernels[:12],
     "these machines compute other bytes from the same numbers: their workers cannot audit each other, and a "
     "replica's bytes depend on who computes it"),
)  # fmt: skip


def of_cluster(machines: Sequence[Facts]) -> list[Finding]:
    """What differs among machines, and matters."""
    found = []
    for what, level, value, todo in _SAME:
        hosts = Counter(value(facts) for facts in machines)
        if len(hosts) > 1:
            groups = ", ".join(f"{name or 'none'} ({_count(count, 'machine')})" for name, count in hosts.most_common())
            found.append(Finding(level, f"different {what}: {groups}", todo))
    clocks = [facts.clock for facts in machines]
    if clocks and max(clocks) - min(clocks) > _CLOCKS_S:
        apart = f"the machines' clocks are {max(clocks) - min(clocks):.0f} s apart"
        todo = "no role compares clocks, but logs do, and TLS certificates have dates: set them by NTP"
        found.append(Finding(Level.WARNING, apart, todo))
    return found


def of_links(links: Sequence[Link], heartbeat: float) -> list[Finding]:
    """What the measured links mean for a job whose members may be silent for `heartbeat` seconds."""
    found = []
    rates = [link.rate for link in links if not link.trouble]
    median = statistics.median(rates) if rates else 0.0
    for link in links:
        name = f"{link.source} -> {link.target}"
        if link.trouble:
            found.append(Finding(Level.BAD, f"{name}: {link.trouble}", "open the port, or --advertise another address"))
            continue
        if link.round_trip > _TIGHT * heartbeat:
            found.append(Finding(
                Level.WARNING, f"{name}: a round trip takes {link.round_trip:.1f} s",
                f"a --heartbeat of {heartbeat:g} s gives members up too easily there: use a longer one",
            ))  # fmt: skip
        if len(rates) > 2 and link.rate < _SLOW * median:
            found.append(Finding(
                Level.WARNING, f"{name}: {bits(link.rate)}, where the median link has {bits(median)}",
                "a synchronous step waits for its slowest link: mend it, or see docs/choosing.md for what waits less",
            ))  # fmt: skip
    return found


def of_space(where: str, free: int, rate: str) -> list[Finding]:
    """What the free bytes for snapshots mean; `rate` is a phrase, how fast one can write there."""
    if free >= LITTLE_SPACE:
        return [Finding(Level.FINE, f"{where} has {free / 1e9:.0f} GB free for snapshots, written {rate}")]
    return [Finding(
        Level.WARNING, f"{where} has {free / 1e9:.1f} GB free for snapshots, written {rate}",
        "a snapshot takes three times the model in fp32 (with Adam), and --keep-last of them stay",
    )]  # fmt: skip


def bits(rate: float) -> str:
    """A rate in bytes a second as people name a link's: "941 Mbit/s"."""
    return f"{8e-9 * rate:.1f} Gbit/s" if rate >= 1.25e9 else f"{8e-6 * rate:.0f} Mbit/s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
