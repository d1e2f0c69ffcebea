"""How large can a job be? Draws the pictures of docs/scale.md, from the arithmetic and from plays of large clusters.

    python benchmarks/scale.py --into docs/images                        # all four; the plays take a few minutes
    python benchmarks/scale.py --into docs/images --largest 1000         # without the largest clusters
    python benchmarks/scale.py --into docs/images --kept figures.json    # what FILE has is not played again

What peers cost is what they publish, or what benchmarks/recovery_peers.py measured; `PEERS` says which.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from rallypoint.core.cluster.state import Phase
from rallypoint.core.plan.failures import daly_period, elastic_goodput, goodput
from rallypoint.core.plan.workload import Workload, transformer
from scale_cluster import BigCluster, Play, Sites, Size, change_bytes, messages_of, round_seconds, sites_seconds
from simulate import ScaleOptions, limits_of, scenario_of

DAY, MBIT, COMPUTE_S = 86400.0, 1e6 / 8, 2.0
SNAPSHOT_S, RESTART_S = 10.0, 600.0  # 12 GB at 0.83 s each (docs/planning.md); 10 minutes: Salpekar et al., 2026
PEERS = {  # seconds in which all wait, for each failure
    "torchft's algorithm at 100,000 GPUs: 3 min (Salpekar et al., 2026)": 180.0,
    "torchft, 4 workers, its time-out of 5 s: 5.3 s (measured here)": 5.26,
}
LEARNERS, HALF_ROUND_S = 8, 100.0  # DiLoCo: learners; seconds of local steps that a learner loses: half of 100 of 2 s
OURS_S = 0.23  # a process that dies: the longest of 20 (docs/performance.md)
MEMBERS = ((100, 10), (300, 30), (1000, 100), (3000, 300), (10000, 1000))  # workers and servers
BETWEEN_FAILURES = (30.0, 60.0, 180.0, 600.0, 1800.0)  # seconds, of the whole job


# ---- what is played ----


def clusters(largest: int) -> list[dict[str, float]]:
    """What the coordinator does for clusters of these sizes: bytes, and seconds of this computer's processor."""
    found = []
    for workers, servers in MEMBERS:
        if workers <= largest:
            found.append(_cluster(workers, servers))
            print(found[-1], flush=True)
    return found


def _cluster(workers: int, servers: int) -> dict[str, float]:
    size = Size(workers=workers, servers=servers, standby=5, replication=2, heartbeat=10.0)
    cluster = BigCluster(size, clock=time.process_time)
    before = cluster.gather()
    whole = messages_of(before)
    for step in range(8):  # enough for the workers' speeds to be known
        for beat in range(3):
            cluster.beat(1.0 + 6.0 * step + 2.0 * beat)
        cluster.step(step, lambda worker: 2.0, 7.0 + 6.0 * step)
    cluster.die("worker-00003")
    assert cluster.machine.phase is Phase.RUNNING
    spent = {kind: seconds / count for kind, (seconds, count) in cluster.spent.items()}
    return {
        "members": whole.members, "whole": whole.view, "change": change_bytes(before, cluster.view),
        "tick": spent["Tick"], "beat": spent["Beat"], "report": spent["Progress"], "death": spent["a worker dies"],
        "caught up": spent["CaughtUp"],
    }  # fmt: skip


def played() -> list[tuple[float, float, int]]:
    """(seconds between failures of the job, goodput, failures) of 200 workers whose machines go silent."""
    found = []
    for between in BETWEEN_FAILURES:
        options = ScaleOptions(
            workers=200, servers=20, standby=10, mtbf=f"{220 * between}s", steps=max(60, int(between * 3)), away="2min"
        )
        outcome = Play(scenario_of(options)).run()
        found.append((between, outcome.goodput, outcome.failures))
        print(found[-1], flush=True)
    return found


# ---- pictures ----


def draw_step(path: Path) -> None:
    """Seconds of a step against workers for several numbers of servers, and what each limit alone would take."""
    left, right, save = _figure("workers", "workers, with a tenth as many servers")
    workers = [10 * 2**n for n in range(11)]
    for servers in (1, 10, 100, 1000):
        left.plot(workers, [_ideal(workers=n, servers=servers) for n in workers], label=f"{servers}")
    left.legend(title="servers")
    left.set_ylabel("seconds of a step")
    limits = [limits_of(_scenario(workers=n, servers=n // 10)) for n in workers]
    for name in limits[0]:
        right.plot(workers, [limit[name] for limit in limits], "--", label=name)
    racks = [_ideal(workers=n, servers=n // 10, racks=max(1, n // 64), aggregator_link="800Gbit") for n in workers]
    right.plot(workers, [_ideal(workers=n, servers=n // 10) for n in workers], color="black", label="a step")
    right.plot(workers, racks, color="grey", label="with racks of 64, aggregators of 800 Gbit/s")
    _legend(right)
    save(path)


def _scenario(**others: Any) -> Any:
    return scenario_of(ScaleOptions(**{"model": "1B", "compute": "2s", "link": "100Gbit", "replication": 1, **others}))


def _ideal(**others: Any) -> float:
    """Seconds of an undisturbed step."""
    scenario = _scenario(**others)
    return round_seconds(scenario, {(1, False, False): scenario.size.workers}, scenario.size.servers)


def draw_coordinator(figures: Iterable[dict[str, float]], path: Path) -> None:
    """Bytes of views and the coordinator's time against members, and connections."""
    figures = list(figures)
    members = [one["members"] for one in figures]
    left, middle, right, save = _figure("members", "members", "members")
    left.plot(members, [one["whole"] for one in figures], "o-", label="a whole view (the first one)")
    left.plot(members, [one["change"] for one in figures], "o-", label="the view after a death, as a difference")
    left.plot(members, [one["whole"] * one["members"] for one in figures], "s--", label="first views to all members")
    left.plot(members, [one["change"] * one["members"] for one in figures], "s--", label="a death's views to all")
    left.set_ylabel("bytes")
    _legend(left)
    workers = [10 / 11 * count for count in members]
    middle.plot(members, [count**2 * 10 / 121 for count in members], "s--", label="workers x servers: all of a job")
    middle.plot(members, members, "o-", label="of the coordinator")
    middle.plot(members, workers, "o-", label="of a server")
    middle.plot(members, [max(1, n / 100) for n in workers], "o-", label="of a server, with racks of 100")
    middle.set_ylabel("connections")
    _legend(middle)
    for name in ("death", "caught up", "tick", "report", "beat"):
        right.plot(members, [1e3 * one[name] for one in figures], "o-", label=NAMES[name])
    right.set_ylabel("milliseconds of the coordinator's machine")
    _legend(right)
    save(path)


def _legend(axes: Any) -> None:
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))


NAMES = {
    "death": "a worker dies",
    "caught up": "a server says: my backups hold all",
    "tick": "a tick, each half second", "report": "a worker reports a replica", "beat": "a beat",
}  # fmt: skip


def goodputs(mtbf: float) -> dict[str, float]:
    """The share of the time that trains, by who, where the job has a failure each `mtbf` seconds in the mean."""
    period = daly_period(SNAPSHOT_S, mtbf)
    away = (RESTART_S + HALF_ROUND_S) / LEARNERS  # the others go on
    return {
        "checkpoint and restart: 10 min, 10 s a snapshot (Daly)": goodput(period, SNAPSHOT_S, RESTART_S, mtbf),
        **{name: elastic_goodput(stall, mtbf) for name, stall in PEERS.items()},
        f"DiLoCo, {LEARNERS} learners, each restarts in 10 min": elastic_goodput(away, mtbf),
        f"rallypoint, a process dies: {OURS_S} s (measured)": elastic_goodput(OURS_S, mtbf),
    }


def draw_goodput(dots: Iterable[tuple[float, float, int]], path: Path) -> None:
    """Goodput against failures a day."""
    left, save = _figure("failures of the job in a day")
    rates = [10 ** (n / 10) for n in range(37)]
    lines = [goodputs(DAY / rate) for rate in rates]
    for name in lines[0]:
        left.plot(rates, [100 * line[name] for line in lines], label=name)
    points = list(dots)
    left.plot(
        [DAY / one[0] for one in points], [100 * one[1] for one in points], "k^--",
        label="rallypoint, machines go silent: heartbeat of 10 s (played)",
    )  # fmt: skip
    left.axvline(419 / 54, color="grey", linestyle=":")
    left.text(419 / 54 * 1.05, 3, "Llama 3,\n16,384 GPUs", fontsize="small", color="grey")
    left.set_yscale("linear")
    left.set_ylabel("goodput, %")
    left.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0.0, 0.12))
    save(path)


def ways() -> dict[str, Callable[[float], float]]:
    """Seconds of a step of 1e9 parameters across 8 sites, by way, for a site's link of so many bytes a second."""

    def way(fragments: int, steps: int, word: float) -> Callable[[float], float]:
        workload = Workload(layers=transformer(1e9, COMPUTE_S), steps=steps, up=word, down=word)

        def seconds(rate: float) -> float:
            return sites_seconds(workload, Sites(count=8, rate=rate, delay=0.05, fragments=fragments), COMPUTE_S)

        return seconds

    return {
        "Sync()": way(1, 1, 4.0), "Sync(), int8": way(1, 1, 1 + 4 / 256),
        "LocalSteps(16), int8": way(1, 16, 1 + 4 / 256), "LocalSteps(100), int8": way(1, 100, 1 + 4 / 256),
        "LocalSteps(16, fragments=4, delay=3), int8": way(4, 16, 1 + 4 / 256),
    }  # fmt: skip


def draw_sites(path: Path) -> None:
    """What is left for computing across 8 sites, against the links' rate, and the seconds of a step at 1 Gbit/s."""
    left, right, save = _figure("Mbit/s of a data centre's link", "seconds of a step at 1 Gbit/s")
    rates = [10 ** (1.5 + n / 8) for n in range(30)]
    found = ways()
    for name, seconds in found.items():
        left.plot(rates, [100 * COMPUTE_S / seconds(rate * MBIT) for rate in rates], label=name)
    left.set_yscale("linear")
    left.set_ylabel("% of the time in which workers compute")
    _legend(left)
    names = list(found)[::-1]
    bars = right.barh(range(len(names)), [found[name](1000 * MBIT) for name in names], color="#4c78a8")
    right.bar_label(bars, fmt=" %.3g s", fontsize="small")
    right.axvline(COMPUTE_S, color="grey", linestyle=":")
    right.set_yscale("linear")
    right.set_xlim(1, 300)
    right.set_yticks(range(len(names)), [name.replace(", ", ",\n", 1) for name in names], fontsize="small")
    save(path)


def _figure(*labels: str) -> list[Any]:
    """Axes with these labels below them, and how to write the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * max(len(labels), 1.8), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(itertools.chain(figure.subplots(1, len(labels), squeeze=False)[0]))
    for one, label in zip(axes, labels, strict=True):
        one.set_xlabel(label)
        one.set_xscale("log")
        one.set_yscale("log")
        one.grid(visible=True, alpha=0.3)
    return [*axes, lambda path: figure.savefig(path, dpi=90)]


def main(
    into: Annotated[Path, typer.Option(help="The folder for the pictures.")],
    largest: Annotated[int, typer.Option(help="The largest cluster that is played, in workers.")] = 10000,
    kept: Annotated[Path | None, typer.Option(help="Keep what was played in this file, or take it from there.")] = None,
) -> None:
    """Play, draw, and print the figures that docs/scale.md has."""
    known = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    figures = known.get("clusters") or clusters(largest)
    dots = known.get("played") or played()
    if kept is not None:
        kept.write_text(json.dumps({"clusters": figures, "played": dots}))
    draw_step(into / "scale-step.png")
    draw_coordinator(figures, into / "scale-coordinator.png")
    draw_goodput(dots, into / "scale-goodput.png")
    draw_sites(into / "scale-sites.png")
    for rate in (419 / 54, 100.0, 1000.0):
        shares = {name: f"{100 * part:.1f} %" for name, part in goodputs(DAY / rate).items()}
        print(f"{rate:.3g} failures a day", shares)
    print({name: f"{seconds(1000 * MBIT):.3g} s" for name, seconds in ways().items()})


if __name__ == "__main__":
    typer.run(main)
