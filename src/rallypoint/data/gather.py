"""A batch of a TensorDataset in one step: its rows need not become samples first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from rallypoint.data.collate import room, torchs_own


def gathered(dataset: Any, indices: Sequence[int]) -> list[torch.Tensor] | None:
    """Return what ``default_collate`` makes of these samples: each tensor's rows. None: read the samples.

    It is for a plain TensorDataset, or a plain Subset of one, of contiguous tensors on the CPU without gradients.
    """
    while type(dataset) is Subset:
        dataset, chosen = dataset.dataset, dataset.indices
        indices = [chosen[index] for index in indices]
    if type(dataset) is not TensorDataset or not indices or not torchs_own():
        return None
    if not all(map(_is_index, indices)):  # a Subset may choose with anything that a tensor takes
        return None
    tensors = dataset.tensors
    if min(indices) < 0 or not all(_plain(one) and max(indices) < len(one) for one in tensors):
        return None
    rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
    made = [room(one.dtype, (len(indices), *one.shape[1:])) for one in tensors]
    try:
        for one, out in zip(tensors, made, strict=True):
            torch.index_select(one, 0, rows, out=out)
    except NotImplementedError:  # for unsigned numbers of 16 bits and more
        return None
    return made


def _is_index(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.ndim == 0 and one.dtype is torch.int64
    return type(one) is int or isinstance(one, np.integer)


def _plain(one: torch.Tensor) -> bool:
    return (
        type(one) is torch.Tensor and one.layout is torch.strided and one.device.type == "cpu" and one.ndim > 0
        and not one.requires_grad and not one.is_quantized and one.is_contiguous() and one.numel() > 0
    )  # fmt: skip
