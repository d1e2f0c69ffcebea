"""PowerSGD: exact on what has the rank, and close to the best on what has not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from codec_cases import encoded, there_and_back

from rallypoint.codec.lowrank import LowRankCodec
from rallypoint.errors import UsageError

ROWS, COLUMNS = 60, 90


def matrix(spectrum: list[float]) -> torch.Tensor:
    """ROWS x COLUMNS with these singular values, flat."""
    source = torch.Generator().manual_seed(5)
    left = torch.linalg.qr(torch.randn(ROWS, len(spectrum), generator=source)).Q
    right = torch.linalg.qr(torch.randn(COLUMNS, len(spectrum), generator=source)).Q
    return (left @ torch.diag(torch.tensor(spectrum)) @ right.t()).reshape(-1)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_matrix_of_the_rank_is_exact_at_once(rank: int, scale: float) -> None:
    values = matrix([3.0, 2.0, 1.0, 0.5, 0.2][:rank]) * scale
    codec = LowRankCodec((ROWS, COLUMNS), rank)
    for _ in range(3):
        torch.testing.assert_close(there_and_back(codec, values), values, rtol=1e-4, atol=1e-5 * scale)


def test_a_matrix_of_lower_rank_is_exact_too() -> None:
    values = matrix([1.0])
    torch.testing.assert_close(there_and_back(LowRankCodec((ROWS, COLUMNS), 3), values), values, rtol=1e-4, atol=1e-6)


def test_q_converges_to_the_best_approximation() -> None:
    spectrum = [1.0, 0.8, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05]
    values, codec = matrix(spectrum), LowRankCodec((ROWS, COLUMNS), 2)
    errors = [float((there_and_back(codec, values) - values).norm()) for _ in range(30)]
    best = float(torch.tensor(spectrum[2:]).norm())
    assert errors[0] > 1.02 * best
    assert all(later <= earlier * (1 + 1e-4) for earlier, later in pairwise(errors))
    assert errors[-1] < 1.001 * best


def test_a_step_of_zeros_does_not_stop_it() -> None:
    values, codec = matrix([1.0, 0.5]), LowRankCodec((ROWS, COLUMNS), 2)
    assert not there_and_back(codec, torch.zeros(ROWS * COLUMNS)).any()
    torch.testing.assert_close(there_and_back(codec, values), values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1e-40])
def test_a_first_gradient_of_nothing_is_sent_as_factors_whatever_the_matrix(value: float) -> None:
    """A layer that the loss does not reach yet. The first Q has numbers above 4 where it has thousands."""
    values = torch.full((64 * 8192,), value)
    torch.testing.assert_close(there_and_back(LowRankCodec((64, 8192), 2), values), values, rtol=1e-3, atol=0.0)


def test_sums_of_replicas_add_their_products() -> None:
    first, second = matrix([1.0, 0.5]), -0.3 * matrix([2.0, 0.1])
    decoder, total = LowRankCodec((ROWS, COLUMNS), 2), torch.zeros(ROWS * COLUMNS)
    for values in (first, second):
        decoder.decode_add(encoded(LowRankCodec((ROWS, COLUMNS), 2), values), total, 0.5)
    torch.testing.assert_close(total, 0.5 * (first + second), rtol=1e-4, atol=1e-5)


def test_it_serves_its_own_parameter_only() -> None:
    with pytest.raises(UsageError, match="60 x 90"):
        LowRankCodec((ROWS, COLUMNS), 2).bytes_for(100)
