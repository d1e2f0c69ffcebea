"""What has arrived on a store's links goes to the machine, and to who has asked. See `arrivals.Heard`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rallypoint.core import keys as machine
from rallypoint.core.worker.links import LinkTable
from rallypoint.worker.keys.answers import Answers

Change = Callable[[], Sequence[machine.Effect]]


@dataclass(frozen=True, slots=True)
class KeysHeard:
    """Called on the links' threads. `changed` is the exchange's lock; `apply` makes a change under it, and then sends
    what follows; `fail` ends all waits with an error."""

    keys: machine.KeyMachine
    answers: Answers
    table: LinkTable
    changed: threading.Condition
    apply: Callable[[Change], None]
    fail: Callable[[BaseException], None]

    def valued(self, shard: int, contributor: int, clock: int, version: int, data: bytearray) -> None:
        """The answer to a want, with the shard's value (of a part of a table: without any)."""

        def replied() -> list[machine.Effect]:
            counts = clock > self.keys.lines[shard].pushes.get(contributor, clock)
            if counts and shard not in self.keys.tables:
                self.answers.with_push[shard] = version, data
            return self.keys.replied(shard, contributor, clock, version)

        self.apply(replied)

    def answered(self, shard: int, number: int, version: int, data: bytearray | None) -> None:
        """The answer to a pull; None: the version is not kept any more."""

        def answers() -> list[machine.Effect]:
            pushed = bool(self.keys.lines[shard].pushes)
            done, effects = self.keys.answered(shard, number, version, kept=data is not None)
            if data is not None:
                self.answers.came(done, version, data)
                if number == machine.OWN and pushed and shard not in self.keys.tables:
                    self.answers.with_push[shard] = version, data
            return effects

        self.apply(answers)

    def to_wait(self, contributor: int) -> None:
        """The policy makes the contributor wait."""
        self.apply(lambda: self.keys.to_wait(contributor))

    def link_up(self, server: str) -> None:
        """The link is up (again)."""
        self.apply(lambda: self.keys.link_up(server) if self.table.up(server) else [])

    def link_lost(self, server: str) -> None:
        """The link has ended."""

        def lost() -> list[machine.Effect]:
            self.table.lost(server)
            return self.keys.link_lost(server)

        self.apply(lost)

    def fits(self, number: int, nbytes: int) -> bool:
        """Can so many bytes of rows answer the pull with that number?"""
        with self.changed:
            return self.answers.fits(number, nbytes) if number != machine.OWN else not nbytes
