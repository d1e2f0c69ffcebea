"""What the samples of a replica are, in words: by the data set's own `describe`, or their shapes and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rallypoint.data.loader import MicroBatches

MOST = 64  # samples of a replica
_LONGEST = 2000  # characters
_FEW = 8  # numbers, or parts of a sample, that are shown one by one
_DEPTH = 4  # of lists in lists, and of data sets around data sets


def described(dataset: object, batches: MicroBatches, step: int, replica: int, micros: int) -> tuple[str, ...]:
    """Return the texts of the replica's first samples, in the order of the batch.

    The samples are read again, as then: with the same random augmentation. A data set may have a method
    ``describe(sample)``, which returns a text (or anything else with a `str`) for what ``dataset[index]`` returns.
    """
    return tuple(_texts(dataset, batches, step, replica, micros))


def _texts(dataset: object, batches: MicroBatches, step: int, replica: int, micros: int) -> Iterator[str]:
    describe, left = _describe_of(dataset), MOST
    for micro in range(micros):
        if left <= 0:
            return
        for sample in batches.fetched(step, replica, micro)[:left]:
            left -= 1
            try:
                text = str(describe(sample)) if describe is not None else outline(sample)
            except Exception as error:  # the user's own function: the replay has what it was made for
                text = f"describe() failed: {type(error).__name__}: {error}"
            yield text[:_LONGEST]


def _describe_of(dataset: object) -> Any:
    """The method of the data set, or of the one that it is a part of (``Subset``)."""
    for _ in range(_DEPTH):
        if callable(describe := getattr(dataset, "describe", None)):
            return describe
        dataset = getattr(dataset, "dataset", None)
    return None


def outline(sample: Any, depth: int = _DEPTH) -> str:
    """Return a short text for any sample: ``(float32 [3, 32, 32] from -1.2 to 2.5, 7)``."""
    if isinstance(sample, torch.Tensor):
        kind = str(sample.dtype).removeprefix("torch.")
        if sample.numel() <= _FEW or sample.is_complex():
            return f"{kind} {sample.tolist()}"[:_LONGEST]
        return f"{kind} {list(sample.shape)} from {sample.min().item():.6g} to {sample.max().item():.6g}"
    if isinstance(sample, Mapping) and depth:
        parts = [f"{key}: {outline(value, depth - 1)}" for key, value in list(sample.items())[:_FEW]]
        return f"{{{', '.join(parts)}{_more(sample)}}}"
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes) and depth:
        return f"({', '.join(outline(value, depth - 1) for value in sample[:_FEW])}{_more(sample)})"
    if hasattr(sample, "shape") and hasattr(sample, "dtype"):  # an array
        return outline(torch.as_tensor(sample, device="cpu"), depth)
    return repr(sample)[:_LONGEST]


def _more(parts: Any) -> str:
    return f", and {len(parts) - _FEW} more" if len(parts) > _FEW else ""
