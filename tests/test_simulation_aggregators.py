"""Seeds in which an aggregator hung or was cut off, and its workers went on without it."""

from __future__ import annotations

import pytest

from rallypoint.core.policy import Sync
from rallypoint.testing.simulation.policies import Played, parse_policy
from rallypoint.testing.simulation.run import simulate


@pytest.mark.parametrize(("seed", "policy"), [
    (70046, parse_policy("delay:1")),  # it was given up, and sent what it held on its old links when it went on
    (368683100, Sync()),  # two versions of a shard had not come to it when a worker began to use it
], ids=["given up", "behind"])  # fmt: skip
def test_an_aggregator_that_missed_much_makes_nobody_wait(seed: int, policy: Played) -> None:
    simulate(seed, policy)
