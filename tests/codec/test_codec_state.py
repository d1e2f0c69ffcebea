"""What is not sent is not lost: error feedback, and Deep Gradient Compression."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from codec_cases import encoded, encoder_of, gradient, there_and_back

from rallypoint.codec.base import Codec, ErrorFeedback, Stateful
from rallypoint.codec.blocks import CastCodec, Int8Codec
from rallypoint.codec.lowrank import LowRankCodec
from rallypoint.codec.sparse import FIRST_RATIO, DGCCodec, TopKCodec, count_for
from rallypoint.errors import UsageError

WORDS = 48 * 80
WITH_FEEDBACK = ["int8-feedback", "int4-feedback", "sign-feedback", "topk-feedback", "randomk-feedback",
                 "powersgd-feedback"]  # fmt: skip


def residual_of(codec: Codec) -> torch.Tensor:
    assert isinstance(codec, Stateful)
    return codec.state()["residual"]


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_what_arrived_and_the_residual_are_all_that_was_given(name: str) -> None:
    codec = encoder_of(name, WORDS)
    given, arrived = torch.zeros(WORDS, dtype=torch.float64), torch.zeros(WORDS, dtype=torch.float64)
    for step in range(50):
        values = gradient(WORDS, seed=step)
        given += values
        arrived += there_and_back(codec, values, seed=step)
        torch.testing.assert_close(arrived + residual_of(codec), given, rtol=0, atol=1e-5 * float(given.abs().max()))


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_the_mean_of_what_arrives_approaches_a_constant_gradient(name: str) -> None:
    codec, values = encoder_of(name, WORDS), gradient(WORDS)
    steps = 800 if name in ("topk-feedback", "randomk-feedback", "sign-feedback") else 50
    arrived = sum(there_and_back(codec, values, seed=step).double() for step in range(steps))
    assert isinstance(arrived, torch.Tensor)
    assert (arrived / steps - values).norm() < 0.25 * values.norm()


def test_int8_with_feedback_is_as_good_as_raw_over_many_steps() -> None:
    codec, values = ErrorFeedback(Int8Codec(256), WORDS), gradient(WORDS)
    arrived = sum(there_and_back(codec, values).double() for _ in range(100)) / 100
    once = there_and_back(Int8Codec(256), values)
    assert (arrived - values).norm() < 0.02 * (once - values).norm()


def test_top_k_leaves_no_residual_where_it_sent() -> None:
    codec, values = ErrorFeedback(TopKCodec(0.01), WORDS), gradient(WORDS)
    arrived = there_and_back(codec, values)
    assert not residual_of(codec)[arrived != 0].any()
    assert torch.equal(residual_of(codec) + arrived, values)


def test_an_overflow_inside_the_codec_leaves_a_finite_residual() -> None:
    codec = ErrorFeedback(LowRankCodec((48, 80), 2), WORDS)
    there_and_back(codec, gradient(WORDS))
    with pytest.raises(Exception, match="NaN or infinity"):
        encoded(codec, torch.full((WORDS,), 3e38))
    assert float(residual_of(codec).abs().max()) < 1.0


@pytest.mark.parametrize("codec", [CastCodec(torch.float32), CastCodec(torch.bfloat16)])
def test_feedback_is_refused_around_what_needs_none(codec: Codec) -> None:
    with pytest.raises(UsageError, match="error feedback"):
        ErrorFeedback(codec, 10)


def test_dgc_conserves_what_it_has_not_sent() -> None:
    codec = DGCCodec(WORDS, ratio=0.01, momentum=0.0)
    given, arrived = torch.zeros(WORDS, dtype=torch.float64), torch.zeros(WORDS, dtype=torch.float64)
    for step in range(100):
        values = gradient(WORDS, seed=step)
        given += values
        arrived += there_and_back(codec, values)
        torch.testing.assert_close(arrived + codec.state()["unsent"], given, rtol=0, atol=1e-6)


def test_dgc_follows_the_papers_equations() -> None:
    codec = DGCCodec(WORDS, ratio=0.02, momentum=0.9, clip=0.05, sampled=False)
    u, v = torch.zeros(WORDS, dtype=torch.float64), torch.zeros(WORDS, dtype=torch.float64)
    for step in range(30):
        values = gradient(WORDS, seed=step)
        u = 0.9 * u + values * min(1.0, 0.05 / float(values.double().norm()))
        v = v + u
        arrived = there_and_back(codec, values)
        mask = arrived != 0
        assert int(mask.sum()) == count_for(0.02, WORDS)
        assert float(v[mask].abs().min()) >= float(v[~mask].abs().max()) * (1 - 1e-5)
        torch.testing.assert_close(arrived[mask].double(), v[mask], rtol=1e-4, atol=1e-8)
        u[mask], v[mask] = 0.0, 0.0
        torch.testing.assert_close(codec.state()["unsent"].double(), v, rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(codec.state()["velocity"].double(), u, rtol=1e-4, atol=1e-8)


def test_dgc_with_every_word_sent_is_the_plain_gradient() -> None:
    # Masking forgets the velocity of what is sent: with nothing held back there is no momentum left.
    codec = DGCCodec(WORDS, ratio=1.0)
    for step in range(3):
        values = gradient(WORDS, seed=step)
        assert torch.equal(there_and_back(codec, values), values)


def test_dgc_warms_up_from_a_quarter_exponentially() -> None:
    codec = DGCCodec(WORDS, ratio=0.001, warmup_steps=4, sampled=False)
    ratios = []
    for step in range(6):
        ratios.append(codec.ratio_now)
        arrived = there_and_back(codec, gradient(WORDS, seed=step))
        assert int((arrived != 0).sum()) == count_for(ratios[-1], WORDS)
    assert ratios[0] == FIRST_RATIO
    assert ratios[4:] == [0.001, 0.001]
    assert all(math.isclose(b / a, 0.004**0.25) for a, b in pairwise(ratios[:5]))


# ---- PowerSGD: exact on what has the rank, and close to the best on what has not ----


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
