"""A primary tells its backup over the wire whose contributions a quorum takes, before any server hears the norm."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from test_strangers import WORDS, Job, job_of, record, reducer, refusal

from rallypoint.core.policy import Sync
from rallypoint.net.frames import Header, Kind
from support.beside import until

SHARDS = range(4)


quorum = job_of(lambda: Job(record(sync=Sync(quorum=2))))
job = job_of(Job)


def _knows(job: Job, shard: int, step: int) -> tuple[int, ...]:
    """What the shard's backup knows of the choice for a step."""
    backup = int(job.view.backup[shard].removeprefix("server"))
    machine = reducer(job, backup).machine.machine(shard)
    assert machine is not None
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
    assert machine is not None
    assert machine._choice.known(0) == ()


def _refusal(job: Job, replicas: object, *, step: int = 0, shard: int = 0) -> str:
    data = memoryview(msgspec.msgpack.encode(replicas))
    peer = job.enter(job.servers[0]._gate.address, "server", "server1")
    peer.send(Header(Kind.CHOICE, job.view.number, shard=shard, step=step, length=len(data)), data)
    return refusal(peer)
