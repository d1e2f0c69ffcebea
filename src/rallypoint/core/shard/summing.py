"""The sum in progress of a shard: which contributions are in it, and which effects add one more.

Where each round has all R contributions, the sum is a tree over replica numbers (I3, `core/sums.py`). Otherwise
(under a quorum, and under streaming policies) contributions are added in the order in which they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from rallypoint.core.shard.effects import Acknowledge, Add, Discard, Effect, Merge, OnTime, Take
from rallypoint.core.shard.events import Chosen, Contribute
from rallypoint.core.sums import Block, Forest, is_block


@dataclass(slots=True)
class Chain:
    """Contributions of one of `replicas` replicas each, in the order in which they were added. `TreeSum` has the same
    methods; its `contributions` are none."""

    replicas: int
    contributions: list[Contribute] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The replica of the first contribution; 0 for a tree."""
        return self.contributions[0].replica

    @property
    def added(self) -> int:
        return len(self.contributions)

    @property
    def weight(self) -> float:
        return sum(contribution.weight for contribution in self.contributions)

    @property
    def losses(self) -> tuple[int, ...]:
        """The replicas whose loss is not finite, ascending. A block may name all of its replicas."""
        return tuple(sorted(c.replica for c in self.contributions if not c.finite and c.whole))

    @property
    def gradients(self) -> tuple[int, ...]:
        """The replicas whose contribution is not finite though the loss is, ascending. A block may name all of them."""
        return tuple(sorted(c.replica for c in self.contributions if not c.whole))

    def named(self, version: int) -> list[tuple[int, int]]:
        """The contributions in the sum, as (step, replica). Where all compute the same step, it is `version`."""
        return [(contribution.step, contribution.replica) for contribution in self.contributions]

    def knows(self, replica: int) -> bool:
        return any(contribution.replica == replica for contribution in self.contributions)

    def fault(self, contribution: Contribute) -> str:
        """Why no honest worker sends this contribution, as a sentence; "" if it may be sent."""
        if contribution.count != 1:
            return f"{_named(contribution)}: in this mode, one replica contributes at a time"
        return _stranger(contribution, self.replicas)

    def covers(self, contribution: Contribute) -> bool:
        """True if the sum has every replica of this contribution: it is a repeat."""
        return self.knows(contribution.replica)

    def add(self, contribution: Contribute, base: int | None) -> list[Effect]:
        """Add a contribution that is not covered. Returns what to do with the tensors. `base`: see `effects.Take`."""
        self.contributions.append(contribution)
        return [(Take if self.added == 1 else Add)(contribution.ticket, contribution.weight, base)]

    def clear(self) -> None:
        self.contributions = []

    def validate(self) -> None:
        """Raise AssertionError if the sum has impossible contributions."""
        named = [contribution.replica for contribution in self.contributions]
        assert len(set(named)) == len(named), f"replicas {sorted(named)} in one sum"
        assert not any(map(self.fault, self.contributions)), f"{named} of {self.replicas}"


@dataclass(slots=True)
class _Node:
    weight: float  # float64, added by the same tree
    losses: tuple[int, ...]
    gradients: tuple[int, ...]


@dataclass(slots=True)
class TreeSum:
    """Blocks of the tree over `replicas` replicas, from `lowest` on. Siblings merge as soon as both are there.

    The tree's blocks are counted from `lowest` on, contributions from replica 0 on. Example: replica 3 alone
    contributes to a shard of the state that it carries: lowest = 3, replicas = 1, and its block is [0,1).

    A block is *early* while a lower replica is missing. The server counts early blocks, and slows their senders down
    when there are too many bytes of them. Whoever computes in replica order is never slowed down for good; who gets
    lower replicas in mid-step sends without credits (`ServerLink.overdraw`). So the sum always goes on.
    """

    contributions: ClassVar[tuple[Contribute, ...]] = ()
    first: ClassVar[int] = 0

    replicas: int
    lowest: int = 0
    added: int = 0  # replicas
    _forest: Forest = field(init=False)
    _nodes: dict[int, _Node] = field(default_factory=dict)  # by the block's start
    _early: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._forest = Forest(self.replicas)

    @property
    def weight(self) -> float:
        assert self._forest.whole, f"only {list(self._forest)} of {self.replicas} replicas are here"
        return self._nodes[0].weight

    @property
    def losses(self) -> tuple[int, ...]:
        return tuple(sorted([replica for node in self._nodes.values() for replica in node.losses]))

    @property
    def gradients(self) -> tuple[int, ...]:
        return tuple(sorted([replica for node in self._nodes.values() for replica in node.gradients]))

    def named(self, version: int) -> list[tuple[int, int]]:
        return [(version, self.lowest + replica) for block in self._forest for replica in range(*block)]

    def knows(self, replica: int) -> bool:
        return self._forest.has(replica - self.lowest)

    def fault(self, contribution: Contribute) -> str:
        if contribution.count != 1 and not is_block(self._block(contribution), self.replicas):
            return f"{_named(contribution)} are no block of this shard's sum (it has {self.replicas})"
        return _stranger(contribution, self.replicas, self.lowest)

    def covers(self, contribution: Contribute) -> bool:
        return self._forest.covers(self._block(contribution))

    def add(self, contribution: Contribute, base: int | None) -> list[Effect]:
        block = self._block(contribution)
        effects: list[Effect] = []
        for old in self._forest.add(block):
            effects += [Discard(old.start), *self._on_time(old.start)]
            del self._nodes[old.start]
        if early := self._forest.prefix < block.start:
            self._early.add(block.start)
        self._nodes[block.start] = _node(contribution)
        effects.append(Take(contribution.ticket, contribution.weight, base, block.start, contribution.count, early))
        while (halves := self._forest.merge(block)) is not None:
            block = Block(halves[0].start, halves[1].stop)
            effects += self._merge(*halves)
        self.added = self._forest.count
        if not self._early:
            return effects
        prefix = self._forest.prefix
        return effects + [effect for start in sorted(self._early) if start < prefix for effect in self._on_time(start)]

    def _block(self, contribution: Contribute) -> Block:
        start = contribution.replica - self.lowest
        return Block(start, start + contribution.count)

    def _merge(self, left: Block, right: Block) -> list[Effect]:
        one, other = self._nodes[left.start], self._nodes.pop(right.start)
        self._nodes[left.start] = _Node(
            one.weight + other.weight, one.losses + other.losses, one.gradients + other.gradients
        )  # fmt: skip
        return [Merge(left.start, right.start), *self._on_time(right.start)]

    def _on_time(self, start: int) -> list[Effect]:
        if start not in self._early:
            return []
        self._early.remove(start)
        return [OnTime(start)]

    def clear(self) -> None:
        self._forest.clear()
        self.added = 0
        self._nodes.clear()
        self._early.clear()

    def validate(self) -> None:
        self._forest.validate()
        starts = {block.start for block in self._forest}
        assert starts == set(self._nodes), f"blocks at {starts}, nodes at {set(self._nodes)}"
        assert self._early <= starts, f"early blocks at {self._early}, blocks at {starts}"


def _node(contribution: Contribute) -> _Node:
    if contribution.finite:
        return _Node(contribution.weight, (), ())
    replicas = contribution.bad or tuple(range(*contribution.block))
    return _Node(contribution.weight, replicas if contribution.whole else (), () if contribution.whole else replicas)


def _named(contribution: Contribute) -> str:
    return f"replicas {contribution.replica} to {contribution.block.stop - 1}"


def _stranger(contribution: Contribute, replicas: int, lowest: int = 0) -> str:
    if lowest <= contribution.replica and contribution.replica + contribution.count <= lowest + replicas:
        return ""
    has = f"only replica {lowest}" if lowest else str(replicas)
    return f"replica {contribution.replica} does not contribute to this shard (it has {has})"


# Which contributions a round's update takes, where the first to come are taken and servers decide by the sum's norm.
#
# ```
#    primary: the sum has all that it takes --Chosen--> backup: learns the choice
#    primary: finishes the sum, tells the norm <--Acknowledge-- backup
# ```
#
# Example: a quorum of 2 of 3. Server a takes replicas 2 and 0 of step 7 and tells some servers the norm of their mean.
# Then it dies. Its backup takes 2 and 0 too, although 1 may come first now. So all servers get the same norm, whoever
# tells it.


@dataclass(slots=True)
class Choice:
    """One shard's choice for the round in progress.

    `pending`: this primary's sum has all of its contributions, and waits until the backup knows which. A backup may
    hear of the choice before it has the version that the choice is for: with a state the choice goes first, and on a
    link urgent frames overtake updates.
    """

    pending: bool = False
    _learnt: Chosen | None = None  # on a backup: the newest choice that the primary has told

    def tell(self, step: int, taken: Iterable[Contribute]) -> Chosen:
        """Tell the backup which contributions to `step` are taken, in the order of adding."""
        return Chosen(step, tuple(contribution.replica for contribution in taken))

    def learn(self, chosen: Chosen) -> None:
        """The primary has told this backup its choice."""
        self._learnt = chosen

    def acknowledge(self, version: int) -> Acknowledge:
        """This backup has `version`, and perhaps the choice for the next one too."""
        return Acknowledge(version, chosen=bool(self.known(version)))

    def known(self, step: int) -> tuple[int, ...]:
        """The replicas that the primary has chosen for `step`, in its order; empty if it has told none."""
        return self._learnt.replicas if self._learnt is not None and self._learnt.step == step else ()
