"""What a worker says of the version that its model holds, where a view asks for it (`View.handover`, `View.warming`).

It is a claim: it names the generation and the version (I10). A worker that has a version has all of its shards, so each
of them has had every contribution to the steps before it. Who says too much makes work be done again, and nothing else.
"""

from __future__ import annotations

from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.machine import SlotMachine

Reached = tuple[ViewNumber, int]


class Reaching:
    """Says once for each generation and view that asks which version the model holds."""

    def __init__(self, machine: SlotMachine) -> None:
        self._machine = machine
        self._said: tuple[ViewNumber, int | None, bool] | None = None

    def take(self) -> Reached | None:
        """What to say now to the coordinator; None: nothing, or it was said already."""
        view, step = self._machine.view, self._machine.step
        if view is None or step < 0:
            return None
        held = view.handover if view.handover is not None and step >= view.handover else None
        warms = self._machine.me in view.warming
        about = (view.generation, held, warms)
        if about == self._said or (held is None and not warms):
            return None
        self._said = about
        return view.generation, step

    def again(self) -> None:
        """Say it once more: it may have been lost."""
        self._said = None
