"""What connections' threads make of frames, without a network."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.config import record_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.errors import ProtocolError
from rallypoint.net.frames import Header, Kind
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.server.intake import Intake
from rallypoint.server.job import ServerJob
from rallypoint.server.member import Views

NUMBER = ViewNumber(1, 1)
CONFIG = resolve({"replicas": 2, "steps": 9})
LAYOUT = build_layout([TensorSpec("w", (8,), "float32", 0)], CONFIG.network.shard_bytes)


class _Channel:
    """Brings these frames, with zeros for payloads."""

    def __init__(self, *headers: Header) -> None:
        self._headers = list(headers)

    def receive_header(self) -> Header:
        return self._headers.pop(0)

    def receive_into(self, view: memoryview) -> None:
        view[:] = bytes(len(view))


class _Server:
    def __init__(self) -> None:
        views, self.tracer, self.events = Views(), Tracer("s"), list[inbox.Event | None]()
        views.adopt(View(NUMBER, NUMBER, (), (Member("s", "here", "s:1", 2),), (), {0: "s"}))
        job = ServerJob(record_of(CONFIG, LAYOUT), CONFIG)
        self.intake = Intake(job, views, self.events.append, self.tracer, (3, 5))

    def receive(self, kind: Kind, step: int = 0, replica: int = 0) -> None:
        length = LAYOUT.shards[0].nbytes if kind is Kind.PUSH else 0
        channel: Any = _Channel(Header(kind, NUMBER, step=step, length=length, weight=1.0, replica=replica))
        self.intake.receive_from_worker(channel, "w")


def test_the_steps_that_are_asked_for_are_traced() -> None:
    server, traced = _Server(), []
    for step in range(2, 7):
        server.receive(Kind.PUSH, step)
        traced.append(server.tracer.on)
    assert traced == [False, True, True, False, False]


@pytest.mark.parametrize("kind", [Kind.FOLLOW, Kind.UNFOLLOW, Kind.FETCH])
def test_a_frame_that_is_of_no_step_does_not_end_the_tracing(kind: Kind) -> None:
    server = _Server()
    server.receive(Kind.PUSH, 3)
    server.receive(kind)
    assert server.tracer.on


@pytest.mark.parametrize("replica", [2, 2**32 - 1])
def test_a_replica_that_the_job_does_not_have_ends_the_connection_whoever_sends_it(replica: int) -> None:
    server = _Server()
    server.receive(Kind.PUSH, 3, 1)
    with pytest.raises(ProtocolError, match=f"replica {replica}: this job has 2"):
        server.receive(Kind.PUSH, 3, replica)
    assert len(server.events) == 1
