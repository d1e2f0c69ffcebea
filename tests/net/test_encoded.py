"""Contributions that a codec has written: a server takes those of the shard's own codec and length, and no others."""

from __future__ import annotations

import pytest
import torch
from test_strangers import Job, job_of, refusal

import rallypoint as rp
from rallypoint.codec.build import ShardCodecs, build_stateless
from rallypoint.codec.spec import Bf16, Int8, PowerSGD, TopK
from rallypoint.config import parse, ranks_of, record_of, resolve
from rallypoint.core.layout import Shard, TensorSpec, build_layout
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.pool import bytes_of

GROUPS = (rp.Group(match=("head",), codec=Int8()), rp.Group(match=("tail",), codec=TopK(ratio=0.1)))
SPECS = [
    TensorSpec("w", (40, 30), "float32", 0), TensorSpec("head", (30, 20), "float32", 2),
    TensorSpec("tail", (700,), "float32", 3), TensorSpec("mean", (300,), "float32", -1),
]  # fmt: skip
FACTORS, INTEGERS, SPARSE, BUFFERS = 0, 2, 3, -1  # the groups, by how they are written


def made() -> Job:
    config = resolve({"replicas": 2, "batch": 1, "steps": 9, "codec": PowerSGD(rank=2), "groups": GROUPS})
    return Job(record_of(config, build_layout(SPECS, config.network.shard_bytes, ranks_of(config))))


job = job_of(made)


def place(job: Job, group: int) -> Shard:
    (shard,) = (shard for shard in job.record.layout.shards if shard.group == group)
    return shard


def payload_of(job: Job, group: int) -> tuple[int, memoryview]:
    """A codec number and the bytes of a contribution of ones."""
    shard = place(job, group)
    codec = ShardCodecs(parse(job.record.config)).of(shard) or build_stateless(Bf16())
    out = bytes_of(torch.empty(shard.words + 300))
    return codec.code, out[: codec.encode(torch.ones(shard.words), out, seed=0)]


def link_to(job: Job, shard: int) -> Channel:
    server = next(s for s in job.servers if s.id == job.view.primary[shard])
    return job.enter(server._gate.address, "worker", "worker0")


def push(channel: Channel, job: Job, shard: int, code: int, payload: memoryview) -> None:
    header = Header(Kind.PUSH, job.view.number, shard=shard, weight=1.0, codec=code, length=len(payload))
    channel.send(header, payload)


@pytest.mark.parametrize("group", [FACTORS, INTEGERS, SPARSE])
def test_what_the_shards_own_codec_wrote_is_taken(job: Job, group: int) -> None:
    shard = place(job, group).index
    channel = link_to(job, shard)
    first = bytes_of(torch.zeros(place(job, group).words))
    channel.send(Header(Kind.INITIAL, job.view.number, shard=shard, length=len(first)), first)
    push(channel, job, shard, *payload_of(job, group))
    assert [channel.receive_header().kind for _ in range(2)] == [Kind.CREDIT] * 2
    job.settle()
    assert job.runs()


@pytest.mark.parametrize("group", [FACTORS, INTEGERS, SPARSE])
@pytest.mark.parametrize("change", [-4, -1, 1, 2, 4, 6, 1000, None])
def test_a_payload_of_another_length_is_refused(job: Job, group: int, change: int | None) -> None:
    code, payload = payload_of(job, group)
    forged = memoryview((bytes(payload) + bytes(1000))[: len(payload) + change] if change is not None else b"")
    channel = link_to(job, place(job, group).index)
    push(channel, job, place(job, group).index, code, forged)
    assert refusal(channel)
    job.settle()
    assert job.runs()


@pytest.mark.some("-1--1", "-1-3", "0-2", "2-0", "3--1", "3-3")
@pytest.mark.parametrize("group", [FACTORS, INTEGERS, SPARSE, BUFFERS])
@pytest.mark.parametrize("other", [FACTORS, INTEGERS, SPARSE, BUFFERS])
def test_another_groups_codec_is_refused(job: Job, group: int, other: int) -> None:
    code, payload = payload_of(job, other)
    if group == other and group != BUFFERS:
        return
    channel = link_to(job, place(job, group).index)
    push(channel, job, place(job, group).index, code, payload)
    assert f"in codec {code} for shard {place(job, group).index}: impossible" in refusal(channel)
    job.settle()
    assert job.runs()
    assert [job.version(server, place(job, group).index) for server in range(2)] == [-1, -1]
