"""The state that replicas carry from step to step, such as the hidden state of a recurrent model.

It is a part of the version, like a buffer, with a tensor for each replica: only that replica changes it. So it is kept,
published, replicated and stored by the same machines, and whoever computes a replica has its state. The layout calls
the tensors ``carry[REPLICA]`` and their place in the tree: ``carry[3].h``, ``carry[3][0]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from rallypoint.config import Settings
from rallypoint.core.layout import DTYPE_BYTES, TensorSpec, carried_by
from rallypoint.core.streams.ledger import ROW, ReadBy, ledger_of, noted
from rallypoint.data.streams.once import OnceItems
from rallypoint.errors import ConfigError, UsageError

Carry = torch.Tensor | tuple["Carry", ...] | list["Carry"] | dict[str, "Carry"]
"""A tensor, or tensors in tuples, lists and dicts."""

MOST_BYTES = 1 << 28  # of all replicas together: every worker gets all of it with each version


class TrainSettings(Settings, total=False):
    """The settings of `job.train`: those of `JobConfig`, and what is no data."""

    carry: Carry | None


class Carried:
    """The state of each of `replicas` replicas. Main thread only.

    `first` is what each replica begins with; `name` is what the layout calls it. Raises ConfigError when it
    cannot be carried.

    Attributes:
        tensors: by the layout's names, the values in the model's version, or those that a replica has left since.
        specs: the layout's, in the same order.
    """

    def __init__(self, first: Carry, replicas: int, device: torch.device, name: str = "carry") -> None:
        self._first, self._called = first, name
        leaves = dict(_leaves(first, ""))
        _check(leaves, replicas)
        self._names = list(leaves)
        self.tensors: dict[str, torch.Tensor] = {}
        self.specs: list[TensorSpec] = []
        for replica in range(replicas):
            for leaf_name, leaf in leaves.items():
                place = self._named(replica, leaf_name)
                own = self.tensors[place] = leaf.detach().to(device).clone(memory_format=torch.contiguous_format)
                self.specs.append(TensorSpec(place, tuple(own.shape), _type(own), carried_by(replica)))
        self._given: tuple[int, list[torch.Tensor]] | None = None

    def of(self, replica: int) -> Carry:
        """Return what the replica carries now: new tensors without a graph, in the form of `first`."""
        if self._given is not None and self._given[0] == replica:
            values = self._given[1]
        else:
            values = [self.tensors[self._named(replica, name)].clone() for name in self._names]
        return _filled(self._first, iter(values))

    def give(self, replica: int, state: Carry) -> None:
        """Set what the replica carries, from `keep` on. Its graph is cut off.

        Raises UsageError unless it has the form, the shapes and the types of `first`.
        """
        given = dict(_leaves(state, ""))
        if list(given) != self._names:
            other = sorted(set(given) ^ set(self._names)) or list(given)
            where = "has no" if other[0] in self._names else "has a"
            raise UsageError(
                f"the state that replica {replica} is to carry {where} tensor {self._named(replica, other[0])}, unlike "
                "carry= of job.train: give it the same form"
            )
        for name, tensor in given.items():
            own = self.tensors[self._named(replica, name)]
            if tensor.shape != own.shape or tensor.dtype != own.dtype:
                do = "is carry= for one replica's batch? is the last batch shorter?" if tensor.dtype == own.dtype else (
                    "give carry= this type, or convert what you assign"
                )  # fmt: skip
                raise UsageError(
                    f"{self._named(replica, name)} is {_type(tensor)} {list(tensor.shape)}, and carry= of job.train "
                    f"has {_type(own)} {list(own.shape)} there: what a replica carries keeps its shape and type ({do})"
                )
        self._given = replica, [tensor.detach() for tensor in given.values()]

    def _named(self, replica: int, leaf: str) -> str:
        return f"{self._called}[{replica}]{leaf}"

    @torch.no_grad()
    def keep(self) -> None:
        """The micro-batch is over: what was given is what the replica carries."""
        if self._given is not None:
            replica, values = self._given
            self._given = None
            for name, value in zip(self._names, values, strict=True):
                self.tensors[self._named(replica, name)].copy_(value)


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _leaves(tree: object, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a tree with their places, such as ``.h[0]``. Raises UsageError for anything else in it."""
    if isinstance(tree, torch.Tensor):
        yield place, tree
    elif isinstance(tree, (tuple, list)):
        for index, part in enumerate(tree):
            yield from _leaves(part, f"{place}[{index}]")
    elif isinstance(tree, Mapping) and all(isinstance(name, str) for name in tree):
        for name, part in tree.items():
            yield from _leaves(part, f"{place}.{name}")
    else:
        raise UsageError(
            f"the state that a replica carries has a {type(tree).__name__} at carry{place}: it is made of tensors, in "
            "tuples, lists and dicts with names"
        )


def _filled(tree: Carry, values: Iterator[torch.Tensor]) -> Carry:
    """Return a tree of the same form with these tensors."""
    if isinstance(tree, torch.Tensor):
        return next(values)
    if isinstance(tree, dict):
        return {name: _filled(part, values) for name, part in tree.items()}
    parts = [_filled(part, values) for part in tree]
    return parts if isinstance(tree, list) else tuple(parts)


def _check(leaves: Mapping[str, torch.Tensor], replicas: int) -> None:
    if not leaves:
        raise ConfigError("carry= has no tensor: give what each replica begins with, or leave it out")
    for name, tensor in leaves.items():
        if _type(tensor) not in DTYPE_BYTES or tensor.layout is not torch.strided or tensor.is_meta:
            raise ConfigError(
                f"carry{name} is {_type(tensor)}, {tensor.layout}, on {tensor.device}: a replica carries dense tensors "
                f"of {', '.join(DTYPE_BYTES)}"
            )
        real = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch cannot ask this of 8-bit floats
        if not bool(torch.isfinite(real).all()):
            raise ConfigError(f"carry{name} has values that are not finite: no replica can go on from it")
    one = sum(tensor.numel() * tensor.element_size() for tensor in leaves.values())
    if one * replicas > MOST_BYTES:
        raise ConfigError(
            f"carry= is {math.ceil(one / 1e6)} MB for each of {replicas} replicas, and every worker gets all of it "
            f"with each version: {MOST_BYTES >> 20} MiB are supported. Carry less, or compute it again from the "
            "samples before"
        )


def carried_ledger(replicas: int) -> Carried:
    """The rows of the ledger, one for each replica, as a state that it carries. They are on the CPU, wherever the model
    is: each micro-batch reads and writes one."""
    return Carried(torch.zeros(ROW, dtype=torch.int64, device="cpu"), replicas, torch.device("cpu"), name="samples")


class SampleLedger:
    """Counts the samples that this worker uses, in what its replicas carry. Main thread only."""

    def __init__(self, rows: Carried, items: OnceItems, *, worker: str, replicas: int) -> None:
        self._rows, self._items = rows, items
        self._worker, self._replicas = worker, replicas

    def used(self, replica: int) -> None:
        """The replica has used the micro-batch that was given to `OnceItems.computes` last."""
        items = self._items
        row = noted(self._row(replica), items.key, self._worker, used=items.in_batch, read=items.read)
        self._rows.give(replica, torch.tensor(row, dtype=torch.int64, device="cpu"))
        self._rows.keep()

    @property
    def readers(self) -> list[ReadBy]:
        """The ledger of the version that the model holds."""
        return ledger_of(self._row(replica) for replica in range(self._replicas))

    def _row(self, replica: int) -> list[int]:
        row = self._rows.of(replica)
        assert isinstance(row, torch.Tensor)
        numbers: list[int] = row.tolist()
        return numbers
