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
from rallypoint.errors import ConfigError, UsageError

Carry = torch.Tensor | tuple["Carry", ...] | list["Carry"] | dict[str, "Carry"]
"""A tensor, or tensors in tuples, lists and dicts."""

MOST_BYTES = 1 << 28  # of all replicas together: every worker gets all of it with each version


class TrainSettings(Settings, total=False):
    """The settings of `job.train`: those of `JobConfig`, and what is no data."""

    carry: Carry | None


class Carried:
    """The state of each of `replicas` replicas. Main thread only.

    `first` is what each replica begins with. Raises ConfigError when it cannot be carried.

    Attributes:
        tensors: by the layout's names, the values in the model's version, or those that a replica has left since.
        specs: the layout's, in the same order.
    """

    def __init__(self, first: Carry, replicas: int, device: torch.device) -> None:
        self._first = first
        leaves = dict(_leaves(first, ""))
        _check(leaves, replicas)
        self._names = list(leaves)
        self.tensors: dict[str, torch.Tensor] = {}
        self.specs: list[TensorSpec] = []
        for replica in range(replicas):
            for name, leaf in leaves.items():
                place = _named(replica, name)
                own = self.tensors[place] = leaf.detach().to(device).clone(memory_format=torch.contiguous_format)
                self.specs.append(TensorSpec(place, tuple(own.shape), _type(own), carried_by(replica)))
        self._given: tuple[int, list[torch.Tensor]] | None = None

    def of(self, replica: int) -> Carry:
        """Return what the replica carries now: new tensors without a graph, in the form of `first`."""
        if self._given is not None and self._given[0] == replica:
            values = self._given[1]
        else:
            values = [self.tensors[_named(replica, name)].clone() for name in self._names]
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
                f"the state that replica {replica} is to carry {where} tensor {_named(replica, other[0])}, unlike "
                "carry= of job.train: give it the same form"
            )
        for name, tensor in given.items():
            own = self.tensors[_named(replica, name)]
            if tensor.shape != own.shape or tensor.dtype != own.dtype:
                do = "is carry= for one replica's batch? is the last batch shorter?" if tensor.dtype == own.dtype else (
                    "give carry= this type, or convert what you assign"
                )  # fmt: skip
                raise UsageError(
                    f"{_named(replica, name)} is {_type(tensor)} {list(tensor.shape)}, and carry= of job.train "
                    f"has {_type(own)} {list(own.shape)} there: what a replica carries keeps its shape and type ({do})"
                )
        self._given = replica, [tensor.detach() for tensor in given.values()]

    @torch.no_grad()
    def keep(self) -> None:
        """The micro-batch is over: what was given is what the replica carries."""
        if self._given is not None:
            replica, values = self._given
            self._given = None
            for name, value in zip(self._names, values, strict=True):
                self.tensors[_named(replica, name)].copy_(value)


def _named(replica: int, leaf: str) -> str:
    return f"carry[{replica}]{leaf}"


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
