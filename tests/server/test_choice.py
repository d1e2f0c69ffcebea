"""A promoted backup takes a quorum's contributions in the order that was chosen, whatever it may hold."""

from __future__ import annotations

import logging

import pytest
from one_server import FIRST, OneServer

from rallypoint.config import resolve
from rallypoint.core.policy import Sync
from rallypoint.net.frames import Kind
from support.gathering import Once, gathering


def test_a_worker_may_send_on_while_its_contributions_wait_for_the_one_that_was_chosen_first() -> None:
    """With one credit and nothing held beyond the limit it could never send replica 2's."""
    config = resolve({"replicas": 3, "steps": 5, "clip": 1.0, "sync": Sync(quorum=2), "network.hold_bytes": 0})
    server = OneServer(config)
    server.adopt(FIRST)
    server.send(Kind.INITIAL, FIRST, 0.0)
    machine = server.reducer.machine.machine(0)
    assert machine is not None
    machine.chosen = (2, 0)  # as if promoted in the middle of the step
    server.channel.frames.clear()
    server.send(Kind.PUSH, FIRST, 1.0, replica=0)
    assert [frame.kind for frame in server.channel.frames] == [Kind.CREDIT]
    server.send(Kind.PUSH, FIRST, 1.0, replica=1)  # was not chosen: dropped
    server.send(Kind.PUSH, FIRST, 1.0, replica=2)
    assert [frame.kind for frame in server.channel.frames] == [Kind.CREDIT] * 3
    assert machine.awaiting, "the sum is finished"


@pytest.mark.some("0")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_lost_in_the_middle_of_a_quorum_s_step_costs_no_roll_back_and_leaves_one_model(
    victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")
    with gathering(2, replication=2, workers_start=2, workers_max=2) as cluster:
        lose = Once(4, 1, lambda: cluster.safely_lose(victim))
        for _ in range(2):  # a quorum of 4 of 4: in the order in which they come
            cluster.add_worker(lose, sync=Sync(quorum=4), **{"network.hold_bytes": 0})
        first, second = [worker.result() for worker in cluster.workers]
        assert lose.done
        assert first == second
        assert not [said for said in cluster.sentences() if "going back" in said]
