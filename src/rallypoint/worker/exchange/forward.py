"""The version that a forward pass reads while it arrives. `core/worker/overlap.py` decides what may be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rallypoint.core.layout import Layout, forward_ranks
from rallypoint.core.worker.overlap import OverlapMachine
from rallypoint.core.worker.slots import Compute, Install
from rallypoint.worker.exchange.links import Links
from rallypoint.worker.exchange.locked import LockedShell, Rewound
from rallypoint.worker.exchange.pushes import Pushes


class ForwardVersion:
    """Waits for shards of the version that is being installed, and gives them to the main thread. Main thread only.

    Attributes:
        waited: seconds that the forward pass in progress has waited for shards.
    """

    def __init__(
        self, layout: Layout, locked: LockedShell, pushes: Pushes, links: Links, describe: Callable[[], str]
    ) -> None:
        """`describe` says what the main thread waits for, as a phrase."""
        self.waited = 0.0
        self._task = Compute(-1, -1)  # the replica in progress
        self._locked, self._pushes, self._links, self._describe = locked, pushes, links, describe
        machine = locked.machine
        self._machine = machine if isinstance(machine, OverlapMachine) else None
        if self._machine is not None:
            pushes.ranks = forward_ranks(layout)

    @property
    def possible(self) -> bool:
        """True if forward passes may begin early in this job."""
        return self._machine is not None

    def learn(self, order: Sequence[int]) -> None:
        """A forward pass needed the shards in this order: from now on contributions are sent in it (Jayarajan et al.,
        2019: Priority-based Parameter Propagation; Peng et al., 2019: ByteScheduler)."""
        ranks = {shard: rank for rank, shard in enumerate(order)}
        self._pushes.ranks = [ranks[shard] for shard in range(len(ranks))]

    def allow(self, allowed: bool) -> None:
        """Allow (or not) that `Exchange.next_action` begins the next step before all of its version is here."""
        if self._machine is not None:
            with self._locked.changed:
                self._machine.allow_early(allowed)

    def begin(self, step: int, replica: int) -> bool:
        """A replica begins. Returns True if its forward pass begins early."""
        self.waited, self._task = 0.0, Compute(step, replica)
        return self._machine is not None and self._machine.early

    def take(self, shards: Sequence[int]) -> list[int]:
        """Wait until these shards are here. Returns those that the model does not hold yet: swap slot and model.

        Raises Rewound when the forward pass is stale, and the error of whatever has failed.
        """
        machine, began = self._machine, time.monotonic()
        assert machine is not None
        with self._locked.changed:
            if not machine.rewound and not machine.here(shards):
                self._locked.wait_for_shards(shards, lambda: machine.here(shards), self._describe)
                self.waited += time.monotonic() - began
            if machine.rewound:
                raise Rewound
            return machine.to_swap(shards)

    def installed(self) -> None:
        """Report that the model holds all of the version. Raises Rewound when the forward pass is stale."""
        with self._locked.changed:
            if self._locked.machine.rewound:
                raise Rewound
            effects = self._locked.settle(self._locked.shell.installed())
            self._locked.progress.given(Install(self._task.step), ends_round=True)
            self._locked.progress.given(self._task)
            self._locked.changed.notify_all()
        self._locked.effects.run(effects)
        self._links.installed(self._task.step)
