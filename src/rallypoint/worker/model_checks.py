"""What a model must be before a job trains it: each sentence names the tensor, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rallypoint.errors import ModelError

Named = Mapping[str, torch.Tensor]


def check_model(model: object) -> None:
    """Raise ModelError for what is no module, and for a tensor that has no shape yet."""
    if isinstance(model, Mapping):
        raise ModelError(
            "a dict was given as the model: give one torch.nn.Module, such as a ModuleDict. Models that take turns, "
            "each with its own optimizer, are keys of job.store: see examples/gan.py"
        )
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"a {type(model).__qualname__} was given as the model: give a torch.nn.Module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ModelError(
                f"{name} has no shape yet (a lazy module): run one batch through the model before job.train"
            )


def check_trained(trained: Named) -> None:
    """Raise ModelError for a parameter without readable and writable memory of its own, or for several devices."""
    devices: dict[torch.device, str] = {}
    for name, parameter in trained.items():
        if parameter.is_meta:
            raise ModelError(
                f"parameter {name} is on the meta device and has no values: build the model on the CPU or a GPU, or "
                "give it memory and values first (model.to_empty(device='cpu'), then initialise); only "
                "torch.nn.Embedding(sparse=True, device='meta') stays there, as a table"
            )
        if parameter.layout is not torch.strided:
            raise ModelError(f"parameter {name} is {parameter.layout}: only dense parameters can be trained")
        if _shares_with_itself(parameter):
            raise ModelError(
                f"parameter {name} is an expanded view, whose elements share memory: make it one with memory of its "
                "own, torch.nn.Parameter(tensor.clone()), or keep the small one and expand it in forward"
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        where = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise ModelError(f"the model lies on several devices ({where}): a worker trains on one; move it to one device")


def check_kept(frozen: Named, buffers: Named) -> None:
    """Raise ModelError for a frozen parameter that has no values, and for a buffer that cannot be set in place."""
    for what, tensors in (("frozen parameter", frozen), ("buffer", buffers)):
        for name, tensor in tensors.items():
            if tensor.is_meta:
                raise ModelError(
                    f"{what} {name} is on the meta device and has no values: build it on the CPU or a GPU, or give "
                    "it memory and values before job.train"
                )
            if tensor.layout is not torch.strided or tensor.is_quantized:
                kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
                raise ModelError(
                    f"{what} {name} is {kind}, and only dense ones are compared and shared: make it dense "
                    f"({'dequantize()' if tensor.is_quantized else 'to_dense()'}), or keep it as a plain attribute "
                    "of the module that every worker makes alike"
                )
    for name, buffer in buffers.items():
        if _shares_with_itself(buffer):
            raise ModelError(
                f"buffer {name} is an expanded view, whose elements share memory, so nobody can write into it: give "
                "it memory of its own (.clone()), or make it persistent=False"
            )


def check_apart(trained: Named, others: Named) -> None:
    """Raise ModelError for a trained parameter whose memory another one, or one of `others`, has a part of.

    `others` are buffers and frozen parameters. One Parameter under several names is one here.
    """
    for first, second in _overlapping({**others, **trained}):
        both = [name for name in (first, second) if name in trained]
        if len(both) == 2:
            raise ModelError(
                f"parameters {first} and {second} share memory (.data), and are two to an optimizer, which would "
                "update the same numbers twice: make them one parameter (a.weight = b.weight), or, where the tie is "
                "transposed, keep one and use it in forward (torch.nn.functional.linear(x, self.a.weight.t()))"
            )
        if both:
            parameter, other = both[0], first if second == both[0] else second
            raise ModelError(
                f"{other} shares memory with the parameter {parameter}, which the job trains: a version would set "
                f"those numbers twice, and one of the two values is old. Give {other} memory of its own (.clone()), "
                f"or read {parameter} where you need it"
            )


def _overlapping(tensors: Named) -> Iterator[tuple[str, str]]:
    """Pairs of tensors with a byte in common, in the order of their addresses."""
    found = [
        (tensor.device, start, stop, name) for name, tensor in tensors.items()
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel()
        and not hasattr(tensor, "__tensor_flatten__")  # made of other tensors: it has no memory itself
        for start, stop in [_range(tensor)]
    ]  # fmt: skip
    found.sort(key=lambda one: (str(one[0]), one[1]))
    open_ones: list[tuple[torch.device, int, int, str]] = []
    for one in found:
        open_ones = [other for other in open_ones if other[0] == one[0] and other[2] > one[1]]
        for other in open_ones:
            if _share(tensors[other[3]], tensors[one[3]]):
                yield other[3], one[3]
        open_ones.append(one)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors whose ranges overlap have a byte in common. (Columns of one matrix have not.)"""
    (start, stop), (begin, end) = _range(one), _range(other)
    if _dense(one) and _dense(other):
        return True
    first = min(start, begin)
    mine = torch.zeros(max(stop, end) - first, dtype=torch.bool, device="cpu")
    _bytes_of(one, mine, first).fill_(True)
    return bool(_bytes_of(other, mine, first).any())


def _shares_with_itself(tensor: torch.Tensor) -> bool:
    """True if two elements of a tensor have a byte in common, as those of an expanded one."""
    if not tensor.numel() or _dense(tensor):
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return True
    start, stop = _range(tensor)
    taken = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    _bytes_of(tensor, taken, start).fill_(True)
    return int(taken.sum()) < tensor.numel() * tensor.element_size()


def _dense(tensor: torch.Tensor) -> bool:
    """True if a tensor fills its range, in whichever order of its dimensions."""
    strides = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    before = [(1, 1), *strides]
    return all(stride == of * size for (of, size), (stride, _) in pairwise(before))


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, first: int) -> torch.Tensor:
    """The view of `memory`, one element a byte from the address `first` on, that lies where the tensor does."""
    size = tensor.element_size()
    places = [(1 if stride == 0 else n, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return memory.as_strided(
        [*(n for n, _ in places), size], [*(stride for _, stride in places), 1], tensor.data_ptr() - first
    )
