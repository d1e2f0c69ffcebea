"""What was said in an older generation is dropped, also when the roll-back came after the intake had checked it."""

from __future__ import annotations

import pytest
from one_server import FIRST, SECOND, OneServer

from rallypoint.config import resolve
from rallypoint.core.policy import Sync
from rallypoint.net.frames import Kind


@pytest.fixture
def server() -> OneServer:
    return OneServer()


def test_a_contribution_and_first_weights_of_a_stale_generation_count_for_nothing(server: OneServer) -> None:
    server.adopt(FIRST)
    server.adopt(SECOND)  # all begin again, and what follows was taken from the network before
    server.send(Kind.INITIAL, FIRST, 1.0)
    assert server.version == -1
    server.send(Kind.INITIAL, SECOND, 2.0)
    assert server.version == 0
    server.send(Kind.PUSH, FIRST, 3.0)
    server.send(Kind.PUSH, SECOND, 0.0, replica=1)
    assert server.version == 0, "the sum has only one of two"
    server.send(Kind.PUSH, SECOND, 0.0)
    assert server.version == 1
    credits = [frame for frame in server.channel.frames if frame.kind is Kind.CREDIT]
    assert sum(frame.replica for frame in credits) == 5, "whoever sent may send again"
    assert len(server.job.pool.free) == server.job.pool.made - 2, "and only the two versions' buffers are held"


def test_a_verdict_that_was_queued_before_a_roll_back_decides_nothing_after_it() -> None:
    """With a quorum the sum of the same step may be another one: only the new verdict is all servers' own."""
    server = OneServer(resolve({"replicas": 2, "steps": 5, "clip": 1.0, "sync": Sync(quorum=1)}))
    verdicts = []
    for number, value in ((FIRST, 1.0), (SECOND, 8.0)):
        server.adopt(number)
        server.send(Kind.INITIAL, number, 0.0)
        server.send(Kind.PUSH, number, value)
        verdicts.append(server.queued.pop())
    old, new = verdicts
    server.reducer.handle(old)
    assert server.version == 0
    server.reducer.handle(new)
    assert server.version == 1
