"""How far a decoded word is from the one that was sent, format by format; and from the mean of many."""

from __future__ import annotations

import pytest
import torch
from codec_cases import EDGES, encoded, gradient, same_bytes, there_and_back

from rallypoint.codec.base import PIECE_WORDS, digest_of
from rallypoint.codec.blocks import CastCodec, Int4Codec, Int8Codec, SignCodec
from rallypoint.codec.sparse import RandomKCodec, TopKCodec, count_for
from rallypoint.core.sums import leaf_digest

SIZES = [1, 63, 256, 1000, PIECE_WORDS + 300]


def steps_of(values: torch.Tensor, block: int, levels: int) -> torch.Tensor:
    """The scale of each word's block."""
    padded = torch.nn.functional.pad(values.double(), (0, -values.numel() % block))
    scales = padded.view(-1, block).abs().amax(1, keepdim=True) / levels
    return scales.expand(-1, block).reshape(-1)[: values.numel()]


@pytest.mark.parametrize("words", SIZES)
def test_casts_round_to_nearest(words: int) -> None:
    values = gradient(words, scale=1.0)
    assert same_bytes(there_and_back(CastCodec(torch.float32), values), values)
    for codec, error in ((CastCodec(torch.float16), 2.0**-11), (CastCodec(torch.bfloat16), 2.0**-8)):
        arrived = there_and_back(codec, values)
        assert bool(((arrived - values).abs() <= error * values.abs() + 2.0**-25).all())


def test_fp16_turns_what_is_too_large_into_an_infinity() -> None:
    values = torch.tensor([65504.0, 65520.0, -1e6])
    assert there_and_back(CastCodec(torch.float16), values).tolist() == [65504.0, float("inf"), float("-inf")]


@pytest.mark.parametrize("words", SIZES)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
@pytest.mark.parametrize("stochastic", [False, True])
def test_integers_are_within_half_a_step_or_one(words: int, scale: float, stochastic: bool) -> None:
    values = gradient(words, scale=scale)
    for codec in (Int8Codec(256, stochastic=stochastic), Int4Codec(64, stochastic=stochastic)):
        step = steps_of(values, codec.block, codec.levels)
        error = (there_and_back(codec, values).double() - values.double()).abs()
        assert bool((error <= step * (1.0 if stochastic else 0.5) * (1 + 1e-4)).all())


def test_integers_keep_each_blocks_largest_word_and_its_zeros() -> None:
    values = gradient(64 * 50)
    values[5::64] = 0.0
    for codec in (Int8Codec(64), Int4Codec(64), Int4Codec(64, stochastic=True)):
        arrived = there_and_back(codec, values)
        largest = values.view(-1, 64).abs().argmax(1, keepdim=True)
        torch.testing.assert_close(
            arrived.view(-1, 64).gather(1, largest), values.view(-1, 64).gather(1, largest), rtol=1e-6, atol=0
        )
        if not codec.stochastic:
            assert not arrived[5::64].any()


@pytest.mark.parametrize("codec", [Int8Codec(64), Int4Codec(64), SignCodec(64)])
def test_zeros_are_zero_bytes(codec: Int8Codec | Int4Codec | SignCodec) -> None:
    assert not any(encoded(codec, torch.zeros(1000)))


def test_words_of_one_block_do_not_disturb_another() -> None:
    values = gradient(1024)
    alone = there_and_back(Int8Codec(256), values)
    values[512:] *= 1e20
    assert same_bytes(there_and_back(Int8Codec(256), values)[:512], alone[:512])


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Int8Codec(32, stochastic=True), Int4Codec(32, stochastic=True)])
def test_stochastic_rounding_has_the_right_mean(codec: Int8Codec | Int4Codec) -> None:
    values = gradient(320, scale=1.0)
    rounds = 2000
    mean = sum(there_and_back(codec, values, seed).double() for seed in range(rounds)) / rounds
    # One draw is off by at most a step with variance at most a quarter of its square: five sigma.
    assert bool(((mean - values).abs() <= 5 * 0.5 * rounds**-0.5 * steps_of(values, 32, codec.levels)).all())
    nearest = there_and_back(type(codec)(32), values)
    assert (mean - values).norm() < 0.2 * (nearest - values).norm()


def test_stochastic_draws_differ_from_word_to_word_and_seed_to_seed() -> None:
    values = torch.full((64 * 1000,), 0.5)
    values[::64] = 7.0  # the step is 1, so each 0.5 goes to 0 or 1
    first, second = (there_and_back(Int4Codec(64, stochastic=True), values, seed) for seed in (1, 2))
    for arrived in (first, second):
        assert 0.48 < float(arrived.view(-1, 64)[:, 1:].mean()) < 0.52
    assert 0.47 < float((first != second).view(-1, 64)[:, 1:].float().mean()) < 0.53


@pytest.mark.parametrize("words", SIZES)
def test_a_sign_arrives_with_its_blocks_mean_magnitude(words: int) -> None:
    values = gradient(words)
    arrived = there_and_back(SignCodec(256), values)
    assert bool(((arrived < 0) == (values < 0)).all())
    for start in range(0, words, 256):
        block = slice(start, start + 256)
        expected = values[block].abs().mean().expand_as(values[block])
        torch.testing.assert_close(arrived[block].abs(), expected)
    assert (arrived - values).norm() <= values.norm()


def test_a_signs_scale_survives_a_sum_beyond_fp32() -> None:
    for words in (1024, 1000, 333):
        values = torch.full((words,), torch.finfo(torch.float32).max)
        torch.testing.assert_close(there_and_back(SignCodec(1024), values), values, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_random_words_have_the_right_mean() -> None:
    values = gradient(1003, scale=1.0)
    codec, rounds = RandomKCodec(0.1), 4000
    mean = sum(there_and_back(codec, values, seed).double() for seed in range(rounds)) / rounds
    assert bool(((mean - values).abs() <= 5 * 3.0 * rounds**-0.5 * values.abs()).all())  # variance 9 to 10 x squared


def test_random_words_without_scaling_are_those_that_were_sent() -> None:
    values = gradient(1003)
    arrived = there_and_back(RandomKCodec(0.1, unbiased=False), values)
    assert int((arrived != 0).sum()) == 101
    assert bool(((arrived == values) | (arrived == 0)).all())


def test_random_positions_are_never_sent() -> None:
    assert len(encoded(RandomKCodec(0.01), gradient(10_000))) == 8 + 4 * 100


# ---- Top-k: which words are sent ----


LONG = 3 * PIECE_WORDS + 77


def reference(values: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest magnitudes, the first among equals; zeros left out."""
    order = torch.sort(values.abs(), descending=True, stable=True).indices[:k]
    kept = torch.zeros_like(values)
    kept[order] = values[order]
    return kept


@pytest.mark.parametrize("words", [1, 7, 100, 65536, 65537, LONG])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_exact_sends_the_largest_as_they_are(words: int, ratio: float) -> None:
    values = gradient(words)
    arrived = there_and_back(TopKCodec(ratio, sampled=False), values)
    assert torch.equal(arrived, reference(values, count_for(ratio, words)))


@pytest.mark.parametrize("edge", EDGES)
def test_exact_is_exact_on_edges(edge: str) -> None:
    values = EDGES[edge](PIECE_WORDS + 5)
    arrived = there_and_back(TopKCodec(0.01, sampled=False), values)
    assert torch.equal(arrived, reference(values, count_for(0.01, values.numel())))


def test_exact_is_exact_where_the_large_words_are_together() -> None:
    values = gradient(LONG) * 1e-3
    values[70_000:73_000] += 1.0
    arrived = there_and_back(TopKCodec(0.01, sampled=False), values)
    assert torch.equal(arrived, reference(values, count_for(0.01, LONG)))


@pytest.mark.parametrize("seed", range(5))
def test_a_sampled_threshold_finds_nearly_the_same_words(seed: int) -> None:
    values = gradient(1 << 18, seed=seed)
    k = count_for(0.01, values.numel())
    arrived = there_and_back(TopKCodec(0.01), values, seed)
    sent = int((arrived != 0).sum())
    assert 0.8 * k <= sent <= k
    assert bool(((arrived == values) | (arrived == 0)).all())
    assert arrived.norm() > 0.98 * reference(values, k).norm()
    assert same_bytes(arrived, reference(values, sent))  # a threshold sends the largest, only perhaps too few


@pytest.mark.parametrize("edge", EDGES)
def test_a_sampled_threshold_sends_at_least_half_of_what_it_may(edge: str) -> None:
    values = EDGES[edge](1 << 18)
    k = count_for(0.01, values.numel())
    sent = int((there_and_back(TopKCodec(0.01), values) != 0).sum())
    assert min(k // 2, int((values != 0).sum())) <= sent <= k


def test_a_sampled_threshold_survives_values_in_step_with_the_sample() -> None:
    values = torch.full((1 << 18,), 1e-6)
    values[::41] = 1.0
    sent = int((there_and_back(TopKCodec(0.01), values) != 0).sum())
    assert sent == count_for(0.01, 1 << 18)


def test_a_sample_of_large_words_only_falls_back_to_the_exact_threshold() -> None:
    values = gradient(1 << 18)
    values[7::41] = torch.linspace(1.0, 2.0, len(range(7, 1 << 18, 41)))  # the very words that seed 7 samples
    arrived = there_and_back(TopKCodec(0.01), values, seed=7)
    assert torch.equal(arrived, reference(values, count_for(0.01, values.numel())))


def test_zeros_are_not_sent() -> None:
    values = torch.zeros(1000)
    values[3] = 1e-44
    assert len(encoded(TopKCodec(0.5), values)) == 4 + 6
    assert same_bytes(there_and_back(TopKCodec(0.5), values), values)


def test_what_was_not_sent_is_not_touched() -> None:
    values = gradient(1000)
    payload = encoded(TopKCodec(0.01), values)
    TopKCodec(0.01).decode_add(payload, total := torch.full((1000,), -0.0))
    assert int(torch.signbit(total).logical_and(total == 0).sum()) == 990


# ---- The digest of a leaf is that of the floats which the servers add up ----


def test_the_digest_is_that_of_the_weighed_gradient() -> None:
    gradient, weight = torch.randn(1000, generator=torch.Generator().manual_seed(1)), 0.3
    before = gradient.clone()
    weighed = gradient.clone().mul_(weight)  # as servers and `Partials` weigh: in place
    assert digest_of(gradient, weight) == leaf_digest(weighed.numpy().tobytes()) != digest_of(gradient)
    assert torch.equal(gradient, before)


def test_a_part_of_a_longer_vector_is_digested_alone() -> None:
    vector = torch.arange(10.0)
    assert digest_of(vector[2:5]) == leaf_digest(torch.tensor([2.0, 3.0, 4.0]).numpy().tobytes())
