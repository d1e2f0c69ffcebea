"""The digest of a contribution that is in memory as a tensor: see `core.sums`."""

from __future__ import annotations

import torch

from rallypoint.core.sums import leaf_digest


def digest_of(gradient: torch.Tensor, weight: float = 1.0) -> bytes:
    """Return the digest of a leaf: `gradient` (fp32, 1-D, contiguous, in the host's memory) x `weight`.

    The gradient is not changed. With another weight than 1 the product takes as much memory as the gradient.
    """
    leaf = gradient if weight == 1.0 else gradient * weight
    return leaf_digest(leaf.numpy().data)
