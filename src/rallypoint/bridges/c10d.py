"""A backend of torch.distributed whose sums are made by Rallypoint's servers.

    import rallypoint.bridges.c10d                       # registers the backend, and joins the cluster
    torch.distributed.init_process_group(backend="rallypoint")

DDP, FSDP2 (`fully_shard` on a CPU) and a script's own ``all_reduce`` use it as any backend. What adds up floating-point
numbers over all ranks goes to the servers: K bytes up and K bytes down for each rank, whatever their number. All else
(broadcasts, gathers, other operations, whole numbers, float64, every group but the first) goes over Gloo.

torch calls methods of a group from C++ too. Where a group's class in Python has no method of that name, torch (2.9 to
2.13) calls that of its own class *while it holds Python's lock*. That waits for Gloo's threads, while these wait for
the lock, to free tensors. Then nothing goes on in the process, not even its heartbeats. So `RallypointGroup` leaves no
method to torch's class: what is not written here is done by a plain group over Gloo, whose methods let the lock go.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from rallypoint.bridges.joining import SUMMED, SumPart, is_child, sum_of, sums
from rallypoint.launch import environment
from rallypoint.worker.collective import Sums

__all__ = ["NAME", "FutureWork", "RallypointGroup"]

NAME = "rallypoint"
Tensors = Sequence[torch.Tensor]
Store = _distributed_c10d.Store
_Op = dist.ReduceOp


class RallypointGroup(dist.ProcessGroup):
    """A process group: sums of all ranks by servers, everything else by Gloo.

    A sum is the tree over ranks in fp32 (I3): the same bytes on every rank and in every run; a mean is the sum times
    1/world. Once a worker is gone, every sum raises JobAborted, which torch shows as a RuntimeError with its sentence.

    torch has old and new names for the same methods (`_reduce_scatter_base` is `reduce_scatter_single` from 2.13 on):
    both are here. The methods that only move tensors are added below the class.
    """

    def __init__(self, made: Sums, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub has only the other form
        # Servers add up what all ranks ask for in one order. Another group of all ranks may be used at the same time
        # from another thread, and in another order on each rank: its sums go over Gloo.
        self._sums = made if size == made.world and not dist.is_initialized() else None
        self._number, self._count = rank, size
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        # The group that `init_process_group("gloo")` makes. Its class is torch's own, so its methods hold no lock.
        self._plain: Any = dist.ProcessGroup(store, rank, size)
        for group in (self._plain, self):  # of `self` torch asks for the backend of a device: its time-out, its name
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        """Its name, for torch."""
        return NAME

    # ---- what adds up ----

    def allreduce(self, tensors: Any, *opts: Any, **named: Any) -> dist.Work:  # type: ignore[override]
        """Replace each tensor by the sum (or mean, ...) over all ranks."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        op = _op_of(*opts, *named.values())
        if (made := self._by_servers(op, tensors)) is not None:
            return _asked(made, [SumPart(tensor, tensor, **self._scaling(op)) for tensor in tensors], tensors)
        works = [self._by_gloo(dist.AllreduceOptions(), op, partial(self._plain.allreduce, [t]), t) for t in tensors]
        return works[0] if len(works) == 1 else _waited(works, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, *opts: Any, **named: Any) -> dist.Work:  # type: ignore[override]
        """`allreduce`: the ranks other than the root get the result too, which torch leaves open."""
        return self.allreduce(tensors, *opts, **named)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, *opts: Any) -> dist.Work:
        """Of each input: rank r gets the r-th part of the sum over all ranks."""
        op, pairs = _op_of(*opts), list(zip(outputs, inputs, strict=True))
        for output, input in pairs:
            if input.numel() != (each := output.numel()) * self._count:
                raise ValueError(f"reduce_scatter of {input.numel()} numbers for {self._count} ranks, {each} for each")
        if (made := self._by_servers(op, [*inputs, *outputs])) is not None:
            parts = [SumPart(i, o, keeps=self._own(o.numel()), **self._scaling(op)) for o, i in pairs]
            return _asked(made, parts, list(outputs))
        scattered = self._plain._reduce_scatter_base
        works = [self._by_gloo(dist.ReduceScatterOptions(), op, partial(scattered, o, i), o) for o, i in pairs]
        return works[0] if len(works) == 1 else _waited(works, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, *opts: Any) -> dist.Work:
        """Rank r gets the r-th part of the sum of all inputs."""
        return self.reduce_scatter_single_coalesced([output], [input], *opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, *opts: Any, **named: Any) -> dist.Work:  # type: ignore[override]
        """The same for inputs that are lists, one tensor for each rank."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        flat = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, flat, *opts, *named.values())

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _by_servers(self, op: Any, tensors: Tensors) -> Sums | None:
        """What makes this sum; None if it goes over Gloo."""
        adds = op == _Op.SUM or op == _Op.AVG or op == _Op.PREMUL_SUM  # (`in` would compare them the other way round)
        return self._sums if adds and all(map(_goes, tensors)) else None

    def _own(self, each: int) -> range:
        return range(self._number * each, (self._number + 1) * each)

    def _scaling(self, op: Any) -> dict[str, Any]:
        if op == _Op.AVG:
            return {"factor": 1.0 / self._count}
        return {"before": op.factor} if op == _Op.PREMUL_SUM else {}

    def _by_gloo(self, opts: Any, op: Any, call: Callable[[Any], dist.Work], output: torch.Tensor) -> dist.Work:
        """Not every version of Gloo has a mean: wait for its sum, and divide."""
        opts.reduceOp = _Op.SUM if op == _Op.AVG else op
        work = call(opts)
        if op != _Op.AVG:
            return work
        work.wait()
        output.div_(self._count)
        return _waited([], [output])


# What a group knows of itself: torch sets and reads it in the group that it has been given.
OWN = frozenset(
    {
        "boxed", "unbox", "rank", "size", "name", "get_group_store", "_id", "_backend_id", "_get_backend",
        "_get_backend_name", "_has_hooks", "_register_backend", "_set_default_backend", "_set_group_desc",
        "_set_group_name",
    }
)  # fmt: skip


def _over_gloo(name: str) -> Callable[..., Any]:
    """A method of a group that has Gloo do it."""

    def call(self: RallypointGroup, *given: Any, **named: Any) -> Any:
        return getattr(self._plain, name)(*given, **named)

    call.__name__ = name
    call.__doc__ = f"`ProcessGroup.{name}`, over Gloo."
    return call


def _override_the_rest() -> None:
    """Add each method of torch's class that `RallypointGroup` has not: which there are is another matter in each
    version of torch."""
    for name in dir(dist.ProcessGroup):
        one = getattr(dist.ProcessGroup, name)
        there = name in vars(RallypointGroup) or name in OWN or hasattr(object, name)
        if not there and callable(one) and not isinstance(one, type) and not name.startswith("_pybind11"):
            setattr(RallypointGroup, name, _over_gloo(name))


_override_the_rest()


def _goes(tensor: torch.Tensor) -> bool:
    """True if servers can add it up: sparse gradients go over Gloo."""
    return tensor.dtype in SUMMED and tensor.layout is torch.strided and tensor.numel() > 0


def _op_of(*given: Any) -> Any:
    """The operation: one of the arguments, or of an argument with options; by default the sum."""
    for one in given:
        if isinstance(one, (_Op, _Op.RedOpType)):
            return one
        if hasattr(one, "reduceOp"):
            return one.reduceOp
    return _Op.SUM


def _asked(made: Sums, parts: Sequence[SumPart], result: list[torch.Tensor]) -> dist.Work:
    return FutureWork(sum_of(made, parts, result, torch.device("cpu")), made.told)


def _waited(works: Iterable[dist.Work], result: Tensors) -> dist.Work:
    """Wait for these, and return a work that is done. (Gloo has no future of some of its own.)"""
    for work in works:
        work.wait()
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(list(result))
    return FutureWork(future)


class FutureWork(dist.Work):
    """The work of a future. `wait` raises the future's error, which the work that torch itself makes of a future does
    not: its `wait` says True all the same (torch 2.13). `told` makes of the future's error the one to raise."""

    def __init__(
        self, future: torch.futures.Future[list[torch.Tensor]],
        told: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> None:  # fmt: skip
        super().__init__()
        self._future, self._told = future, told

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the sum is there, however long that takes: who is late is said by the job."""
        self.result()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The future itself; DDP waits for it."""
        return self._future

    def is_completed(self) -> bool:
        """Has it ended, well or not?"""
        return self._future.done()

    def is_success(self) -> bool:
        """Has it ended well?"""
        try:
            return self._future.done() and self._future.value() is not None
        except RuntimeError:
            return False

    def result(self) -> list[torch.Tensor]:
        """The tensors with the result, once they are there."""
        try:
            return self._future.wait()
        except RuntimeError as error:
            raise self._told(error) from None


def _register() -> None:
    """Register the backend. In a process that a launcher has started, also join the cluster: torch needs to be told
    where its processes meet before it makes a group, and under torchrun the script begins anew."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, lambda *given: RallypointGroup(sums(), *given), devices=["cpu"])
    launched = os.environ.get(environment.COORDINATOR) or "TORCHELASTIC_RUN_ID" in os.environ
    if launched and not is_child():
        sums()


_register()
