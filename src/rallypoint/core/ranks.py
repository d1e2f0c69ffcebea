"""A group of ranks: which part of each tensor of the model each rank holds, and which rank sends which part.

The layout is the unsharded model's, so nobody outside of the group knows its shape. A rank describes what it holds by
blocks. Example: an 8 x 4 weight that FSDP2 shards over two ranks is two blocks, of offsets (0, 0) and (4, 0) and of
sizes (4, 4); a bias that tensor parallelism replicates is the same block twice, and the first rank sends it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Annotated

import msgspec

from rallypoint.errors import ModelError

_Sizes = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class TensorBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor: `sizes[d]` elements from `offsets[d]` on in dimension d."""

    offsets: _Sizes
    sizes: _Sizes

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the block in the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    def overlaps(self, other: TensorBox) -> bool:
        """True if some element is in both."""
        return all(
            a < b + n and b < a + m
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )


class HeldTensor(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds of one tensor: its name, shape and dtype as in the unsharded model, and the rank's block.

    Attributes:
        role: "trained", "frozen" (a parameter without a gradient) or "buffer".
        block: None if the rank holds no element of it.
    """

    name: str
    shape: _Sizes
    dtype: str
    role: str
    block: TensorBox | None


class RankPiece(msgspec.Struct, frozen=True, array_like=True):
    """The block that one rank holds."""

    rank: int
    block: TensorBox


class Spread(msgspec.Struct, frozen=True):
    """A tensor and its pieces: those of all ranks, in the order of ranks."""

    name: str
    shape: _Sizes
    dtype: str
    role: str
    pieces: tuple[RankPiece, ...]

    @property
    def sent(self) -> tuple[RankPiece, ...]:
        """The pieces that make up the tensor: of equal ones the first rank's."""
        first: dict[TensorBox, RankPiece] = {}
        for piece in self.pieces:
            first.setdefault(piece.block, piece)
        return tuple(first.values())


def spread_over(holdings: Sequence[Sequence[HeldTensor]], names: Sequence[str] = ()) -> list[Spread]:
    """Return the tensors that the ranks hold together, in the order of the unsharded model.

    `holdings[r]` is what rank r holds. The order is that of `names` if given; else rank 0's, followed by what rank 1
    has in addition, and so on: right for a pipeline whose stages follow each other as the ranks do.

    Raises ModelError when two ranks disagree about a tensor, when some element is held by nobody, and when two stages
    of a pipeline train the same parameter.
    """
    found: dict[str, tuple[HeldTensor, list[RankPiece]]] = {}
    for rank, held in enumerate(holdings):
        for one in held:
            first, pieces = found.setdefault(one.name, (one, []))
            if (one.shape, one.dtype, one.role) != (first.shape, first.dtype, first.role):
                raise ModelError(
                    f"{one.name} is {_described(one)} on rank {rank} of this worker and {_described(first)} on another "
                    "one: build the same model on all ranks"
                )
            if one.block is not None and one.block.elements:
                pieces.append(RankPiece(rank, one.block))
    spread = [Spread(name, one.shape, one.dtype, one.role, tuple(pieces)) for name, (one, pieces) in found.items()]
    stages = [frozenset(one.name for one in held) for held in holdings]
    for tensor in spread:
        _check_whole(tensor)
        _check_one_stage(tensor, stages)
    return _ordered(spread, names) if names else spread


def check_shared(spread: Sequence[Spread], ranks: int, parts: int) -> None:
    """Raise ModelError when so many ranks share nothing: neither the model nor the batch, which is cut into `parts`."""
    if ranks > 1 and parts == 1 and all(len(one.sent) == 1 and len(one.pieces) == ranks for one in spread):
        raise ModelError(
            f"all {ranks} ranks of this worker hold the whole model and compute the same samples: spread it "
            "(torch.distributed.fsdp.fully_shard, parallelize_module, a PipelineStage on each) and pass "
            'rp.Parallel(mesh, split="dp"), or leave --ranks out'
        )


def _ordered(spread: Sequence[Spread], names: Sequence[str]) -> list[Spread]:
    place = {name: index for index, name in enumerate(names)}
    if missing := sorted({tensor.name for tensor in spread} ^ place.keys()):
        where = "not in the whole model" if missing[0] not in place else "on no rank"
        raise ModelError(f"{missing[0]} is {where}: the ranks' parts must have the names of the whole model")
    return sorted(spread, key=lambda tensor: place[tensor.name])


def _check_whole(tensor: Spread) -> None:
    blocks = [piece.block for piece in tensor.sent]
    if any(one.overlaps(other) for one, other in combinations(blocks, 2)):
        raise ModelError(f"{tensor.name}: two ranks hold parts that overlap and are not the same")
    if sum(block.elements for block in blocks) != math.prod(tensor.shape):
        raise ModelError(f"{tensor.name}: the ranks of this worker do not hold all of its elements together")


def _check_one_stage(tensor: Spread, stages: Sequence[frozenset[str]]) -> None:
    """Of equal pieces one is sent: the gradients of two stages (ranks that hold other tensors) would not be added."""
    if tensor.role == "trained" and len({stages[piece.rank] for piece in tensor.pieces}) > 1:
        raise ModelError(
            f"parameter {tensor.name} is on two stages of the pipeline, and nobody would add up their gradients: put "
            "it on one stage, or give each its own (untie the weights)"
        )


def _described(one: HeldTensor) -> str:
    return f"{one.role}, {one.dtype} {list(one.shape)}"
