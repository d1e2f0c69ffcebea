"""For bugs that are planted on purpose: the first of some seeds that finds them."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.testing.simulation.policies import Played, replay_line
from rallypoint.testing.simulation.run import SimulationFailed, simulate


def first_failure(played: Played, seeds: Sequence[int]) -> str:
    """What the first of these seeds that fails says, after the line that replays it: for a bug planted on purpose.

    Raises AssertionError if all are well.
    """
    for seed in seeds:
        try:
            simulate(seed, played)
        except SimulationFailed as failed:
            line, _, said = str(failed).partition("\n")
            assert line == replay_line(seed, played)
            return said
    raise AssertionError(f"not found within {len(seeds)} seeds")
