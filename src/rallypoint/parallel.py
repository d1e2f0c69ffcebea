"""The ranks of one worker: what each holds, what moves between them, and a board of what each does."""

from __future__ import annotations

import enum
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rallypoint.core.ranks import HeldTensor, Spread, TensorBox
from rallypoint.errors import ModelError, RankLost, UsageError

# ---- A board in shared memory on which each rank of a worker writes what it does, and that it lives ----
#
# A collective waits for all ranks, and does not know for which one. The board does: `worker.ranks.watch` reads it on
# the leader. Each rank writes its own row only. Nobody depends on a row for what is computed: it may be read half
# written.
#
#     rank 0   pid 4711   beat 120   for 12 s   collecting gradients of step 3, replica 0
#     rank 1   pid 4712   beat 119   for 12 s   computing step 3, replica 0        train.py:68

PULSE_THREAD = "rank-pulse"  # it lives as long as the process
PULSE_S = 0.5
_SPOT_AFTER_S = 2.0  # seconds at the same work after which the line of the script is worth reading
_ROW, _TEXT = 1024, 250
_HEAD = struct.Struct("<qQd")  # pid, beat, when it began
_WHERE, _SPOT, _WORDS = 64, 64 + _TEXT, 64 + 2 * _TEXT  # offsets of the texts


@dataclass(frozen=True, slots=True)
class RankRow:
    """What one rank has written."""

    rank: int  # which
    pid: int  # its process, 0 before it has begun
    beat: int  # rises twice a second while the process runs
    began: float  # when it began with `where`, on the machine's monotonic clock
    where: str  # what it does within the group; "" if it does nothing for which another rank waits
    spot: str  # the line of the script, if it has been there for some time
    words: str  # its last words: the error with which it ends


class Board:
    """The rows of all ranks, in the memory behind a descriptor (which it duplicates). Any thread may call it."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        if os.fstat(descriptor).st_size < size * _ROW:
            os.ftruncate(descriptor, size * _ROW)
        self._memory = mmap.mmap(descriptor, size * _ROW)
        self._at, self._beats, self._began = rank * _ROW, 0, 0.0
        self.at("")

    def at(self, where: str) -> None:
        """This rank begins with `where`."""
        self._began = time.monotonic()
        self._text(_SPOT, "")
        self._text(_WHERE, where)
        self._head()

    def last_words(self, text: str) -> None:
        """This rank is going to end, and this is why. The first call counts."""
        if not self.rows()[self.rank].words:
            self._text(_WORDS, text)

    def beat(self) -> None:
        """This rank lives: called by its pulse."""
        self._beats += 1
        self._head()
        if time.monotonic() - self._began > _SPOT_AFTER_S:
            self._text(_SPOT, spot_of(sys._current_frames().get(threading.main_thread().ident or 0)))

    def rows(self) -> list[RankRow]:
        return [self._row(rank) for rank in range(self.size)]

    def close(self) -> None:
        self._memory.close()

    def _row(self, rank: int) -> RankRow:
        start = rank * _ROW
        pid, beat, began = _HEAD.unpack_from(self._memory, start)
        where, spot, words = (
            self._memory[start + at : start + at + _TEXT].split(b"\0")[0].decode(errors="replace")
            for at in (_WHERE, _SPOT, _WORDS)
        )
        return RankRow(rank, pid, beat, began, where, spot, words)

    def _head(self) -> None:
        _HEAD.pack_into(self._memory, self._at, os.getpid(), self._beats, self._began)

    def _text(self, at: int, text: str) -> None:
        start = self._at + at
        self._memory[start : start + _TEXT] = text.encode()[: _TEXT - 1].ljust(_TEXT, b"\0")


def start_pulse(board: Board) -> None:
    """Start the thread that beats, for the rest of this process's life."""

    def beat() -> None:
        while True:
            board.beat()
            time.sleep(PULSE_S)

    threading.Thread(target=beat, name=PULSE_THREAD, daemon=True).start()


def spot_of(frame: FrameType | None) -> str:
    """Return the innermost line of the script's own files in this stack, as ``train.py:68``; "" without one."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = os.path.dirname(os.path.abspath(script)) if script else None
    while frame is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        if folder is not None and os.path.dirname(path) == folder:
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# ---- The group of ranks: rank 0 leads and tells the others what to do; blocks of tensors move to it and from it ----
#
# All of it goes through a process group of its own (Gloo, CPU tensors), beside those of the script's meshes. Nothing is
# pickled: orders are six whole numbers, everything else is tensors and JSON that has a type.

_FOREVER = timedelta(days=365)  # a standby group waits for its first order as long as the job lasts
LEADER = 0
LOST = "another rank of this worker has ended"


class OrderKind(enum.IntEnum):
    """What the leader tells the other ranks."""

    VALUE = 1  # send your blocks of tensor `first`
    INSTALL = 2  # a version comes; `first`: its number
    EVALUATE = 3  # run the evaluations that are due at step `first`
    COMPUTE = 4  # compute round `first` of replica `second`, and send the gradients
    END = 5  # the loop is over; `first`: 1 if this worker was told to leave; `second`: 1 if it is the one that saves


class RankOrder(NamedTuple):
    """An order of the leader. The meaning of the numbers is the kind's."""

    kind: OrderKind
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

    def tell(self, order: RankOrder) -> None:
        """Leader only: give an order to the other ranks, which call `hear`."""
        with _others_live():
            dist.broadcast(torch.tensor(order, dtype=torch.int64, device="cpu"), LEADER, group=self._group)

    def hear(self) -> RankOrder:
        """Return the leader's next order. Waits as long as it takes."""
        numbers = torch.zeros(len(RankOrder._fields), dtype=torch.int64, device="cpu")
        self.at("waiting for what rank 0 does next")
        with _others_live():
            dist.broadcast(numbers, LEADER, group=self._group)
        kind, first, second = (int(number) for number in numbers)
        return RankOrder(OrderKind(kind), first, second)

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


# ---- How a script has spread its model over the ranks, and this rank's block of each tensor ----


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


def held_of(model: torch.nn.Module) -> tuple[list[HeldTensor], dict[str, torch.Tensor]]:
    """Return what this rank holds of the model's parameters and shared buffers, and the tensors by name.

    Raises ModelError for a tensor whose part on this rank is not one block.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters()) | persistent_buffers(model)
    return [_held(name, tensor) for name, tensor in tensors.items()], tensors


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers in the model's state_dict, where `checkpoint_wrapper` of torch's gives them other names."""
    kept = set(map(id, model.state_dict(keep_vars=True).values()))
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) in kept}


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


def _held(name: str, tensor: torch.Tensor) -> HeldTensor:
    trains = "trained" if tensor.requires_grad else "frozen"
    role = trains if isinstance(tensor, torch.nn.Parameter) else "buffer"
    return HeldTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), role, _block(name, tensor))


def _block(name: str, tensor: torch.Tensor) -> TensorBox | None:
    if not isinstance(tensor, DTensor):
        return TensorBox((0,) * tensor.dim(), tuple(tensor.shape))
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if not chunks:
        return None
    if len(chunks) > 1 or tuple(chunks[0].sizes) != tuple(tensor.to_local().shape):
        raise ModelError(f"{name} is spread as {tensor.placements}: a rank must hold one block of each tensor")
    return TensorBox(tuple(chunks[0].offsets), tuple(chunks[0].sizes))
