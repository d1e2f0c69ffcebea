"""A worker's encoder: each shard by its group's codec, the same payload for the same step, memory for each replica."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.codec.build import CodecState, ShardCodecs
from rallypoint.codec.spec import DGC, Bf16, CodecSpec, Int8, PowerSGD, Raw, Sign, TopK
from rallypoint.config import JobConfig, ranks_of, resolve
from rallypoint.core.layout import Layout, TensorSpec, build_layout
from rallypoint.errors import ProtocolError
from rallypoint.worker.exchange.pushes import Encoder, Payload

SHARD_BYTES = 64 << 10
SPECS = [
    TensorSpec("mean", (3000,), "float32", -1),
    TensorSpec("body", (400, 200), "float32", 0),
    TensorSpec("bias", (400,), "float32", 1),
    TensorSpec("head", (1000, 100), "float32", 2),
    TensorSpec("tail", (1000, 100), "float32", 3),
]


def setting(
    job: CodecSpec, head: CodecSpec | None = None, tail: CodecSpec | None = None, **others: Any
) -> tuple[Layout, JobConfig]:
    groups = (rp.Group(match=("head",), codec=head), rp.Group(match=("tail",), codec=tail))
    settings = {"codec": job, "groups": groups, "network.shard_bytes": SHARD_BYTES, "replicas": 2,
        "optimizer": rp.SGD(lr=0.1), **others}
    config = resolve(settings)
    return build_layout(SPECS, config.network.shard_bytes, ranks_of(config)), config


def encoders(count: int, *codecs: CodecSpec, **others: Any) -> tuple[int, list[Encoder]]:
    """The words of shard 0, and so many encoders."""
    layout, config = setting(*codecs, **others)
    return layout.shards[0].words, [Encoder(layout, config) for _ in range(count)]


def gradient(words: int, seed: int) -> torch.Tensor:
    return torch.randn(words, generator=torch.Generator().manual_seed(seed))


def sent(encoder: Encoder, shard: int, step: int, replica: int, values: torch.Tensor) -> bytes:
    """The payload's bytes; b"" when it goes raw."""
    payload = encoder.encode(shard, step, replica, values)
    if payload is None:
        return b""
    data = bytes(payload.data)
    payload.buffer.release()
    return data


def test_each_group_takes_the_bytes_of_its_codec() -> None:
    layout, config = setting(Int8(), TopK(ratio=0.01, sampled=False), Sign())
    encoder, used, whole = Encoder(layout, config), [0] * 5, [0] * 5
    for shard in layout.shards:
        used[shard.group] += len(sent(encoder, shard.index, 0, 0, gradient(shard.words, shard.index)))
        whole[shard.group] += shard.nbytes
    ratios = [a / b for a, b in zip(used, whole, strict=True) if b]
    int8, vectors, topk, sign, buffers = ratios
    assert 0.25 < int8 < 0.27
    assert 0.25 < vectors < 0.36  # 400 words are two blocks
    assert 0.015 <= topk < 0.02
    assert 1 / 32 < sign < 0.04
    assert buffers == 0.0  # raw


def test_what_goes_raw_is_not_encoded() -> None:
    layout, config = setting(PowerSGD(rank=4), Raw(), Bf16())
    encoder = Encoder(layout, config)
    for shard in layout.shards:
        payload = sent(encoder, shard.index, 0, 0, gradient(shard.words, 0))
        assert bool(payload) == (shard.group in (0, 3)), shard


@pytest.mark.parametrize("spec", [Int8(), TopK(), Sign(), PowerSGD(rank=2)])
def test_a_contribution_that_is_sent_again_is_the_same_and_moves_no_residual(spec: CodecSpec) -> None:
    words, (encoder, other) = encoders(2, spec)
    first = sent(encoder, 0, 0, 1, gradient(words, 0))
    assert sent(encoder, 0, 0, 1, gradient(words, 5)) == first  # the slot may hold anything by then
    assert sent(other, 0, 0, 1, gradient(words, 0)) == first
    assert sent(encoder, 0, 1, 1, gradient(words, 1)) == sent(other, 0, 1, 1, gradient(words, 1))


def test_each_replica_has_a_memory_of_its_own_and_a_roll_back_empties_all() -> None:
    words, (encoder,) = encoders(1, PowerSGD(rank=2))
    first = sent(encoder, 0, 0, 0, gradient(words, 0))
    assert sent(encoder, 0, 0, 1, gradient(words, 0)) == first
    assert sent(encoder, 0, 1, 0, gradient(words, 0)) != first  # its residual and its Q
    encoder.reset()
    assert sent(encoder, 0, 0, 0, gradient(words, 0)) == first


def test_a_gradient_that_is_not_finite_goes_raw_and_is_not_remembered() -> None:
    words, (encoder, other) = encoders(2, Int8())
    assert encoder.encode(0, 0, 0, torch.full((words,), math.nan)) is None
    assert sent(encoder, 0, 1, 0, gradient(words, 0)) == sent(other, 0, 1, 0, gradient(words, 0))


@pytest.mark.parametrize("spec", [Int8(), TopK(), Sign(), DGC(ratio=0.01, warmup_steps=3), PowerSGD(rank=2)])
def test_a_replica_that_moves_goes_on_as_it_would_have(spec: CodecSpec) -> None:
    words, (stays, goes, heir) = encoders(3, spec)
    for step in range(3):
        assert sent(stays, 0, step, 1, gradient(words, step)) == sent(goes, 0, step, 1, gradient(words, step))
    codec_state = goes.give(0, 1)
    assert codec_state.step == 2
    assert goes.give(0, 1) is None  # it is given once
    heir.take(0, 1, codec_state)
    assert sent(heir, 0, 2, 1, gradient(words, 9)) == sent(stays, 0, 2, 1, gradient(words, 9))  # what was sent, again
    for step in range(3, 6):
        assert sent(heir, 0, step, 1, gradient(words, step)) == sent(stays, 0, step, 1, gradient(words, step))


@pytest.mark.parametrize("spec", [Int8(), TopK(), Sign(), DGC(ratio=0.01, warmup_steps=3), PowerSGD(rank=2)])
def test_a_codec_state_that_lacks_a_step_that_was_made_elsewhere_is_not_used(spec: CodecSpec) -> None:
    """Another worker has contributed step 1, from a codec state of its own: this one is stale."""
    words, (away, new) = encoders(2, spec)
    sent(away, 0, 0, 1, gradient(words, 0))
    for step in range(2, 4):
        assert sent(away, 0, step, 1, gradient(words, step)) == sent(new, 0, step, 1, gradient(words, step))


@pytest.mark.parametrize(("quorum", "same"), [(1, True), (None, False)])
def test_with_a_quorum_a_snapshot_has_the_state_from_before_the_steps_that_did_without_the_replica(
    quorum: int | None, same: bool
) -> None:
    """Without one such a state is stale: the replica goes on from none."""
    words, (late, resumed) = encoders(2, PowerSGD(rank=2), sync=rp.Sync(quorum=quorum))
    sent(late, 0, 0, 1, gradient(words, 0))
    copy = late.copy(0, 1, 3)
    assert bool(copy.data) == same
    resumed.take(0, 1, replace(copy, step=2) if copy.data else None)  # a server names it for the version
    assert sent(resumed, 0, 3, 1, gradient(words, 3)) == sent(late, 0, 3, 1, gradient(words, 3))


def test_with_a_quorum_a_codec_state_goes_on_after_steps_that_did_without_the_replica() -> None:
    words, (late, new) = encoders(2, PowerSGD(rank=2), sync=rp.Sync(quorum=1))
    sent(late, 0, 0, 1, gradient(words, 0))
    assert sent(late, 0, 2, 1, gradient(words, 2)) != sent(new, 0, 2, 1, gradient(words, 2))


def test_a_contribution_that_went_raw_goes_raw_again_from_whoever_takes_the_replica_over() -> None:
    words, (encoder, heir) = encoders(2, Int8())
    sent(encoder, 0, 0, 0, gradient(words, 0))
    assert encoder.encode(0, 1, 0, torch.full((words,), math.nan)) is None
    codec_state = encoder.give(0, 0)
    assert codec_state.step == 1
    heir.take(0, 0, codec_state)
    assert heir.encode(0, 1, 0, torch.full((words,), math.nan)) is None
    assert heir.encode(0, 2, 0, gradient(words, 2)) is not None


def test_a_copy_for_a_step_is_of_the_state_before_it_or_after_it_or_of_none_and_is_gone_once_the_next_is_made() -> None:
    layout, config = setting(TopK(ratio=0.1, sampled=False))
    encoder, values = Encoder(layout, config), gradient(layout.shards[0].words, 1)
    none = encoder.copy(0, 0, 4)
    assert (none.step, len(none.data)) == (3, 0), "it begins with step 4"
    sent(encoder, 0, 4, 0, values)
    assert encoder.copy(0, 0, 3) is None
    assert encoder.copy(0, 0, 4) == encoder.copy(0, 0, 5)
    kept = encoder.copy(0, 0, 5)
    assert kept == encoder.give(0, 0)
    assert (kept.step, len(kept.data) > 0) == (4, True)


def test_a_codec_state_with_a_longer_contribution_than_a_shard_has_is_refused() -> None:
    layout, config = setting(Int8())
    encoder = Encoder(layout, config)
    sent(encoder, 0, 0, 0, gradient(layout.shards[0].words, 0))
    codec_state = encoder.give(0, 0)
    assert codec_state is not None
    with pytest.raises(ProtocolError, match="a codec state of shard 0 with a contribution of"):
        encoder.take(0, 0, CodecState(codec_state.step, codec_state.code,
            memoryview(bytes(codec_state.data) + bytes(1000))))


def test_kept_payloads_take_their_own_groups_size() -> None:
    layout, config = setting(TopK(ratio=0.01), Bf16())
    encoder, kept = Encoder(layout, config), 0
    for shard in (s for s in layout.shards if s.group == 0):
        payload = encoder.encode(shard.index, 0, 0, gradient(shard.words, 0))
        assert isinstance(payload, Payload)
        kept += payload.buffer.bytes.nbytes
    assert kept < 0.02 * sum(shard.slot_bytes for shard in layout.shards if shard.group >= 0)


def train(spec: CodecSpec, steps: int = 150) -> float:
    """A linear regression of two replicas through encoder and decoders: the loss at the end over that before."""
    source = torch.Generator().manual_seed(1)
    wanted = torch.randn(48, 6, generator=source) @ torch.randn(6, 64, generator=source)
    settings: dict[str, Any] = {"codec": spec, "network.shard_bytes": 4096, "replicas": 2}
    config = resolve(settings)
    layout = build_layout([TensorSpec("w", (48, 64), "float32", 0)], config.network.shard_bytes, ranks_of(config))
    encoder, decoders = Encoder(layout, config), ShardCodecs(config)
    weights = torch.zeros(48 * 64)

    def loss() -> float:
        return float((weights.view(48, 64) - wanted).square().mean())

    before = loss()
    for step in range(steps):
        total = torch.zeros_like(weights)
        for replica in range(2):
            x = torch.randn(32, 48, generator=source)
            gradient = (x.t() @ (x @ (weights.view(48, 64) - wanted)) / 32).reshape(-1)
            for shard in layout.shards:
                part = gradient[shard.start : shard.stop]
                payload, codec = encoder.encode(shard.index, step, replica, part), decoders.of(shard)
                if payload is None or codec is None:
                    total[shard.start : shard.stop] += part
                    continue
                codec.decode_add(payload.data, total[shard.start : shard.stop])
                payload.buffer.release()
        weights -= 0.1 * total
    return loss() / before


def test_powersgd_learns_a_regression_as_raw_does() -> None:
    assert train(Raw()) < 1e-6
    assert train(PowerSGD(rank=4)) < 1e-3
    assert train(PowerSGD(rank=4, error_feedback=False)) < 1e-2
