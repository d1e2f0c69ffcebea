"""Events of a shard's machine: contributions and wishes, words of its backup or its primary, views, snapshots."""

from __future__ import annotations

from dataclasses import dataclass

Ticket = int  # names a payload; the shell maps it to a buffer
EVERYTHING = -1  # wanted: no replica's next step, but the end of the job


@dataclass(frozen=True, slots=True)
class Initialise:
    """The first worker brings the version that all begin with."""

    ticket: Ticket
    version: int = 0


@dataclass(frozen=True, slots=True)
class Contribute:
    """A contribution arrived: named by (shard, step, replica), weighted, perhaps known to be not finite; computed from
    version `base`."""

    step: int
    replica: int
    weight: float
    ticket: Ticket
    finite: bool = True
    base: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """A follower wants the parameters for `replica`'s next step, or (EVERYTHING) those at the end of the job.

    What it wanted before it wants no more.
    """

    follower: str
    replica: int


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """A follower is gone."""

    follower: str


@dataclass(frozen=True, slots=True)
class Fold:
    """Nothing more has queued up: apply what is in the sum."""


@dataclass(frozen=True, slots=True)
class Decide:
    """All servers know this step's norms and flags: apply with the gradient scaled by `scale`, or skip (None)."""

    step: int
    scale: float | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The whole state at `version` is in place: from a snapshot (a primary), or from the primary (a backup)."""

    version: int
    clocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Replicated:
    """The primary's update of version `step` came: the finished gradient, scaled; or nothing is to change (`skip`).

    Under a streaming policy it was `replica`'s contribution, at `rate` times the learning rate.
    """

    step: int
    skip: bool
    ticket: Ticket
    replica: int = 0
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Acked:
    """The backup holds `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """A new view: who we are to this shard. `fresh` says that the backup, if there is one, holds nothing yet."""

    primary: bool
    backup: bool
    fresh: bool


@dataclass(frozen=True, slots=True)
class FillBackup:
    """The backup's turn to get the whole state has come."""


@dataclass(frozen=True, slots=True)
class CaptureAt:
    """A snapshot is wanted of version `version`."""

    version: int


Event = (
    Initialise | Contribute | Want | Unfollowed | Fold | Decide | Loaded | Replicated | Acked | Assigned | FillBackup
    | CaptureAt
)  # fmt: skip
