"""A state that a worker brings to a server is read before it goes on: whatever it is not closes its connection."""

from __future__ import annotations

import numpy as np
import pytest
from test_strangers import WORDS, Job, job_of, record, refusal

from rallypoint.core.policy import AllReduce, Sync
from rallypoint.net.frames import Header, Kind
from rallypoint.store.record import ShardRecord, encode_record
from support.beside import until

ARRAYS = ("master", "exp_avg", "exp_avg_sq")


all_reduce = job_of(lambda: Job(record(sync=AllReduce()), replication=1))  # its workers hold the state: no backups
sync = job_of(lambda: Job(record(sync=Sync())))


def state(
    shard: int, version: int = 4, words: int = WORDS, names: tuple[str, ...] = ARRAYS, dtype: str = "float32"
) -> bytes:
    arrays = {name: np.ones(words, dtype=dtype) for name in names}
    scalars = {"step": float(version)} if "exp_avg" in names else {}
    return encode_record(ShardRecord(shard, version, arrays, scalars), "none")


def say(job: Job, data: bytes, *, kind: Kind = Kind.STATE, step: int = 4, shard: int | None = None) -> str:
    """What a server says to a worker that sends this."""
    own = job.view.shards_of("server0")[0] if shard is None else shard
    worker = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    worker.send(Header(kind, job.view.number, shard=own, step=step, length=len(data)), memoryview(data))
    return refusal(worker)


def test_a_state_goes_on_to_whoever_follows_byte_for_byte_as_the_version_it_is_of(all_reduce: Job) -> None:
    job, shard = all_reduce, all_reduce.view.shards_of("server0")[0]
    worker = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    data = state(shard)
    worker.send(Header(Kind.STATE, job.view.number, shard=shard, step=4, length=len(data)), memoryview(data))
    until(lambda: job.version(0, shard) == 4)
    worker.send(Header(Kind.FOLLOW, job.view.number))
    while (header := worker.receive_header()).kind is Kind.CREDIT:
        pass
    assert (header.kind, header.shard, header.step) == (Kind.STATE, shard, 4)
    assert bytes(worker.receive_bytes(header)) == data


@pytest.mark.some("dtype", "noise", "version")
@pytest.mark.parametrize(("data", "sentence"), [
    (lambda shard: b"RPS1" + bytes(90), "a shard's state that cannot be read"),
    (lambda shard: state(shard + 1), "under the name of"),
    (lambda shard: state(shard, version=5), "at version 5 under the name of"),
    (lambda shard: state(shard, words=WORDS - 1), "does not fit this job's layout"),
    (lambda shard: state(shard, dtype="float64"), "does not fit this job's layout"),
    (lambda shard: state(shard, names=("exp_avg", "exp_avg_sq")), "does not fit this job's layout"),
    (lambda shard: state(shard, names=("master", "exp_avg")), "does not fit this job's layout"),
    (lambda shard: state(shard, names=(*ARRAYS, "own")), "does not fit this job's layout"),
], ids=["noise", "shard", "version", "words", "dtype", "master", "moment", "strange"])  # fmt: skip
def test_a_state_that_is_none_is_refused(all_reduce: Job, data: object, sentence: str) -> None:
    shard = all_reduce.view.shards_of("server0")[0]
    assert callable(data)
    assert sentence in say(all_reduce, data(shard))
    all_reduce.settle()
    assert all_reduce.version(0, shard) == -1
    assert all_reduce.runs()


def test_parameters_without_their_moments_are_no_beginning_where_workers_have_the_state(all_reduce: Job) -> None:
    said = say(all_reduce, bytes(4 * WORDS), kind=Kind.INITIAL, step=0)
    assert "this job has none" in said
    assert all_reduce.runs()


def test_a_state_of_a_version_that_never_comes_is_refused(all_reduce: Job) -> None:
    shard = all_reduce.view.shards_of("server0")[0]
    assert "at version 99: this job has none" in say(all_reduce, state(shard, version=99), step=99)


def test_no_worker_brings_a_state_where_servers_have_it(sync: Job) -> None:
    shard = sync.view.shards_of("server0")[0]
    assert "this job has none" in say(sync, state(shard))
    assert sync.version(0, shard) == -1


