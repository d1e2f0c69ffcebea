"""Frames with codec states: one that cannot be right closes its own connection and changes nothing (I9)."""

from __future__ import annotations

import logging

import pytest
from test_strangers import Job, job_of, reducer, refusal, standby

from rallypoint.codec.build import ShardCodecStates, StateLimits
from rallypoint.codec.spec import Int8
from rallypoint.config import parse, record_of, resolve
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.net.channel import Channel
from rallypoint.net.frames import COPY, Header, Kind

WORDS, REPLICAS = 1024, 2


def record() -> JobRecord:
    config = resolve({"replicas": REPLICAS, "batch": 1, "steps": 9, "network.shard_bytes": 4 * WORDS, "codec": Int8()})
    return record_of(config, build_layout([TensorSpec("w", (4 * WORDS, 1), "float32", 0)], 4 * WORDS))


job = job_of(lambda: Job(record()))


def worker_of(job: Job) -> Channel:
    return job.enter(job.servers[0]._gate.address, "worker", "worker0")


def own_shard(job: Job) -> int:
    return job.view.shards_of("server0")[0]


def limits(job: Job) -> StateLimits:
    return ShardCodecStates(parse(job.record.config)).of(job.record.layout.shards[own_shard(job)])


def send(job: Job, worker: Channel, kind: Kind, nbytes: int = 0, **fields: int) -> None:
    header = Header(kind, job.view.number, shard=own_shard(job), length=nbytes)._replace(**fields)
    worker.send(header, memoryview(bytes(nbytes)) if nbytes else None)


@pytest.mark.parametrize(("kind", "fields", "why"), [
    (Kind.CODEC_STATE, {"shard": 99}, "shard 99 of a job that has 4"),
    (Kind.RECALL, {"shard": 99}, "shard 99 of a job that has 4"),
    (Kind.CODEC_STATE, {"replica": REPLICAS}, "this job has 2"),
    (Kind.RECALL, {"replica": 2**32 - 1}, "this job has 2"),
])  # fmt: skip
def test_a_codec_state_of_a_shard_or_replica_that_does_not_exist_closes_that_connection_only(
    job: Job, kind: Kind, fields: dict[str, int], why: str
) -> None:
    worker = worker_of(job)
    send(job, worker, kind, **fields)
    assert why in refusal(worker)
    job.settle()
    assert job.runs()


@pytest.mark.parametrize(("more", "code", "copy"), [(-1, 0, 0), (1, 0, COPY), (0, 1, 0)])
def test_a_codec_state_of_a_wrong_length_or_codec_closes_that_connection_only(
    job: Job, more: int, code: int, copy: int
) -> None:
    worker, of = worker_of(job), limits(job)
    nbytes = of.least + more if more < 0 else of.most + more
    send(job, worker, Kind.CODEC_STATE, nbytes, codec=of.code + code, base=copy)
    assert f"a codec state of {nbytes} bytes in codec {of.code + code}" in refusal(worker)
    job.settle()
    assert job.runs()


def test_a_codec_state_goes_to_the_worker_that_asks_next(job: Job) -> None:
    worker, of = worker_of(job), limits(job)
    send(job, worker, Kind.INITIAL, 4 * WORDS)
    assert worker.receive_header().kind is Kind.CREDIT
    send(job, worker, Kind.CODEC_STATE, of.least, codec=of.code, replica=1, step=0)
    taken = worker.receive_header()
    assert (taken.kind, taken.shard, taken.replica) == (Kind.TAKEN, own_shard(job), 1)
    for replica in (0, 1):
        send(job, worker, Kind.RECALL, replica=replica)
    nothing = worker.receive_header()
    assert (nothing.kind, nothing.replica, nothing.length) == (Kind.CODEC_STATE, 0, 0)
    there = worker.receive_header()
    assert (there.kind, there.replica, there.step, there.codec) == (Kind.CODEC_STATE, 1, 0, of.code)
    assert bytes(worker.receive_bytes(there)) == bytes(of.least)


def test_a_standby_gives_copies_and_gets_no_codec_state(job: Job) -> None:
    """Else a replica would go on from what it says, as soon as the replica moves. It is answered: it may be late."""
    peer, of = standby(job), limits(job)
    worker = worker_of(job)
    send(job, worker, Kind.INITIAL, 4 * WORDS)
    assert worker.receive_header().kind is Kind.CREDIT
    send(job, peer, Kind.CODEC_STATE, of.least, codec=of.code, replica=1, base=COPY)
    send(job, peer, Kind.RECALL, replica=1)
    send(job, peer, Kind.CODEC_STATE, of.least, codec=of.code, replica=1)
    assert peer.receive_header().kind is Kind.TAKEN, "and no answer to what it has asked for"
    send(job, worker, Kind.RECALL, replica=1)
    nothing = worker.receive_header()
    assert (nothing.kind, nothing.replica, nothing.length) == (Kind.CODEC_STATE, 1, 0)
    states = reducer(job)._codec_states
    assert states._copies == {}


def test_a_job_whose_codecs_have_no_state_takes_no_codec_state(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")
    job = Job()
    try:
        worker = worker_of(job)
        send(job, worker, Kind.RECALL)
        assert "whose codec has none in this job" in refusal(worker)
    finally:
        job.close()
