"""Bytes that each role holds for a model, fp32 with AdamW: the table of docs/memory.md as functions.

Activations are in none of them: they are the same in every layout.
"""

from __future__ import annotations

import msgspec

_PARAMETER, _GRADIENT, _MOMENTS = 4, 4, 8


class Memory(msgspec.Struct, frozen=True):
    """Bytes on a worker's device, in the memory of its host (for each worker), on each server; 0: nothing there."""

    device: float
    host: float = 0.0
    server: float = 0.0


def ddp_memory(words: float) -> Memory:
    """DDP with `gradient_as_bucket_view`: 16 bytes a parameter on every device."""
    return Memory((_PARAMETER + _GRADIENT + _MOMENTS) * words)


def fsdp_memory(words: float, ranks: int, largest: float) -> Memory:
    """FSDP2: 16 bytes over the ranks, and the largest unit (words) gathered."""
    return Memory((_PARAMETER + _GRADIENT + _MOMENTS) * words / ranks + _PARAMETER * largest)


def servers_memory(
    words: float, servers: int, *, replication: int = 1, ranks: int = 1, largest: float = 0.0
) -> Memory:  # fmt: skip
    """Through servers: parameters, a layer's gradients, a buffer on the host; there masters, moments, two versions.

    `ranks`: of each worker, which shards the model among them by FSDP2; its buffer is on the host of rank 0.
    """
    here = (_PARAMETER + _GRADIENT) / ranks * words if ranks > 1 else _PARAMETER * words
    there = (_PARAMETER + _MOMENTS + 2 * _PARAMETER) * replication * words / servers
    return Memory(here + _GRADIENT * largest, _PARAMETER * words / ranks, there)
