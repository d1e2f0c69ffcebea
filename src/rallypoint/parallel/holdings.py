"""How a script has spread its model over the ranks of a worker, and what this rank holds: its block of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rallypoint.core.ranks import Block, Held
from rallypoint.errors import ModelError, UsageError


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


def held_of(model: torch.nn.Module) -> tuple[list[Held], dict[str, torch.Tensor]]:
    """Return what this rank holds of the model's parameters and shared buffers, and the tensors by name.

    Raises ModelError for a tensor whose part on this rank is not one block.
    """
    kept = model.state_dict(keep_vars=True)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return [_held(name, tensor) for name, tensor in tensors.items()], tensors


def tied_names(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the further names of tensors that are in the model under several: further name -> name in `tensors`."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    kept = model.state_dict(keep_vars=True)
    return {name: names[id(t)] for name, t in kept.items() if name not in tensors and id(t) in names}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's block of a tensor: it shares the tensor's memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def whole_of(value: torch.Tensor) -> torch.Tensor:
    """Return a loss or another figure, detached: of a DTensor, as tensor parallelism makes them, the whole value.

    A collective where that is still to be summed over ranks: all ranks of its mesh must call it.
    """
    plain: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return plain.detach()


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's block of a parameter's gradient; None if it has none.

    A collective where the gradient is still to be summed over ranks (DTensor's Partial): all ranks of the parameter's
    mesh must call it.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor)
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        return gradient.to_local()
    return gradient


def data_part(mesh: DeviceMesh | None, split: tuple[str, ...]) -> tuple[int, int]:
    """Return (which part, of how many) of a replica's batch this rank computes: its place in these mesh dimensions.

    Raises UsageError for a dimension that the mesh does not have.
    """
    part, parts = 0, 1
    if mesh is None:
        return part, parts
    names = mesh.mesh_dim_names or ()
    for name in split:
        if name not in names:
            raise UsageError(f"split={name!r}: the mesh has the dimensions {', '.join(names) or '(without names)'}")
        one = mesh[name]
        part, parts = part * one.size() + one.get_local_rank(), parts * one.size()
    return part, parts


def check_data_parallel(tensors: dict[str, torch.Tensor], split: tuple[str, ...]) -> None:
    """Raise ModelError for a trained parameter whose gradient nobody averages over the dimensions in `split`."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.nn.Parameter) or not tensor.requires_grad:
            continue
        over = (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()
        if missing := [dimension for dimension in split if dimension not in over]:
            raise ModelError(
                f"parameter {name} is not sharded or replicated over the mesh dimension {missing[0]}, over which the "
                "batch is split: nobody would average its gradient. Apply torch.distributed.fsdp.fully_shard with that "
                "dimension of the mesh"
            )


def _held(name: str, tensor: torch.Tensor) -> Held:
    trains = "trained" if tensor.requires_grad else "frozen"
    role = trains if isinstance(tensor, torch.nn.Parameter) else "buffer"
    return Held(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), role, _block(name, tensor))


def _block(name: str, tensor: torch.Tensor) -> Block | None:
    if not isinstance(tensor, DTensor):
        return Block((0,) * tensor.dim(), tuple(tensor.shape))
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if not chunks:
        return None
    if len(chunks) > 1 or tuple(chunks[0].sizes) != tuple(tensor.to_local().shape):
        raise ModelError(f"{name} is spread as {tensor.placements}: a rank must hold one block of each tensor")
    return Block(tuple(chunks[0].offsets), tuple(chunks[0].sizes))
