"""torch's ``default_collate``, in a fraction of its time where samples are NumPy rows, NumPy numbers or Python numbers.

Rows are copied into the batch at once, where torch makes a tensor of each of them first. Whatever is not as simple as
that (rows of several types, arrays that are not contiguous, subclasses) is collated by torch's own functions, and so is
everything if a program has changed torch's table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info
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
    return _copied(np.array(batch, kind), _TYPES[kind])


def _ints(batch: Sequence[Any], **_: Any) -> Any:
    if set(map(type, batch)) != {int}:  # bools are ints too
        return default_collate(list(batch))
    try:
        values = np.array(batch, np.int64)
    except OverflowError:
        return default_collate(list(batch))
    return _copied(values, torch.int64)


def _copied(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """In memory of torch's own, which is aligned for its kernels: sums may depend on that."""
    made = torch.empty(len(values), dtype=dtype, device="cpu")
    made.numpy()[:] = values
    return made


_OURS: dict[Any, Callable[..., Any]] = {
    **_torchs, np.ndarray: _rows, (np.bool_, np.number, np.object_): _numbers,
    int: _ints,
}  # fmt: skip
