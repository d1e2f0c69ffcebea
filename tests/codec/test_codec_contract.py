"""What every codec promises, whatever its format."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import pytest
import torch
from codec_cases import (
    EDGES,
    FINITE_ONLY,
    SIZES,
    SPECS,
    STATEFUL,
    decoded,
    decoder_of,
    encoded,
    encoder_of,
    gradient,
    same_bytes,
    shape_for,
    there_and_back,
)

from rallypoint.codec.base import Codec, NonFinitePayload, Scratch, Stateful
from rallypoint.codec.build import build, build_stateless
from rallypoint.codec.sparse import DGCCodec
from rallypoint.codec.spec import DGC, CodecSpec, Int4, Int8, PowerSGD, RandomK, Raw, Sign, TopK
from rallypoint.errors import ConfigError, ProtocolError, UsageError
from rallypoint.net.pool import bytes_of

ALL = pytest.mark.parametrize("name", SPECS)
WORDS = 48 * 80


@ALL
@pytest.mark.parametrize("words", SIZES)
def test_any_number_of_words_arrives(name: str, words: int) -> None:
    codec, values = encoder_of(name, words), gradient(words)
    before = values.clone()
    payload = encoded(codec, values)
    assert len(payload) <= codec.bytes_for(words)
    assert same_bytes(values, before), "encode changed its input"
    arrived = decoded(decoder_of(name, words), payload, words)
    assert torch.isfinite(arrived).all()
    if words:
        assert float((arrived * values).sum()) > 0, "what arrives points where the values do"


@ALL
@pytest.mark.parametrize("words", [257, 48 * 80, 300 * 500])
@pytest.mark.parametrize("weight", [1.0, 0.3, -2.0])
def test_decode_add_is_decode_then_add(name: str, words: int, weight: float) -> None:
    payload = encoded(encoder_of(name, words), gradient(words))
    decoder, start = decoder_of(name, words), gradient(words, seed=1)
    expected = start + decoded(decoder, payload, words) * weight
    decoder.decode_add(payload, total := start.clone(), weight)
    if decoder.code == 8:  # PowerSGD adds inside the product
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)
    else:
        assert same_bytes(total, expected)


@ALL
def test_a_shard_in_pieces_adds_to_negative_zero_as_documented(name: str) -> None:
    decoder = decoder_of(name, WORDS)
    decoder.decode_add(encoded(encoder_of(name, WORDS), torch.zeros(WORDS)), total := torch.full((WORDS,), -0.0))
    assert not total.any()


@ALL
def test_the_same_seed_gives_the_same_bytes(name: str) -> None:
    values = gradient(WORDS)
    first, again, other = (bytes(encoded(encoder_of(name, WORDS), values, seed)) for seed in (3, 3, 4))
    assert first == again
    if name.startswith("randomk") or name.endswith("stochastic"):
        assert first != other


@ALL
@pytest.mark.parametrize("seed", [0, -1, 1 << 63, 1 << 70])
def test_any_integer_is_a_seed(name: str, seed: int) -> None:
    values = gradient(WORDS)
    assert torch.isfinite(there_and_back(encoder_of(name, WORDS), values, seed)).all()


@ALL
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("words", [1, 1000, WORDS])
def test_edges_decode_to_finite_words_no_larger_than_what_was_sent(name: str, edge: str, words: int) -> None:
    values = EDGES[edge](words)
    if name == "fp16" and edge in ("large", "near the end of the range"):
        return  # beyond its range: an infinity, see below
    codec = encoder_of(name, words)
    if edge == "near the end of the range" and name in ("randomk", "powersgd", "powersgd-feedback"):
        return  # the product may be beyond fp32: NonFinitePayload, see below
    arrived = there_and_back(codec, values)
    assert torch.isfinite(arrived).all()
    if not values.any():
        assert not arrived.any()
    growth = {"randomk": 101.0, "powersgd": 5.0, "powersgd-feedback": 5.0}.get(name, 1.01)
    assert float(arrived.double().abs().max()) <= growth * float(values.double().abs().max())


@pytest.mark.parametrize("name", FINITE_ONLY)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1234, WORDS - 1])
def test_what_cannot_be_carried_is_refused_before_the_codec_state_changes(name: str, poison: float, place: int) -> None:
    codec = encoder_of(name, WORDS)
    encoded(codec, gradient(WORDS))
    before = {key: tensor.clone() for key, tensor in codec.state().items()} if isinstance(codec, Stateful) else {}
    values = gradient(WORDS, seed=2)
    values[place] = poison
    with pytest.raises(NonFinitePayload, match="NaN or infinity"):
        encoded(codec, values)
    if isinstance(codec, Stateful):
        assert all(torch.equal(tensor, before[key]) for key, tensor in codec.state().items())


@pytest.mark.parametrize("name", ["raw", "fp16", "bf16"])
def test_casts_carry_what_is_not_finite(name: str) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -0.0])
    arrived = there_and_back(encoder_of(name, 5), values)
    torch.testing.assert_close(arrived, values, rtol=0, atol=0, equal_nan=True)
    assert math.copysign(1.0, float(arrived[4])) == -1.0
    assert encoder_of(name, 5).carries_nonfinite


@pytest.mark.parametrize("name", ["randomk", "powersgd-feedback", "dgc", "int8-feedback"])
def test_sums_beyond_fp32_are_refused(name: str) -> None:
    codec: Codec = DGCCodec(WORDS, ratio=0.01) if name == "dgc" else encoder_of(name, WORDS)
    values = torch.where(torch.arange(WORDS) % 7 == 0, 3.4e38, 1.7e38)

    def steps() -> None:
        for _ in range(12):
            encoded(codec, values)

    with pytest.raises(NonFinitePayload, match="NaN or infinity"):
        steps()
    if isinstance(codec, Stateful):
        assert all(torch.isfinite(tensor).all() for tensor in codec.state().values())


@ALL
def test_what_a_codec_does_not_work_on_is_refused(name: str) -> None:
    codec = encoder_of(name, WORDS)
    room = bytes_of(torch.zeros(WORDS + 1))
    with pytest.raises(UsageError, match="contiguous"):
        codec.encode(torch.zeros(2 * WORDS)[::2], room, seed=0)
    for wrong in (torch.zeros(WORDS, dtype=torch.float64), torch.zeros(48, 80)):
        with pytest.raises(UsageError, match="float32"):
            codec.encode(wrong, room, seed=0)
        with pytest.raises(UsageError, match="float32"):
            codec.decode(room, wrong)
    for out in (room[:8], memoryview(bytes(4 * WORDS)), room[1:]):
        with pytest.raises(UsageError, match="payload"):
            codec.encode(gradient(WORDS), out, seed=0)


@ALL
def test_a_payload_may_be_read_only_or_lie_anywhere(name: str) -> None:
    payload = encoded(encoder_of(name, WORDS), gradient(WORDS))
    decoder = decoder_of(name, WORDS)
    expected = decoded(decoder, payload, WORDS)
    assert same_bytes(decoded(decoder, memoryview(bytes(payload)), WORDS), expected)
    assert same_bytes(decoded(decoder, memoryview(bytearray(b"x" + payload))[1:], WORDS), expected)


@ALL
@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_a_payload_of_another_length_is_refused_and_touches_nothing(name: str, change: int) -> None:
    payload = bytes(encoded(encoder_of(name, WORDS), gradient(WORDS)))
    wrong = memoryview(payload[:change] if change < 0 else payload + b"\0" * change)
    into = torch.ones(WORDS)
    for read in (decoder_of(name, WORDS).decode, decoder_of(name, WORDS).decode_add):
        with pytest.raises(ProtocolError):
            read(wrong, into)
    assert torch.equal(into, torch.ones(WORDS))


@pytest.mark.parametrize("name", STATEFUL)
def test_state_moves_to_another_codec_and_can_be_forgotten(name: str) -> None:
    here, there = encoder_of(name, WORDS), encoder_of(name, WORDS)
    first = bytes(encoded(here, gradient(WORDS)))
    encoded(here, gradient(WORDS, seed=1))
    assert isinstance(here, Stateful)
    assert isinstance(there, Stateful)
    there.load_state({key: tensor.clone() for key, tensor in here.state().items()})
    assert bytes(encoded(there, gradient(WORDS, seed=2))) == bytes(encoded(here, gradient(WORDS, seed=2)))
    here.reset()
    assert bytes(encoded(here, gradient(WORDS))) == first
    with pytest.raises(UsageError, match="another codec's state"):
        here.load_state({})


@pytest.mark.parametrize("name", [name for name in STATEFUL if name != "powersgd"])
def test_a_codec_with_a_state_serves_its_own_shard_only(name: str) -> None:
    with pytest.raises(UsageError, match=r"serves a (shard|parameter)"):
        encoded(encoder_of(name, WORDS), gradient(WORDS + 1))


WIRE = {
    "raw": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 0.27, "int4": 0.15, "topk": 0.02, "randomk": 0.0101, "sign": 0.04,
    "powersgd": 0.0214,
}  # fmt: skip


@ALL
@pytest.mark.parametrize("words", SIZES)
def test_both_sides_know_the_same_bound(name: str, words: int) -> None:
    assert encoder_of(name, words).bytes_for(words) == decoder_of(name, words).bytes_for(words)


@pytest.mark.parametrize("name", WIRE)
def test_bytes_on_the_wire_are_what_theory_says(name: str) -> None:
    words = 300 * 500
    used = len(encoded(encoder_of(name, words), gradient(words)))
    assert 0.7 * WIRE[name] < used / (4 * words) <= WIRE[name]


def test_each_wire_format_has_a_number_of_its_own() -> None:
    codes = {name: decoder_of(name, WORDS).code for name in SPECS}
    assert codes["raw"] == 0
    assert codes["topk"] == codes["dgc"]
    assert set(codes.values()) == set(range(9))
    assert all(encoder_of(name, WORDS).code == codes[name] for name in SPECS)
    assert [name for name in SPECS if decoder_of(name, WORDS).lossless] == ["raw"]


@ALL
def test_a_spec_survives_being_written_down(name: str) -> None:
    assert msgspec.json.decode(msgspec.json.encode(SPECS[name]), type=CodecSpec) == SPECS[name]


@pytest.mark.parametrize(
    "spec",
    [
        Int8(block=100), Int4(block=16), Sign(block=1 << 20), TopK(ratio=0.0), TopK(ratio=1.5), RandomK(ratio=-1.0),
        DGC(momentum=1.0), DGC(clip=0.0), DGC(warmup_steps=-1), PowerSGD(rank=0),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(spec: CodecSpec) -> None:
    with pytest.raises(ConfigError):
        build(spec, (64, 64))


def test_powersgd_sends_raw_what_is_no_worthwhile_matrix() -> None:
    for shape in [(1000,), (4, 4), (3, 1000), (2, 3, 4), ()]:
        assert build(PowerSGD(rank=4), shape).lossless
    assert build(Raw(), (10,)).lossless
    assert not build(PowerSGD(rank=4), (64, 64)).lossless


def test_a_configuration_is_read_without_torch() -> None:
    program = "import sys, rallypoint.codec.spec; print(*sorted({'torch', 'numpy'} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout.strip() == ""


def test_codecs_of_one_thread_share_scratch() -> None:
    scratch = Scratch()
    codecs: list[tuple[Codec, Codec]] = [
        (build(spec, shape_for(spec, WORDS), scratch), build_stateless(spec, shape_for(spec, WORDS), scratch))
        for spec in SPECS.values()
    ]
    for (encoder, decoder), name in zip(codecs, SPECS, strict=True):
        payload = encoded(encoder, gradient(WORDS))
        assert bytes(payload) == bytes(encoded(encoder_of(name, WORDS), gradient(WORDS)))
        assert same_bytes(decoded(decoder, payload, WORDS), decoded(decoder_of(name, WORDS), payload, WORDS))
