"""``python -m rallypoint.testing.simulation --seeds 1000`` (or ``--seed 17`` to replay one)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Annotated

import typer

from rallypoint.testing.simulation import policies
from rallypoint.testing.simulation.operating.story import described
from rallypoint.testing.simulation.operating.story import explain as told
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Played
from rallypoint.testing.simulation.run import SimulationFailed, simulate

_CHUNK = 10


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to play, in parallel.")] = 200,
    first: Annotated[int, typer.Option(help="The first seed; by default the time gives fresh ones.")] = -1,
    seed: Annotated[int, typer.Option(help="Replay this one seed and print what happened.")] = -1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Of --seed: which of its faults matter, and what led to its failure.")
    ] = False,
    policy: Annotated[str, typer.Option(help=f"One of {policies.WORDS}.")] = "sync",
) -> None:
    """Play seeded plans of faults on a simulated cluster, whatever happens: with `sync` the same bytes, else every
    contribution counted once; no stuck wait."""
    try:
        sync = policies.parse_policy(policy)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if seed >= 0 and explain:
        print("\n".join(told(make_plan(seed, sync))))
        return
    if seed >= 0:
        result = simulate(seed, sync)
        print("\n".join([*described(result.plan), *result.events, *result.outcome.said]))
        print(f"seed {seed}: all well after {result.seconds:.2f} simulated seconds, {result.recomputed} recomputed")
        return
    first = first if first >= 0 else int(time.time()) % 1_000_000 * 1000
    start = time.monotonic()
    failures = [failure for failure in _play(range(first, first + seeds), sync) if failure]
    for failure in failures[:5]:
        print(failure, file=sys.stderr)
    jobs = [make_plan(seed, sync).job for seed in range(first, first + 3)]
    same = all(job.same_bytes and not job.may_differ for job in jobs)
    well = "all ended with the same bytes" if same else "all ended with every contribution counted once"
    verdict = f"{len(failures)} failed" if failures else well
    print(f"{policy}: {seeds} seeds from {first} in {time.monotonic() - start:.1f} s: {verdict}")
    raise typer.Exit(1 if failures else 0)


def _play(seeds: Iterable[int], policy: Played) -> Iterable[str]:
    with ProcessPoolExecutor() as pool:
        yield from pool.map(partial(_one, policy), seeds, chunksize=_CHUNK)


def _one(policy: Played, seed: int) -> str:
    try:
        simulate(seed, policy)
    except SimulationFailed as failed:
        return str(failed)
    return ""


if __name__ == "__main__":
    typer.run(main)
