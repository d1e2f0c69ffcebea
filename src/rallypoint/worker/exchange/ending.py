"""The job's end as the main thread sees it: the last version, and the wait until everybody knows of a stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from rallypoint.core.typed import HasSent
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.aligned import sent_of, unapplied
from rallypoint.core.worker.ending import End
from rallypoint.errors import RallypointError
from rallypoint.worker.exchange.locked import LockedShell, Rewound


class JobEnd:
    """Main thread only."""

    def __init__(self, locked: LockedShell) -> None:
        self._locked, self._shell = locked, locked.shell

    @property
    def last(self) -> int:
        """The job's last version, as far as this worker knows."""
        return self._shell.machine.steps

    @property
    def generation(self) -> ViewNumber:
        """The generation in force."""
        return self._shell.view.generation

    @property
    def is_early(self) -> bool:
        """True if the script has stopped the job, and the view says with which version it ends."""
        return self._shell.view.stop is not None

    def take(self) -> End | None:
        """The generation and the last version, if the model holds that; else None."""
        with self._locked.changed:
            return self._shell.ending.take()

    def computes(self) -> bool:
        """True if this worker would compute now: the step needs something of it."""
        with self._locked.changed:
            return self._has_to_compute()

    def _has_to_compute(self) -> bool:
        action = self._shell.machine.next_action()
        return isinstance(action, machine.Compute) and action.step == self._shell.machine.step

    def wait_until_known(self) -> None:
        """Wait until a view says with which version the job ends. Raises Rewound like `Exchange.check`."""
        with self._locked.changed:
            self._locked.wait(
                lambda: self._shell.over or self.is_early or self._shell.machine.rewound,
                lambda: "the coordinator to say with which step the job ends",
            )
            if self._shell.machine.rewound:
                raise Rewound

    def wait_for_others(self) -> None:
        """Wait while this worker would have to compute, and cannot: its script has left the loop."""
        with self._locked.changed:
            step = self._shell.machine.step
            self._locked.wait(
                lambda: self._shell.over or not self._has_to_compute() or self._shell.machine.step != step,
                lambda: f"step {step}: others compute what is left of it, because the script has left its loop here",
            )


    @property
    def sent(self) -> HasSent:
        """Which shards have all that they need of this worker at the step in progress."""
        with self._locked.changed:
            return sent_of(self._shell.machine)

    def wait_until_applied(self) -> None:
        """The script has failed: keep the links until what this worker has sent is in a version, or the job is over.

        The step whose gradients are on their way can be its last whole one.
        """
        shell = self._shell
        with suppress(RallypointError), self._locked.changed:
            self._locked.wait(
                lambda: shell.over or not unapplied(shell.machine),
                lambda: f"version {shell.machine.step + 1} to be made of the gradients that it has sent",
            )


class Reaching:
    """Says which version this worker holds, when a view asks for it: `core.worker.ending.Reaching`.

    `to` is called with the generation and the version, on any thread.
    """

    def __init__(self, locked: LockedShell) -> None:
        self._locked = locked
        self.to: Callable[[ViewNumber, int], None] = lambda generation, version: None

    def say(self, *, again: bool = False) -> None:
        """Say it if there is something to say; `again`: also if it was said already. Takes the lock."""
        with self._locked.changed:
            if again:
                self._locked.shell.reaching.again()
            said = self._locked.shell.reaching.take()
        if said is not None:
            self.to(*said)
