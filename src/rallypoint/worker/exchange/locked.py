"""The worker's shell under its lock: the threads that change it, and those that wait for it to change.

**Which lock guards what, and in which order they are taken** (a thread that holds one may take those below it):

1. `Exchange._adopting`: one view after the other. Held while links end, so never taken by a link's thread.
2. `LockedShell.changed`: the shell with its machine, the failure, and the fields of `RowPulls`, `ReplicatedState` and
   `CodecStates`. Short: nothing is sent or received under it, and no tensor is touched, save for codec states, which
   are taken out of the encoder under it.
3. `Encoder`'s own lock: its scratch memory and the codec states.
4. `ServerLink`'s own lock: its credits, and what waits for them. Then the channel's, for its queue.

Tensors have no lock. The bytes of a slot belong to one thread at a time, and the machine says to which: to the main
thread while the slot is FILLING, to a link's sending thread while it is QUEUED, to a link's receiving thread while it
is LANDING.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.core.worker.slots import Arriving, CodecEffect, Effect, Event, Land, Landed, Sent
from rallypoint.observe.waits import wait_until


class Rewound(BaseException):
    """The micro-batch in progress belongs to an older generation; ``with micro:`` ends here, the loop yields another.

    Not an Exception: no handler of the user's code shall take it for a fault.
    """


class Effects(Protocol):
    """Runs what the shell asks for."""

    def run_locked(self, effect: CodecEffect) -> None:
        """One effect on codec states, under the lock."""

    def run(self, effects: Sequence[Effect]) -> None:
        """Any others, in order, without the lock."""


class LockedShell:
    """The shell of one worker; `effects` runs what it asks for, `say` gets a sentence about a long wait."""

    effects: Effects  # set once, before any link is made

    def __init__(self, shell: WorkerShell, say: Callable[[str], None]) -> None:
        self.shell, self.machine = shell, shell.machine
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self._say = say
        self._claiming = False  # does the main thread wait for room in a slot?

    @property
    def number(self) -> ViewNumber:
        """The number of the view in force."""
        return self.shell.number

    def handle(self, event: Event) -> None:
        """One event for the machine. Takes the lock; runs the effects without it."""
        with self.changed:
            effects = self.machine.handle(event)
            self.changed.notify_all()
        self.effects.run(effects)

    def apply(self, change: Callable[[], list[Effect]]) -> None:
        """Any other change of the shell, with what it entails for codec states. Takes the lock, as `handle`."""
        with self.changed:
            others = self.settle(change())
            self.changed.notify_all()
        self.effects.run(others)

    def settle(self, effects: Sequence[Effect]) -> list[Effect]:
        """Run the effects on codec states; the others, which are to be run without the lock. Needs the lock."""
        others: list[Effect] = []
        for effect in effects:
            if isinstance(effect, CodecEffect):
                self.effects.run_locked(effect)
            else:
                others.append(effect)
        return others

    def set(self, change: Callable[[], None]) -> None:
        """A change without effects, of which whoever waits hears. Takes the lock."""
        with self.changed:
            change()
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Whoever waits, now or later, gets this error."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    # ---- the main thread ----

    def wait(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait until `ready()`, which changes nothing; raises the error of whatever has failed. Needs the lock."""
        wait_until(self.changed, lambda: self.failure is not None or ready(), describe, self._say)
        if self.failure is not None:
            raise self.failure

    def check(self) -> None:
        """Raise Rewound when what is being computed is stale, or the error of whatever has failed."""
        if self.machine.rewound:
            raise Rewound
        if self.failure is not None:
            raise self.failure

    def claim(self, shard: int, describe: Callable[[], str]) -> bool:
        """Wait until the slot has room; False if it need not be written. Rewound as `check`."""
        with self.changed:
            self._claiming = True
            self.wait(lambda: self.machine.rewound or self.machine.may_fill(shard) is not False, describe)
            self._claiming = False
            if self.machine.rewound:
                raise Rewound
            may = bool(self.machine.may_fill(shard))
            if may:
                self.machine.fill(shard)
        return may

    # ---- the links' threads: events that come once or more for every shard wake the main thread only when needed ----

    def sent(self, shard: int, serial: int) -> None:
        """A slot's gradient has left."""
        with self.changed:
            self.machine.handle(Sent(shard, serial))
            if self._claiming:  # else the main thread waits for a version, and would wake for every shard in vain
                self.changed.notify_all()

    def arriving(self, event: Arriving, lands: Callable[[], None]) -> bool:
        """A version begins to come: may it land? Then `lands` is called, under the lock."""
        with self.changed:
            before = self.machine.target
            effects = self.machine.handle(event)
            landing = isinstance(effects[0], Land)
            if landing:
                lands()
            target = self.machine.target  # known again, although nothing has to land: there may be something to do
            if target != before or target > self.machine.step + 1 or self._claiming:
                self.changed.notify_all()
        self.effects.run(effects[1:])
        return landing

    def landed(self, shard: int) -> None:
        """The version is whole."""
        with self.changed:
            effects = self.machine.handle(Landed(shard))
            if self.machine.complete:
                self.changed.notify_all()
        self.effects.run(effects)
