"""The digest of a leaf is that of the floats which the servers add up."""

from __future__ import annotations

import torch

from rallypoint.codec.base import digest_of
from rallypoint.core.sums import leaf_digest


def test_the_digest_is_that_of_the_weighed_gradient() -> None:
    gradient, weight = torch.randn(1000, generator=torch.Generator().manual_seed(1)), 0.3
    before = gradient.clone()
    weighed = gradient.clone().mul_(weight)  # as servers and `Partials` weigh: in place
    assert digest_of(gradient, weight) == leaf_digest(weighed.numpy().tobytes()) != digest_of(gradient)
    assert torch.equal(gradient, before)


def test_a_part_of_a_longer_vector_is_digested_alone() -> None:
    vector = torch.arange(10.0)
    assert digest_of(vector[2:5]) == leaf_digest(torch.tensor([2.0, 3.0, 4.0]).numpy().tobytes())
