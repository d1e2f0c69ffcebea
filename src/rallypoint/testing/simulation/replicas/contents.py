"""What moves in a simulated job in place of tensors: names."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rallypoint.core.cadence import Cadence
from rallypoint.core.layout import Entry, Layout, Shard, TablePart, TensorSpec, carried_by
from rallypoint.core.optimizer import ENTRY, LossScaling
from rallypoint.core.view import ViewNumber
from rallypoint.testing.simulation.replicas.floats import COLUMNS, ROWS

Content = Any  # an int; where no bytes are promised the set of the contributions that made it
GARBAGE: Content = -1


class NamedSet(frozenset[Any]):
    """What was contributed to something; its floats follow from its name (from how it was made)."""

    name: int
    seen: Any  # of one contribution where servers compensate delays: what it was computed from

    def __new__(cls, of: Iterable[Any] = (), name: int = 0, seen: Any = None) -> NamedSet:
        made = super().__new__(cls, of)
        made.name, made.seen = name, seen
        return made


def name_of(content: Content) -> int:
    """The name by which floats are known; 0 is that of nothing, which a backup gets of a step that is skipped."""
    return content.name if isinstance(content, NamedSet) else int(content or 0)


@dataclass(frozen=True)
class State:
    """Under AllReduce a shard's whole state, as a worker has brought it."""

    content: Content


@dataclass(frozen=True)
class Mean:
    """Under AllReduce the mean of a step's contributions; None: the step changes nothing."""

    content: Content


class Coded(NamedTuple):
    """A contribution as it leaves its encoder: made from the codec state after the step `after` (-1: from none)."""

    content: Content
    step: int
    replica: int
    after: int
    generation: ViewNumber | None  # the one that the state belongs to; None without a state


class Residual(NamedTuple):
    """A codec state after `step`, in the shard's own count; `name` stands for what was not sent."""

    name: int
    step: int
    generation: ViewNumber


def combine(*parts: int) -> int:
    """A name for what these make together (hashes of tuples of ints are the same in every process)."""
    return hash(parts) & 0x7FFF_FFFF_FFFF_FFFF


def tree(contents: list[int]) -> int:
    """What the sum of all replicas' contributions is: see core/sums.py, which this does not use."""
    if len(contents) == 1:
        return contents[0]
    middle = 1 << (len(contents) - 1).bit_length() - 1
    return combine(tree(contents[:middle]), tree(contents[middle:]))


# What a replica computes in a round of local steps with a delay: a pure function of what it had and the version.


Names = tuple[int, ...]  # of a replica's parameters, or of a version, by shard


@dataclass(frozen=True)
class Trained:
    """A replica's own parameters, and its optimizer's state. 0: a new optimizer."""

    values: Names
    state: int = 0

    def stepped(self, round: int, replica: int, steps: int) -> Trained:
        """After so many steps of the round."""
        if not steps:
            return self
        made = combine(round, replica, steps, self.state, *self.values, 71)
        return Trained(tuple(combine(made, shard, 72) for shard in range(len(self.values))), combine(made, 73))

    def mixed(self, version: Names, shards: Sequence[int]) -> Trained:
        """The version of these shards is mixed in."""
        return replace(self, values=tuple(
            combine(own, new, 74) if shard in shards else own
            for shard, (own, new) in enumerate(zip(self.values, version, strict=True))
        ))  # fmt: skip

    def contributions(self, round: int, replica: int, version: Names) -> Names:
        """The version minus the replica's own parameters, by shard."""
        return tuple(
            combine(shard, round, replica, own, start, 75)
            for shard, (own, start) in enumerate(zip(self.values, version, strict=True))
        )


@dataclass(frozen=True)
class Rounds:
    """The rounds of one job. Each has `steps` steps; after the first `ahead` of them its version is mixed in."""

    cadence: Cadence
    steps: int
    ahead: int

    def first_steps(self, trained: Trained, round: int, replica: int) -> Trained:
        """What the replica comes to before the version is mixed in."""
        return trained.stepped(round, replica, self.ahead)

    def other_steps(self, trained: Trained, round: int, replica: int, version: Names, *, mixes: bool) -> Trained:
        """What it comes to after that. `mixes`: it did not start from this version."""
        due = [shard for shard in range(len(version)) if self.cadence.due(shard, round - 1)] if mixes else []
        return trained.mixed(version, due).stepped(round, replica, self.steps - self.ahead)

    def undisturbed(self, trained: Trained | None, round: int, replica: int, version: Names) -> Trained:
        """The replica's round from beginning to end, without any cluster. None: it starts from the version."""
        began = self.first_steps(Trained(version) if trained is None else trained, round, replica)
        return self.other_steps(began, round, replica, version, mixes=trained is not None)


# Audits in a simulated job: what a worker that computes wrong contributes.


@dataclass(frozen=True)
class AuditedJob:
    """A share of the steps is audited. The worker `wrong` computes something else from step `first` on."""

    share: float = 1.0
    wrong: str = ""
    first: int = 0

    def computed(self, worker: str, step: int, content: Content) -> Content:
        """What this worker's computation gives where `content` is right."""
        return combine(content, 97) if worker == self.wrong and step >= self.first else content

    def check(self, said: list[str], aborted: str) -> bool:
        """Has the job ended well although it was aborted? AssertionError if somebody was blamed who is right."""
        lost = [sentence for sentence in said if "has computed something else" in sentence]
        blamed = rf"and {self.wrong or '?'}( on host)? has computed"
        honest = [sentence for sentence in lost if not re.search(blamed, sentence)]
        assert not honest, f"an honest worker has lost: {honest[0]}"
        assert self.wrong or not any("different bytes" in sentence for sentence in said), f"a mismatch: {said}"
        return bool(self.wrong) and "nobody can decide" in aborted


# The layout of a simulated job.


def layout_of(
    count: int, buffers: Collection[int], tables: Sequence[int], groups: Sequence[int], carried: int = 0,
    scale: int = -1, named: Collection[int] = (),
) -> Layout:  # fmt: skip
    """Return a layout of `count` shards of 16 words, those of parameters in these optimizer groups, one after another.

    `buffers` and `tables` are shards: buffers, and the parts of a table. The last of them are what so many replicas
    carry, a shard each. One has the loss `scale`. The tensors of buffers have names, and those of the `named` shards.
    """
    of = [-1 if i in buffers else groups[i % len(groups)] for i in range(count)]
    for replica in range(carried):
        of[count - carried + replica] = carried_by(replica)
    parts = {i: TablePart(0, part, len(tables), ROWS) for part, i in enumerate(tables)}
    shards = tuple(
        Shard(i, group, 16 * i, 16 * i + 16) if i not in parts else Shard(i, group, 0, 0, COLUMNS, parts[i])
        for i, group in enumerate(of)
    )
    specs = (TensorSpec("table", (ROWS * len(tables), COLUMNS), "float32", 0),) if tables else ()
    names = {i: (f"tensor {i}", 16) for i in named} | {i: (f"buffer {i}", 16) for i in buffers} | {scale: (ENTRY, 2)}
    entries = tuple(
        Entry(TensorSpec(name, (words,), "float32", of[i]), 16 * i, 16 * i + 16)
        for i, (name, words) in sorted(names.items()) if i >= 0
    )  # fmt: skip
    return Layout(entries, shards, 16 * count, "simulated", specs)


# ---- the loss scale of a job with fp16: a shard of its own, the last one of the buffers, as a number ----

SCALING = LossScaling(init_scale=1024.0, growth_interval=3)
_APART = 100  # the content is this times the scale's exponent (of two, counted from -500), plus the steps applied
_LOWEST = -500
FIRST_SCALE = _APART * (10 - _LOWEST)


def scale_of(content: int) -> float:
    """What the losses of a step are multiplied by, when this is the content of the scale's shard."""
    return math.ldexp(1.0, content // _APART + _LOWEST)


def scale_words(content: int) -> list[float]:
    """What a server has in memory for it."""
    return [scale_of(content), float(content % _APART)]


def scale_after(content: int, *, skipped: bool) -> int:
    """The content of the scale's shard after a step."""
    scale, applied = SCALING.after(scale_of(content), content % _APART, skipped=skipped)
    return _APART * (math.frexp(scale)[1] - 1 - _LOWEST) + applied
