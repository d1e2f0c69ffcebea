"""``python -m rallypoint.testing.simulation --seeds 1000`` (or ``--seed 17`` to replay one)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import typer

from rallypoint.testing.simulation.run import SimulationFailed, simulate

_CHUNK = 10


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to play, in parallel.")] = 200,
    first: Annotated[int, typer.Option(help="The first seed; by default the time gives fresh ones.")] = -1,
    seed: Annotated[int, typer.Option(help="Replay this one seed and print what happened.")] = -1,
) -> None:
    """Play seeded plans of faults on a simulated cluster: same bytes, no stuck wait, whatever happens."""
    if seed >= 0:
        result = simulate(seed)
        print("\n".join([str(result.plan), *result.events, *result.outcome.said]))
        print(f"seed {seed}: same bytes after {result.seconds:.2f} simulated seconds, {result.recomputed} recomputed")
        return
    first = first if first >= 0 else int(time.time()) % 1_000_000 * 1000
    start = time.monotonic()
    failures = [failure for failure in _play(range(first, first + seeds)) if failure]
    for failure in failures[:5]:
        print(failure, file=sys.stderr)
    verdict = f"{len(failures)} failed" if failures else "all ended with the same bytes"
    print(f"{seeds} seeds from {first} in {time.monotonic() - start:.1f} s: {verdict}")
    raise typer.Exit(1 if failures else 0)


def _play(seeds: Iterable[int]) -> Iterable[str]:
    with ProcessPoolExecutor() as pool:
        yield from pool.map(_one, seeds, chunksize=_CHUNK)


def _one(seed: int) -> str:
    try:
        simulate(seed)
    except SimulationFailed as failed:
        return str(failed)
    except Exception as error:  # a defect of any kind is a failed seed
        return f"python -m rallypoint.testing.simulation --seed {seed}\n{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    typer.run(main)
