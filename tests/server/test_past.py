"""What was said in a past that is void is dropped also when a view came between its being looked at and its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.config import JobConfig, record_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import Sync
from rallypoint.core.shard import clip
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.net.frames import Header, Kind
from rallypoint.net.messages import Message
from rallypoint.observe.trace import Tracer
from rallypoint.server.intake.job import ServerJob
from rallypoint.server.reducer import inbox
from rallypoint.server.reducer.reducer import Reducer

CONFIG = resolve({"replicas": 2, "steps": 5})
LAYOUT = build_layout([TensorSpec("w", (8,), "float32", 0)], CONFIG.shard_bytes)
FIRST, SECOND = ViewNumber(1, 1), ViewNumber(1, 2)


class _Context:
    """Nobody."""

    def say(self, message: Message) -> None:
        """Nobody hears it."""

    def not_finite(self, verdict: clip.Verdict) -> None:
        pytest.fail("nothing here is not finite")


class _Channel:
    """A worker's, that keeps what it is sent."""

    name, number = "w", 1

    def __init__(self) -> None:
        self.frames: list[Header] = []

    def send(self, header: Header, payload: Any = None, sent: Callable[[], None] | None = None, **_: Any) -> None:
        self.frames.append(header)
        if sent is not None:
            sent()


class _Server:
    """A reducer with one shard; the test is its owner, and says what a connection's thread would."""

    def __init__(self, config: JobConfig = CONFIG) -> None:
        self.job = ServerJob(record_of(config, LAYOUT), config)
        self.queued: list[inbox.Event] = []
        self.reducer = Reducer("s", self.job, _Context(), self.queued.append, Tracer("s"))
        self.channel = _Channel()

    def adopt(self, number: ViewNumber) -> None:
        members = (Member("w", "here", incarnation=1),), (Member("s", "here", "s:1", 2),)
        view = View(number, number, *members, (Assignment(0, {"w": (0, 1)}),), {0: "s"}, {}, uploader="w")
        self.reducer.handle(inbox.Viewed(view))

    def bring(self, kind: Kind, number: ViewNumber, value: float, replica: int = 0) -> None:
        buffer = self.job.pool.take()
        buffer.tensor.fill_(value)
        header = Header(kind, number, shard=0, replica=replica, length=LAYOUT.shards[0].nbytes, weight=1.0)
        channel: Any = self.channel
        if kind is Kind.INITIAL:
            self.reducer.handle(inbox.Initial(channel, header, buffer))
        else:
            self.reducer.handle(inbox.Pushed(channel, "w", header, buffer))

    @property
    def version(self) -> int:
        machine = self.reducer.machine.machine(0)
        assert machine is not None
        return machine.version


@pytest.fixture
def server() -> _Server:
    return _Server()


def test_a_contribution_and_first_weights_of_a_past_that_is_void_count_for_nothing(server: _Server) -> None:
    server.adopt(FIRST)
    server.adopt(SECOND)  # all begin again, and what follows was taken from the network before
    server.bring(Kind.INITIAL, FIRST, 1.0)
    assert server.version == -1
    server.bring(Kind.INITIAL, SECOND, 2.0)
    assert server.version == 0
    server.bring(Kind.PUSH, FIRST, 3.0)
    server.bring(Kind.PUSH, SECOND, 0.0, replica=1)
    assert server.version == 0, "the sum has only one of two"
    server.bring(Kind.PUSH, SECOND, 0.0)
    assert server.version == 1
    credits = [frame for frame in server.channel.frames if frame.kind is Kind.CREDIT]
    assert sum(frame.replica for frame in credits) == 5, "whoever sent may send again"
    assert len(server.job.pool.free) == server.job.pool.made - 2, "and only the two versions' buffers are held"


def test_a_verdict_that_was_queued_before_a_roll_back_decides_nothing_after_it() -> None:
    """With a quorum the sum of the same step may be another one: only the new verdict is all servers' own."""
    server = _Server(resolve({"replicas": 2, "steps": 5, "clip": 1.0, "sync": Sync(quorum=1)}))
    verdicts = []
    for number, value in ((FIRST, 1.0), (SECOND, 8.0)):
        server.adopt(number)
        server.bring(Kind.INITIAL, number, 0.0)
        server.bring(Kind.PUSH, number, value)
        verdicts.append(server.queued.pop())
    old, new = verdicts
    server.reducer.handle(old)
    assert server.version == 0
    server.reducer.handle(new)
    assert server.version == 1
