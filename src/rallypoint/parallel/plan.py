"""How a script has spread its model over the ranks of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the ranks of one worker share a model: ``job.train(model, data, parallel=rp.Parallel(mesh, split="dp"))``.

    Attributes:
        mesh: the script's DeviceMesh over the ranks of this worker; None in a worker of one process.
        split: the names of the mesh dimensions over which a replica's batch is cut: those of data parallelism. Ranks
            that differ in other dimensions only (tensor, pipeline) get the same samples.
        unsharded: the whole model, of any device (``meta`` takes no memory): its order of parameters counts. Needed
            only where the ranks' parts, one after the other, are not in that order (interleaved pipeline stages).
    """

    mesh: DeviceMesh | None = None
    split: str | Sequence[str] = ()
    unsharded: torch.nn.Module | None = None

    @property
    def dimensions(self) -> tuple[str, ...]:
        """`split` as a tuple; () without a mesh."""
        if self.mesh is None:
            return ()
        return (self.split,) if isinstance(self.split, str) else tuple(self.split)
