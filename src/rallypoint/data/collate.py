"""torch's ``default_collate``, in a fraction of its time where samples are NumPy rows or NumPy numbers.

Rows are copied into the batch at once, where torch makes a tensor of each of them first. Whatever is not as simple as
that (rows of several types, arrays that are not contiguous, subclasses) is collated by torch's own functions, and so is
everything if a program has changed torch's table of them. A batch of a TensorDataset is selected in one step: its rows
need not become samples first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

_TYPES: dict[Any, torch.dtype] = {
    np.dtype(kind): torch.from_numpy(np.empty(0, kind)).dtype
    for kind in ("?", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8", "c8", "c16")
}
_SCALARS: dict[type, Any] = {kind.type: kind for kind in _TYPES if kind.kind != "c"}
_PLAIN = 2  # axes of rows of which torch's memory formats know nothing

_torchs = dict(default_collate_fn_map)  # as it was when torch was imported


def collated(samples: list[Any]) -> Any:
    """Return ``default_collate(samples)``: the same values, types, shapes and strides. Raises what that raises."""
    if not torchs_own():
        return default_collate(samples)
    return collate(samples, collate_fn_map=_OURS)


def torchs_own() -> bool:
    """True if torch's table of functions, which programs may extend, is as it was."""
    return default_collate_fn_map == _torchs


def _rows(batch: Sequence[Any], **_: Any) -> Any:
    first = batch[0]
    dtype = _TYPES.get(first.dtype)
    if dtype is None or not first.size or not first.ndim or not _alike(batch):
        return default_collate(list(batch))
    made = room(dtype, (len(batch), *first.shape))
    np.concatenate(batch, out=made.numpy().reshape(-1, *first.shape[1:]), casting="no")
    return made


def _alike(batch: Sequence[Any]) -> bool:
    """True for arrays of one type, shape and layout, which torch would copy into a contiguous tensor."""
    shape, dtype, strides = batch[0].shape, batch[0].dtype, batch[0].strides
    for one in batch:
        if type(one) is not np.ndarray or one.shape != shape or one.dtype is not dtype or one.strides != strides:
            return False
    if any(stride % dtype.itemsize for stride in strides):  # a field of records: an error of torch
        return False
    # Images may be laid out channels last, which torch keeps, and views that run backwards are errors of torch
    return bool(batch[0].flags.c_contiguous) if len(shape) > _PLAIN else min(strides) >= 0


def room(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor to be filled. In a loader process it is shared memory, as torch's is: it is not copied to be sent."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    count = int(np.prod(shape))
    storage = torch.UntypedStorage._new_shared(count * dtype.itemsize)  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]


def _numbers(batch: Sequence[Any], **_: Any) -> Any:
    kind = _SCALARS.get(type(batch[0]))
    if kind is None or len(set(map(type, batch))) > 1:
        return default_collate(list(batch))
    made = torch.empty(len(batch), dtype=_TYPES[kind], device="cpu")  # aligned, on which sums in torch may depend
    made.numpy()[:] = np.array(batch, kind)
    return made


_OURS: dict[Any, Callable[..., Any]] = {
    **_torchs, np.ndarray: _rows, (np.bool_, np.number, np.object_): _numbers,
    int: lambda batch, **_: torch.as_tensor(batch, device="cpu"),  # torch's own would be on the script's default device
}  # fmt: skip


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
