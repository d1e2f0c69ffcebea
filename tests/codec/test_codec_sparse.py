"""Top-k: which words are sent."""

from __future__ import annotations

import pytest
import torch
from codec_cases import EDGES, encoded, gradient, same_bytes, there_and_back

from rallypoint.codec.base import PIECE_WORDS
from rallypoint.codec.sparse import TopKCodec, count_for

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
