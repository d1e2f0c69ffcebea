"""One server's reducer without threads: the test is the owner of its shard, and says what connections would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.config import JobConfig, record_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Message, Say
from rallypoint.core.shard import clip
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.net.frames import Header, Kind
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.server.job import ServerJob
from rallypoint.server.reducer import Reducer

CONFIG = resolve({"replicas": 2, "steps": 5})
LAYOUT = build_layout([TensorSpec("w", (1000,), "float32", 0)], CONFIG.network.shard_bytes)
FIRST, SECOND = ViewNumber(1, 1), ViewNumber(1, 2)


class Context:
    """Keeps what the coordinator would be told."""

    def __init__(self) -> None:
        self.said: list[Message] = []

    def say(self, message: Message) -> None:
        self.said.append(message)

    @property
    def sentences(self) -> list[str]:
        return [message.text for message in list(self.said) if isinstance(message, Say)]

    def not_finite(self, verdict: clip.StepVerdict, *, alone: bool) -> None:
        pytest.fail("nothing here is not finite")


class FakeChannel:
    """A worker's, that keeps what it is sent."""

    name, number = "w", 1
    connection = None  # limits of links are set on it: there are none

    def __init__(self) -> None:
        self.frames: list[Header] = []

    def send(self, header: Header, payload: Any = None, sent: Callable[[], None] | None = None, **_: Any) -> None:
        self.frames.append(header)
        if sent is not None:
            sent()


class OneServer:
    """A reducer with one shard, of two replicas that worker "w" computes."""

    def __init__(self, config: JobConfig = CONFIG, snapshots: str = "") -> None:
        self.job = ServerJob(record_of(config, LAYOUT), config)
        self.queued: list[inbox.Event] = []
        self.context = Context()
        self.reducer = Reducer("s", self.job, self.context, self.queued.append, Tracer("s"), snapshots_url=snapshots)
        self.channel = FakeChannel()

    def adopt(self, number: ViewNumber, origin: str = "") -> None:
        """A roll-back: a new generation, which begins with the snapshot `origin` or with what worker "w" uploads."""
        members = (Member("w", "here", incarnation=1),), (Member("s", "here", "s:1", 2),)
        view = View(
            number, number, *members, (Assignment(0, {"w": (0, 1, 2)}),), {0: "s"}, {}, origin=origin,
            uploader="" if origin else "w", contributors={"w": (0, 1, 2)},
        )  # fmt: skip
        self.reducer.handle(inbox.ViewCame(view))

    def send(self, kind: Kind, number: ViewNumber, value: float, replica: int = 0) -> None:
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
        return machine.version


