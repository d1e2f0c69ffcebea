"""The ranks of one worker: rank 0 leads and tells the others what to do; blocks of tensors move to it and from it.

All of it goes through a process group of its own (Gloo, CPU tensors), beside those of the script's meshes. Nothing is
pickled: orders are six whole numbers, everything else is tensors and JSON that has a type.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from rallypoint.core.ranks import Spread
from rallypoint.errors import RankLost, UsageError
from rallypoint.parallel.board import Board

_FOREVER = timedelta(days=365)  # a standby group waits for its first order as long as the job lasts
LEADER = 0
LOST = "another rank of this worker has ended"


class Kind(enum.IntEnum):
    """What the leader tells the other ranks."""

    VALUE = 1  # send your blocks of tensor `first`
    INSTALL = 2  # a version comes; `first`: its number
    EVALUATE = 3  # run the evaluations that are due at step `first`
    COMPUTE = 4  # compute round `first` of replica `second`, and send the gradients
    END = 5  # the loop is over; `first`: 1 if this worker was told to leave; `second`: 1 if it is the one that saves


class Order(NamedTuple):
    """An order of the leader. The meaning of the numbers is the kind's."""

    kind: Kind
    first: int = 0
    second: int = 0


class RankGroup:
    """This process as one rank of its worker. Every method is called by all ranks, in the same order.

    All raise RankLost when another rank has ended.

    Attributes:
        rank: this process's; LEADER is the one that talks to the servers and the coordinator.
        size: the number of ranks.
        board: where each rank says what it does; None: nowhere.
    """

    board: Board | None = None

    def __init__(self, *, ends: bool = False, board: Board | None = None) -> None:
        """Use the default process group, which must exist. `ends`: `close` destroys it."""
        self._ends, self.board = ends, board
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_FOREVER)

    @property
    def leads(self) -> bool:
        """Is this the leader?"""
        return self.rank == LEADER

    def at(self, where: str) -> None:
        """Say what this rank does from now on, in words that follow "rank 1: "; "": nothing that others wait for."""
        if self.board is not None:
            self.board.at(where)

    def last_words(self, text: str) -> None:
        """Say why this rank is going to end."""
        if self.board is not None:
            self.board.last_words(text)

    def close(self) -> None:
        """Destroy the process groups that this has made."""
        if self._ends and dist.is_initialized():
            dist.destroy_process_group()

    def tell(self, order: Order) -> None:
        """Leader only: give an order to the other ranks, which call `hear`."""
        with _others_live():
            dist.broadcast(torch.tensor(order, dtype=torch.int64, device="cpu"), LEADER, group=self._group)

    def hear(self) -> Order:
        """Return the leader's next order. Waits as long as it takes."""
        numbers = torch.zeros(len(Order._fields), dtype=torch.int64, device="cpu")
        self.at("waiting for what rank 0 does next")
        with _others_live():
            dist.broadcast(numbers, LEADER, group=self._group)
        kind, first, second = (int(number) for number in numbers)
        return Order(Kind(kind), first, second)

    def all_bytes(self, data: bytes) -> list[bytes]:
        """Return what each rank has passed, in the order of ranks."""
        lengths = self.all_numbers([float(len(data))])
        longest = max(1, int(max(length for (length,) in lengths)))
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.zeros_like(mine) for _ in range(self.size)]
        with _others_live():
            dist.all_gather(found, mine, group=self._group)
        return [bytes(one[: int(n)].numpy()) for one, (n,) in zip(found, lengths, strict=True)]

    def all_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers that each rank has passed (as many on each), in the order of ranks."""
        mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        found = [torch.zeros_like(mine) for _ in range(self.size)]
        with _others_live():
            dist.all_gather(found, mine, group=self._group)
        return [one.tolist() for one in found]

    def collect(self, tensor: Spread, own: torch.Tensor | None, whole: torch.Tensor | None) -> None:
        """Put a tensor together in `whole` on the leader: a CPU tensor of the whole shape, whose dtype is sent.

        `own` is this rank's block; None: zeros. `whole` is None on the other ranks, of which each passes an `own` of
        that dtype or one that can be cast to it (see `wire_dtype`).
        """
        for piece in tensor.sent:
            sizes, dtype = piece.block.sizes, wire_dtype(tensor)
            if piece.rank == self.rank:
                values = torch.zeros(sizes, dtype=dtype, device="cpu") if own is None else own.detach().to("cpu", dtype)
                if whole is None:
                    self._send(values, LEADER)
                else:
                    whole[piece.block.slices] = values
            elif whole is not None:
                whole[piece.block.slices] = self._received(sizes, dtype, piece.rank)

    @torch.no_grad()
    def hand_out(self, tensor: Spread, own: torch.Tensor | None, whole: torch.Tensor | None) -> None:
        """Copy the leader's `whole` (a CPU tensor) to all ranks: each gets its block, in `own`; None: it has none."""
        dtype = wire_dtype(tensor)
        for piece in tensor.pieces:
            if whole is not None:
                values = whole[piece.block.slices]
                if piece.rank == self.rank:
                    assert own is not None
                    own.copy_(values)
                else:
                    self._send(values.to(dtype), piece.rank)
            elif piece.rank == self.rank:
                assert own is not None
                own.copy_(self._received(piece.block.sizes, dtype, LEADER))

    def _send(self, values: torch.Tensor, rank: int) -> None:
        with _others_live():
            dist.send(_as_bytes(values.contiguous()), rank, group=self._group)

    def _received(self, sizes: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        came = torch.empty(sizes, dtype=dtype, device="cpu")
        with _others_live():
            dist.recv(_as_bytes(came), rank, group=self._group)
        return came


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes: Gloo does not know every dtype."""
    return values.view(-1).view(torch.uint8)


@contextmanager
def _others_live() -> Iterator[None]:
    """Raise RankLost if a collective in the body fails."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(LOST) from error


def is_of_another_rank(error: BaseException) -> bool:
    """True for what a collective raises, also one of the script's, when another rank has ended."""
    gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return isinstance(error, (RankLost, dist.DistError)) or gloo


def wire_dtype(tensor: Spread) -> torch.dtype:
    """The dtype in which a tensor moves between ranks: parameters and gradients as fp32, buffers as they are."""
    if tensor.role == "trained":
        return torch.float32
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def group_of_this_process(
    store: int, board: Board | None = None, environment: Mapping[str, str] = os.environ
) -> RankGroup:
    """Return this process's group, as RANK and WORLD_SIZE say. Uses the default process group, or makes it.

    `store` is the descriptor of a file that all ranks have, through which they find each other.

    Raises UsageError when the script has made a default group of another size.
    """
    made, size = not dist.is_initialized(), int(environment["WORLD_SIZE"])
    if made:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", rank=int(environment["RANK"]),
            world_size=size, store=dist.FileStore(f"/proc/self/fd/{store}", size),  # type: ignore[attr-defined]
        )  # fmt: skip
    if dist.get_world_size() != size:
        raise UsageError(
            f"the script has made a process group of {dist.get_world_size()} ranks, and this worker has {size}: make "
            "it after rallypoint.join(), or from RANK and WORLD_SIZE"
        )
    return RankGroup(ends=made, board=board)
