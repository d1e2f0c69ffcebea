"""The version that this worker is to evaluate, as the servers keep it."""

from __future__ import annotations

import torch

from rallypoint.core.layout import Layout
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.slots import Evaluate
from rallypoint.worker.exchange.locked import LockedShell, Rewound
from rallypoint.worker.exchange.rows.pulls import RowPulls


class LeasedPull:
    """Pulls the leased version beside the exchange buffer, which goes on with training. Main thread only."""

    def __init__(self, layout: Layout, locked: LockedShell, rows: RowPulls) -> None:
        self._layout, self._locked, self._rows = layout, locked, rows
        self._lease: tuple[ViewNumber, int] | None = None  # what is being evaluated: the generation and the version

    def decide(self) -> None:
        """The job decides from evaluations: nothing is computed before a view says how far."""
        with self._locked.changed:
            self._locked.shell.leased.decides = True

    def begin(self, version: int) -> tuple[ViewNumber, torch.Tensor | None] | None:
        """Wait for the version. Returns the generation, and the version's flat fp32 vector.

        None: it is not to be evaluated here any more, or there is something else to do first. None in place of the
        vector: no server keeps that version.
        """
        shell = self._locked.shell
        generation = shell.view.generation

        def goes_on() -> bool:
            same = shell.view.generation == generation
            return same and not shell.over and shell.next_action() == Evaluate(version)

        pull = self._rows.whole(version, self._layout.shards, goes_on)
        if pull is None:
            return None
        self._lease = generation, version
        if pull.outdated:
            self.end()
            return generation, None
        vector = torch.empty(self._layout.words, dtype=torch.float32, device="cpu")
        for shard in self._layout.shards:
            vector[shard.start : shard.stop] = torch.frombuffer(pull.got.pop(shard.index), dtype=torch.float32)
        return generation, vector

    def check(self) -> None:
        """Raise Rewound if another worker is to evaluate the version by now, or a roll-back has made it stale."""
        self._locked.check(stale=False)
        view, lease = self._locked.shell.view, self._lease
        if lease is None or view.generation != lease[0] or not view.leases(lease[1]):
            raise Rewound
        if view.lease is None or view.lease.holder != self._rows.me:
            raise Rewound

    def end(self) -> None:
        """The evaluation is over: this worker is not asked for it again."""
        assert self._lease is not None
        with self._locked.changed:
            self._locked.shell.leased.over(*self._lease)
