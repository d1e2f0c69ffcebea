"""Pulls of words: what a server answers, and what it refuses; which ranges a parameter is made of."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rallypoint.config import record_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.optimizer import SGD
from rallypoint.core.shard.pulls import MOST_WAITING, Request, Requests
from rallypoint.core.view import ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.worker.exchange.arrivals import Range, WordPulls, ranges_of

sys.path.insert(0, str(Path(__file__).parent.parent / "net"))

from test_strangers import Job, job_of, refusal

WORDS, SHARD = 16, 0
SPECS = [TensorSpec("w", (WORDS,), "float32", 0), TensorSpec("statistics", (4,), "float32", -1)]


def made() -> Job:
    config = resolve({"replicas": 1, "batch": 1, "steps": 9, "optimizer": SGD(lr=1.0), "memory.parameters": "streamed"})
    return Job(record_of(config, build_layout(SPECS, config.network.shard_bytes)))


job = job_of(made)


@pytest.fixture
def channel(job: Job) -> Channel:
    """A worker's link to the server that is the shard's primary."""
    server = next(s for s in job.servers if s.id == job.view.primary[SHARD])
    return job.enter(server._gate.address, "worker", "worker0")


def say(job: Job, channel: Channel, kind: Kind, payload: bytes = b"", **fields: int) -> None:
    header = Header(kind, job.view.number, weight=1.0, length=len(payload), **{"shard": SHARD, **fields})  # type: ignore[arg-type]
    channel.send(header, memoryview(bytearray(payload)) if payload else None)


def begin(job: Job, channel: Channel, steps: int) -> None:
    """The values 0, 1, 2, ...; each step takes 1 from all. Each version is published before the next is made."""
    say(job, channel, Kind.INITIAL, np.arange(WORDS, dtype=np.float32).tobytes())
    for step in range(steps):
        pull(job, channel, step, 0, 1)
        assert answer(channel)[0].step == step
        say(job, channel, Kind.PUSH, np.ones(WORDS, np.float32).tobytes(), step=step)


def pull(job: Job, channel: Channel, version: int, first: int, count: int, number: int = 77) -> None:
    say(job, channel, Kind.PULL_WORDS, step=version, replica=first, wants=count, base=number)


def answer(channel: Channel) -> tuple[Header, list[float]]:
    while (header := channel.receive_header()).kind is not Kind.WORDS:
        channel.receive_bytes(header)
    return header, np.frombuffer(channel.receive_bytes(header), np.float32).tolist()


@pytest.mark.parametrize("version", [1, 2])
def test_words_of_the_last_two_versions_are_told_exactly(job: Job, channel: Channel, version: int) -> None:
    begin(job, channel, 2)
    pull(job, channel, 2, 0, 1)
    answer(channel)  # version 2 is published
    pull(job, channel, version, 5, 3, number=9)
    header, words = answer(channel)
    assert (header.step, header.base, header.flags) == (version, 9, 0)
    assert words == [5.0 - version, 6.0 - version, 7.0 - version]


def test_a_version_that_is_not_kept_any_more_is_said_to_be_gone(job: Job, channel: Channel) -> None:
    begin(job, channel, 4)
    pull(job, channel, 4, 0, 1)
    answer(channel)
    pull(job, channel, 1, 0, 4)
    header, words = answer(channel)
    assert (header.flags, words) == (SKIP, [])


def test_pulls_of_several_ranges_wait_for_a_version_to_come(job: Job, channel: Channel) -> None:
    for number, first in enumerate((0, 4, 8)):
        pull(job, channel, 0, first, 2, number)
    begin(job, channel, 0)
    assert [answer(channel)[1] for _ in range(3)] == [[0.0, 1.0], [4.0, 5.0], [8.0, 9.0]]


def test_versions_of_parameters_are_published_by_an_empty_frame_and_those_of_buffers_are_not(
    job: Job, channel: Channel
) -> None:
    for server in job.servers:
        link = job.enter(server._gate.address, "worker", "worker0")
        say(job, link, Kind.FOLLOW)
        for shard in job.record.layout.shards:
            if job.view.primary[shard.index] == server.id:
                say(job, link, Kind.INITIAL, bytes(shard.nbytes), shard=shard.index)
                while (header := link.receive_header()).kind is not Kind.VERSION:
                    link.receive_bytes(header)
                link.receive_bytes(header)
                assert header.length == (0 if shard.role == "parameters" else shard.nbytes)


@pytest.mark.parametrize(
    ("shard", "first", "count"), [(0, 0, 0), (0, 0, WORDS + 1), (0, WORDS, 1), (1, 0, 1), (7, 0, 1)]
)
def test_a_pull_of_no_words_or_of_buffers_is_refused(
    job: Job, channel: Channel, shard: int, first: int, count: int
) -> None:
    say(job, channel, Kind.PULL_WORDS, shard=shard, replica=first, wants=count)
    assert refusal(channel)
    job.settle()
    assert job.runs()


def test_the_requests_that_wait_of_one_worker_are_bounded() -> None:
    requests: Requests[str, int] = Requests()
    for number in range(MOST_WAITING + 5):
        requests.add(0, Request("to w0", 8, False, number, (number, 1)))
    requests.add(0, Request("to w0", 8, False, -1, (MOST_WAITING, 1)))
    requests.add(0, Request("to w1", 8, False, 77, (0, 1)))
    answered = [request.what for request, _ in requests.answered(0, 8, lambda version: True)]
    assert answered[0] == 5, "the oldest are dropped"
    assert len(answered) == MOST_WAITING + 1
    assert answered[-2:] == [-1, 77], "a repeated request replaces the first"


def test_a_parameter_is_pulled_from_all_shards_that_hold_a_part_of_it() -> None:
    specs = [TensorSpec(name, shape, "float32", 0) for name, shape in {"a": (3,), "b": (4, 3), "c": (2,)}.items()]
    layout = build_layout(specs, 20)  # five words a shard; c is first, then b, then a
    ranges = {entry.spec.name: ranges_of(layout, entry) for entry in layout.entries}
    assert ranges == {
        "c": [Range(0, 0, 2, 0)],
        "b": [Range(0, 2, 3, 0), Range(1, 0, 5, 3), Range(2, 0, 4, 8)],
        "a": [Range(2, 4, 1, 0), Range(3, 0, 2, 1)],
    }


def test_an_answer_that_is_still_arriving_when_words_are_asked_for_again_is_not_mixed_with_the_new_one() -> None:
    """A script's own reads take any version. The old primary's answer is being received when there is a new one."""
    sent: list[Header] = []
    shell = SimpleNamespace(
        number=ViewNumber(1, 1), view=SimpleNamespace(primary={0: "s"}, generation=ViewNumber(1, 1)),
        links=SimpleNamespace(connections={"s": 1, "t": 1}), machine=SimpleNamespace(step=4),
    )  # fmt: skip
    locked: Any = SimpleNamespace(changed=threading.RLock(), shell=shell)
    links: Any = SimpleNamespace(get=lambda server: SimpleNamespace(pull=sent.append))
    pulls = WordPulls(locked, links)
    pulled = pulls.ask([Range(0, 0, 4, 0)], newest=True)

    def arriving(asked: Header) -> tuple[Header, memoryview]:
        header = asked._replace(kind=Kind.WORDS, length=16)
        place = pulls.arriving(header)
        assert place is not None
        return header, place

    old, into_old = arriving(sent[-1])
    shell.number, shell.view.primary = ViewNumber(1, 2), {0: "t"}
    pulls._ask_all(pulled)
    new, into_new = arriving(sent[-1])
    into_new[:] = np.full(4, 2.0, np.float32).tobytes()
    pulls.arrived(new)
    into_old[:] = np.full(4, 1.0, np.float32).tobytes()
    pulls.arrived(old)
    assert (len(sent), pulled.over, pulled.values.tolist()) == (2, True, [2.0] * 4)
