"""Pulls of rows: an exact version, one that is still to come, one that is gone; and what is none is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from rallypoint.codec.base import encode_gradient, encode_ids
from rallypoint.config import record_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.optimizer import SGD
from rallypoint.core.view import ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import LATEST, NEWEST, SKIP, Header, Kind
from rallypoint.server.rows import first_rows
from rallypoint.worker.exchange.arrivals import RowPull

sys.path.insert(0, str(Path(__file__).parent.parent / "net"))

from test_strangers import Job, job_of, refusal

ROWS, COLUMNS, SEED = 20, 2, 5
TABLE, DENSE = 1, 0  # shards


def made() -> Job:
    config = resolve({"replicas": 1, "batch": 1, "steps": 9, "seed": SEED, "optimizer": SGD(lr=1.0)})
    specs, tables = ([TensorSpec(name, (ROWS, COLUMNS), "float32", 0)] for name in ("w", "users"))
    return Job(record_of(config, build_layout(specs, config.network.shard_bytes, None, tables)))


job = job_of(made)


@pytest.fixture
def channel(job: Job) -> Channel:
    """A worker's link to the server that is the table's primary."""
    server = next(s for s in job.servers if s.id == job.view.primary[TABLE])
    return job.enter(server._gate.address, "worker", "worker0")


def say(job: Job, channel: Channel, kind: Kind, payload: bytes = b"", **fields: int) -> None:
    header = Header(kind, job.view.number, shard=TABLE, weight=1.0, length=len(payload), **fields)  # type: ignore[arg-type]
    channel.send(header, memoryview(bytearray(payload)))


def begin(job: Job, channel: Channel, steps: int) -> None:
    """The table's first rows, and so many steps that each take 1 from every value of row 3."""
    say(job, channel, Kind.INITIAL)
    push(job, channel, range(steps))


def begin_one_by_one(job: Job, channel: Channel, steps: int) -> None:
    """Like `begin`, each version published before the next is made: until then more than the last two are kept."""
    begin(job, channel, 0)
    for newest in range(1, steps + 1):
        push(job, channel, [newest - 1])
        pull(job, channel, newest)
        assert answer(channel)[0].step == newest


def push(job: Job, channel: Channel, steps: Iterable[int]) -> None:
    for step in steps:
        gradient = encode_gradient(torch.tensor([3]), torch.ones(1, COLUMNS))
        say(job, channel, Kind.PUSH, bytes(gradient), step=step)


def pull(job: Job, channel: Channel, version: int, *, flags: int = 0, ids: tuple[int, ...] = (3, 7)) -> None:
    say(job, channel, Kind.PULL_ROWS, bytes(encode_ids(torch.tensor(ids))), step=version, base=77, flags=flags)


def answer(channel: Channel) -> tuple[Header, np.ndarray]:
    while (header := channel.receive_header()).kind is not Kind.ROWS:
        channel.receive_bytes(header)
    return header, np.frombuffer(channel.receive_bytes(header), np.float32).reshape(-1, COLUMNS)


def expected(version: int) -> np.ndarray:
    rows = first_rows(SEED, "users", np.array([3, 7]), COLUMNS)
    for _ in range(version):
        rows[0] -= np.float32(1)
    return rows


@pytest.mark.parametrize("version", [1, 2])
def test_the_last_two_versions_are_told_exactly(job: Job, channel: Channel, version: int) -> None:
    begin(job, channel, 2)
    pull(job, channel, version)
    header, rows = answer(channel)
    assert (header.step, header.base, header.flags) == (version, 77, 0)
    assert np.array_equal(rows, expected(version))


def test_a_version_that_is_not_kept_any_more_is_said_to_be_gone(job: Job, channel: Channel) -> None:
    begin_one_by_one(job, channel, 4)
    pull(job, channel, 1)
    header, rows = answer(channel)
    assert (header.step, header.flags, rows.size) == (1, SKIP, 0)


@pytest.mark.parametrize("version", [0, 1, LATEST])
def test_the_newest_will_do_where_that_is_said(job: Job, channel: Channel, version: int) -> None:
    begin_one_by_one(job, channel, 4)
    pull(job, channel, version, flags=NEWEST)
    header, rows = answer(channel)
    assert (header.step, header.flags) == (4, 0)
    assert np.array_equal(rows, expected(4))


def test_a_pull_of_a_version_to_come_waits_for_it(job: Job, channel: Channel) -> None:
    pull(job, channel, 1)
    begin(job, channel, 1)
    header, rows = answer(channel)
    assert header.step == 1
    assert np.array_equal(rows, expected(1))


def test_a_table_is_published_by_an_empty_frame(job: Job, channel: Channel) -> None:
    channel.send(Header(Kind.FOLLOW, job.view.number))
    begin(job, channel, 1)
    versions: list[tuple[int, int, int]] = []
    while not versions or versions[-1][1] < 1:
        header = channel.receive_header()
        channel.receive_bytes(header)
        versions += [(header.shard, header.step, header.length)] if header.kind is Kind.VERSION else []
    # a version that still waits to be sent gives way to the next one
    assert versions in ([(TABLE, 0, 0), (TABLE, 1, 0)], [(TABLE, 1, 0)])


@pytest.mark.parametrize(("kind", "payload"), [
    *((Kind.PULL_ROWS, of) for of in (b"123", bytes(encode_ids(torch.tensor([7, 3]))), bytes(4 * (ROWS + 1)))),
    *((Kind.PUSH, of) for of in (b"", b"123", b"\1\0\0\0", bytes(4) + b"more", bytes(5000))),
])  # fmt: skip
def test_a_pull_that_names_no_rows_and_a_contribution_that_is_none_are_refused(
    job: Job, channel: Channel, kind: Kind, payload: bytes
) -> None:
    begin(job, channel, 1)
    say(job, channel, kind, payload, **({"step": 1} if kind is Kind.PUSH else {}))
    assert refusal(channel)
    job.settle()
    assert job.runs()


def test_first_weights_for_a_table_and_pulls_of_what_is_none_are_refused(job: Job, channel: Channel) -> None:
    say(job, channel, Kind.INITIAL, bytes(ROWS * COLUMNS * 4))
    assert "which has 0 to 0" in refusal(channel)
    other = next(s for s in job.servers if s.id == job.view.primary[DENSE])
    channel = job.enter(other._gate.address, "worker", "worker0")
    channel.send(Header(Kind.PULL_ROWS, job.view.number, shard=DENSE, length=4), memoryview(bytes(4)))
    assert "which has not such rows" in refusal(channel)
    assert job.runs()


def test_what_may_not_have_been_heard_is_asked_again() -> None:
    first, second = ViewNumber(1, 1), ViewNumber(1, 2)
    pull = RowPull(1, 5, newest=False, wanted={2: (memoryview(b""), 8), 3: (memoryview(b""), 8)})
    homes = {2: "a", 3: "b"}
    assert list(pull.unasked(first, homes, {"a": 1})) == [2], "b is not connected"
    pull.ask(2, first, "a", 1)
    assert list(pull.unasked(first, homes, {"a": 1, "b": 2})) == [3]
    assert list(pull.unasked(first, homes, {"a": 3})) == [2], "another connection"
    assert list(pull.unasked(second, homes, {"a": 1})) == [2], "another view"
    assert not pull.answered(2, 9, bytearray(8), outdated=False), "an answer to another pull"
    assert not pull.answered(2, 1, bytearray(7), outdated=False)
    assert pull.answered(2, 1, bytearray(8), outdated=False)
    assert (pull.missing, pull.over) == ([3], False)
    assert pull.answered(3, 1, bytearray(), outdated=True)
    assert pull.over
