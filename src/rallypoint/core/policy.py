"""When a server applies contributions: the only place where modes differ on a server."""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec


class Verdict(enum.Enum):
    """What becomes of a contribution that has just arrived."""

    ADD = "add"
    HOLD = "hold"
    DROP = "drop"
    REJECT = "reject"


class Ledger(Protocol):
    """What a policy may know about a shard."""

    @property
    def version(self) -> int:
        """Updates applied so far; in Sync mode also the step in progress."""

    @property
    def expected(self) -> int:
        """Contributions that a step has: R for parameters, 1 for buffers."""

    @property
    def added(self) -> int:
        """Contributions of the step in progress that are in the sum: replicas 0..added-1."""

    def knows(self, replica: int) -> bool:
        """Has this replica's contribution to the step in progress arrived already?"""


class Policy(Protocol):
    """A way to synchronise."""

    def admit(self, ledger: Ledger, step: int, replica: int) -> Verdict:
        """What to do with replica `replica`'s contribution to step `step`."""

    def complete(self, ledger: Ledger) -> bool:
        """May the update of the step in progress be applied?"""


class Sync(msgspec.Struct, frozen=True, tag="sync", forbid_unknown_fields=True):
    """Every step has all R contributions, summed in replica order 0..R-1 (I1, I3).

    A contribution to a step that is over is a repeat and is dropped (I2). One to a step that has not begun is not for
    us: nobody can compute step t+1 before having every shard at t+1, so it is for a primary that has replaced us.
    """

    def admit(self, ledger: Ledger, step: int, replica: int) -> Verdict:
        if replica >= ledger.expected or step > ledger.version:
            return Verdict.REJECT
        if step < ledger.version or ledger.knows(replica):
            return Verdict.DROP
        return Verdict.ADD if replica == ledger.added else Verdict.HOLD

    def complete(self, ledger: Ledger) -> bool:
        return ledger.added == ledger.expected
