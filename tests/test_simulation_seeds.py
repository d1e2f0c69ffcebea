"""Seeds that were played by chance and found a defect."""

from __future__ import annotations

import pytest

from rallypoint.testing.simulation.policies import parse_policy
from rallypoint.testing.simulation.run import simulate


@pytest.mark.parametrize(("seed", "policy"), [
    (70046, "delay:1"),  # an aggregator that was given up sent what it held on its old links when it went on
    (368683100, "sync"),  # a worker began to use an aggregator to which two versions of a shard had not come
    (369071010, "sync"),  # a worker that was given up and joined again went on with a replica of another one by then
    (369699017, "inner-fragments:2"),  # an aggregator came back to a job that all workers had left at its beginning
    (368666202, "fold:3"),  # a new coordinator had not heard that servers had applied the last round
    (398387816, "inner-fragments:2"),  # the server that had applied the last round left, and its coordinator died
    (400100506, "inner-fragments:2"),  # a snapshot of the version before the one that buffers were restored at
    (833107095, "sync"),  # after a roll-back a third server counted as caught up that was none any more
    (884002396, "decided"),  # a coordinator died after it had journalled a figure, and before it could show it
    (875642006, "decided"),  # the same
    (700017, "fold:3"),  # a snapshot's clocks counted a contribution that came before the shard was copied
    (910000043, "store"),  # a worker whose script had failed stayed, when the coordinator was away as it said so
])  # fmt: skip
def test_a_seed_that_found_a_defect_ends_well(seed: int, policy: str) -> None:
    simulate(seed, parse_policy(policy))
