"""Servers take contributions only from workers that the view lists, and lose none of an honest worker's by that."""

from __future__ import annotations

import pytest

from rallypoint.core.worker import shell
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.run import Simulation, SimulationFailed

GIVEN_UP_AND_BACK = 490  # a seed in which a worker comes back whose contribution was dropped in between


@pytest.mark.slow
def test_a_worker_that_counts_what_it_sent_before_it_was_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    Simulation(make_plan(GIVEN_UP_AND_BACK)).run()
    monkeypatch.setattr(shell, "_came_back", lambda worker, before, view: False)
    with pytest.raises(SimulationFailed, match="stuck after"):
        Simulation(make_plan(GIVEN_UP_AND_BACK)).run()
