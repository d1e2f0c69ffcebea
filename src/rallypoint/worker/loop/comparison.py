"""Finds tensors that changed between two moments. It computes on the tensors' device and does not wait for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Comparison:
    """Compares tensors at construction with the same tensors at `end`; `changed` says which differ.

    It keeps one number for each tensor: the sum of all its bits. On a GPU everything is queued on the current stream::

        comparison = Comparison(tensors)
        ...                                  # something may write to them
        comparison.end()
        ...                                  # the device works on; comparison.ready becomes True
        comparison.changed()                 # [2]: the third one
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = [_sum(tensor) for tensor in tensors]
        self._found: list[tuple[list[int], torch.Tensor]] = []  # of each device: indices, and their flags on the host
        self._events: list[torch.cuda.Event] = []

    def end(self) -> None:
        """Compare. A GPU copies its results to the host asynchronously."""
        of_device: dict[torch.device, list[int]] = {}
        for index, before in enumerate(self._before):
            of_device.setdefault(before.device, []).append(index)
        for device, indices in of_device.items():
            flags = torch.stack([_sum(self._tensors[index]) != self._before[index] for index in indices])
            if device.type == "cuda":
                on_host = torch.empty(len(indices), dtype=torch.bool, device="cpu", pin_memory=True)
                flags = on_host.copy_(flags, non_blocking=True)
                self._events.append(torch.cuda.current_stream(device).record_event())
            self._found.append((indices, flags))
        self._before = []

    @property
    def ready(self) -> bool:
        """True if `changed` does not have to wait for a device."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def changed(self) -> list[int]:
        """Return the indices of the tensors that differ, ascending. Call it after `end`; it waits for the devices."""
        for event in self._events:
            event.synchronize()
        pairs = [pair for indices, flags in self._found for pair in zip(indices, flags.tolist(), strict=True)]
        return sorted(index for index, differs in pairs if differs)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all bits of a tensor (int64, on its device). It differs when any one element differs."""
    if tensor.is_meta or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device="cpu")
    raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8)  # (a row of every second element stays one)
    even = raw.numel() // 8 * 8
    if not even or raw.storage_offset() % 8:
        return raw.sum()
    total = raw[:even].view(torch.int64).sum()
    return total + raw[even:].sum() if even < raw.numel() else total
