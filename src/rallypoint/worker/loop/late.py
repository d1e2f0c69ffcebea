"""Parameters that are late: whatever reads one of them waits until its new values are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Settle = Callable[[torch.nn.Parameter], None]

_GETTERS = (
    "_post_accumulate_grad_hooks", "_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf",
    "is_meta", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape",
)  # fmt: skip
_METHODS = (
    "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "ndimension", "nelement", "numel",
    "size", "storage_offset", "stride",
)  # fmt: skip
_READ_NO_VALUES = frozenset({
    *(getattr(torch.Tensor, name).__get__ for name in _GETTERS), *(getattr(torch.Tensor, name) for name in _METHODS),
    *(getattr(torch.Tensor.grad, name) for name in ("__set__", "__delete__")),
})  # fmt: skip


def late_kind(settle: Settle, before: Callable[[], None] = lambda: None) -> type[torch.nn.Parameter]:
    """Return a class for late parameters. Set a parameter's `__class__` to it, and later back to torch's own class.

    Torch calls `__torch_function__` of a subclass with every function that gets such a tensor as an argument, from
    whichever module: `settle` is called for it first. It must set the class back. A parameter of torch's own class
    costs nothing. `before` is called once for such a function, before the first `settle`.
    """

    class Late(torch.nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:  # fmt: skip
            if func in _READ_NO_VALUES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            before()
            for parameter in _among((args, kwargs), cls):
                settle(parameter)
            return func(*args, **(kwargs or {}))

    return Late


def _among(value: Any, kind: type[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The parameters of this class among a call's arguments."""
    if type(value) is kind:
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [parameter for item in value for parameter in _among(item, kind)]
    return []
