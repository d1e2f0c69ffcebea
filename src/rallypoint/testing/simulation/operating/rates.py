"""`rallypoint learning-rate`, given to a simulated coordinator until it has answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint.core.view import Scale
from rallypoint.net.ordering.messages import LearningRate, Ordered
from rallypoint.testing.simulation.network import Node
from rallypoint.testing.simulation.operating.given import Given


class RateOperators:
    """Change the learning rate, one after the other, each by another factor. They add each answer to `told`."""

    def __init__(self, new_node: Callable[[], Node], told: list[str], *, forgets: bool) -> None:
        """`forgets`: the coordinator may forget an order, because its journal's disk is full for a time."""
        self._new_node, self._told, self._forgets = new_node, told, forgets
        self._given = self._waiting = 0
        self._kept: list[float] = []  # the factors that the coordinator said would count

    def change(self) -> None:
        """Order one more factor, after those before. (All observers hear each answer.)"""
        self._waiting += 1
        if self._waiting == 1:
            self._begin()

    def _begin(self) -> None:
        self._given += 1
        node, factor = self._new_node(), 1.0 + 2.0**-self._given  # any product of these is another number

        def heard(answer: Ordered, _: bool) -> None:
            self._told.append(f"{node.world.now:.3f} {answer.text}")
            node.kill()
            if not answer.refused:
                self._kept.append(factor)
            self._waiting -= 1
            if self._waiting:
                self._begin()

        Given(node, LearningRate(factor), heard)

    def check(self, scales: Sequence[Scale], pending: float | None) -> None:
        """AssertionError if an order was forgotten: `scales` count at the end, and `pending` was about to."""
        known = [*(scale.factor for scale in scales), *([] if pending is None else [pending])]
        missing = [factor for factor in self._kept if factor not in known]
        assert not missing or self._forgets, f"a coordinator has forgotten to multiply the learning rate by {missing}"
