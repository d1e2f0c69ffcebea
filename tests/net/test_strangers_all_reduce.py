"""A state that a worker brings to a server is read before it goes on: whatever it is not closes its connection."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from test_strangers import WORDS, Job, job_of, record, reducer, refusal

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


# ---- a primary tells its backup over the wire whose contributions a quorum takes, before a server hears the norm ----


SHARDS = range(4)


quorum = job_of(lambda: Job(record(sync=Sync(quorum=2))))
job = job_of(Job)


def _knows(job: Job, shard: int, step: int) -> tuple[int, ...]:
    """What the shard's backup knows of the choice for a step."""
    backup = int(job.view.backup[shard].removeprefix("server"))
    machine = reducer(job, backup).machine.machine(shard)
    return machine._choice.known(step)


def test_the_backup_knows_the_choice_before_the_step_is_decided(quorum: Job) -> None:
    job, weights = quorum, memoryview(np.ones(WORDS, dtype=np.float32)).cast("B")
    links = {f"server{i}": job.enter(server._gate.address, "worker", "worker0") for i, server in enumerate(job.servers)}
    for shard, server in job.view.primary.items():
        links[server].send(Header(Kind.INITIAL, job.view.number, shard=shard, length=len(weights)), weights)
    until(lambda: job.coordinator._shell.machine.exposed == 0)
    # One shard's quorum is not complete: no verdict is possible, and the others' choices are known all the same.
    for shard, server in job.view.primary.items():
        for replica in (1, 0) if shard else (1,):
            header = Header(Kind.PUSH, job.view.number, shard=shard, replica=replica, weight=1.0, length=len(weights))
            links[server].send(header, weights)
    until(lambda: all(_knows(job, shard, 0) == (1, 0) for shard in SHARDS if shard))
    assert _knows(job, 0, 0) == ()
    assert [job.version(server, shard) for server in (0, 1) for shard in SHARDS] == [0] * 8
    last = Header(Kind.PUSH, job.view.number, shard=0, replica=0, weight=1.0, length=len(weights))
    links[job.view.primary[0]].send(last, weights)
    until(lambda: [job.version(server, shard) for server in (0, 1) for shard in SHARDS] == [1] * 8)
    assert _knows(job, 0, 0) == (1, 0)


@pytest.mark.parametrize(
    ("replicas", "step", "shard", "sentence"),
    [
        ([0], 0, 0, "a choice of 1 contributions that this job cannot make"), ([0, 0], 0, 0, "cannot make"),
        ([0, 2], 0, 0, "cannot make"), ([0, -1], 0, 0, "cannot make"), ([0, 1], 9, 0, "cannot make"),
        ([0, 1], 0, 4, "shard 4 of a job that has 4"),
        ([0, "1"], 0, 0, "a choice of contributions that cannot be read"),
        ({"0": 1}, 0, 0, "a choice of contributions that cannot be read"),
    ],
)
def test_a_choice_that_the_job_cannot_make_closes_the_connection(
    quorum: Job, replicas: object, step: int, shard: int, sentence: str
) -> None:
    assert sentence in _refusal(quorum, replicas, step=step, shard=shard)
    assert quorum.runs()


def test_without_a_quorum_there_is_no_choice(job: Job) -> None:
    assert "a choice of 2 contributions that this job cannot make" in _refusal(job, [0, 1])


def test_a_choice_counts_only_from_the_shard_s_primary(quorum: Job) -> None:
    """Server 1 says it of a shard whose backup it is itself."""
    shard = quorum.view.shards_of("server0")[0]
    data = memoryview(msgspec.msgpack.encode([0, 1]))
    peer = quorum.enter(quorum.servers[0]._gate.address, "server", "server1")
    peer.send(Header(Kind.CHOICE, quorum.view.number, shard=shard, length=len(data)), data)
    peer.send(Header(Kind.CHOICE, quorum.view.number, shard=4))
    assert "shard 4" in refusal(peer)  # so the first has been read
    quorum.settle()
    machine = reducer(quorum).machine.machine(shard)
    assert machine._choice.known(0) == ()


def _refusal(job: Job, replicas: object, *, step: int = 0, shard: int = 0) -> str:
    data = memoryview(msgspec.msgpack.encode(replicas))
    peer = job.enter(job.servers[0]._gate.address, "server", "server1")
    peer.send(Header(Kind.CHOICE, job.view.number, shard=shard, step=step, length=len(data)), data)
    return refusal(peer)
