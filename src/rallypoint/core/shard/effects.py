"""The effects of a shard's machine: what to do with payloads and parameters, and what to send to whom."""

from __future__ import annotations

import msgspec

from rallypoint.core.shard.events import Chosen, Ticket


class InstallFirst(msgspec.Struct, frozen=True):
    """Make the ticket's payload the shard's first version."""

    ticket: Ticket
    version: int = 0


class Take(msgspec.Struct, frozen=True):
    """Keep the ticket's payload as a part of the sum (on a backup: the payload is the finished gradient).

    It is the sum of `count` replicas, the first of which is `at`. One replica's payload is multiplied by `weight`; a
    larger block is weighted already. `early`: see OnTime. With `base`, first apply delay compensation for the updates
    after that version.
    """

    ticket: Ticket
    weight: float
    base: int | None = None
    at: int = 0
    count: int = 1
    early: bool = False


class Merge(msgspec.Struct, frozen=True):
    """Add the part that begins at replica `right` to the one that begins at `left`: they are siblings in the tree."""

    left: int
    right: int


class Discard(msgspec.Struct, frozen=True):
    """Drop the part of the sum that begins at replica `at`: a larger block has its replicas."""

    at: int


class OnTime(msgspec.Struct, frozen=True):
    """The part that begins at replica `at` is not early any more.

    A part is early while a lower replica is missing. Only so many bytes of early parts are taken without slowing down
    their senders.
    """

    at: int


class Add(msgspec.Struct, frozen=True):
    """Add the ticket's payload times `weight` to the sum. `base`: see Take."""

    ticket: Ticket
    weight: float
    base: int | None = None


class Hold(msgspec.Struct, frozen=True):
    """Keep the ticket's payload for later. `credit`: its sender may send on, whatever is held already."""

    ticket: Ticket
    credit: bool = False


class Drop(msgspec.Struct, frozen=True):
    """The ticket's payload is not needed. `fault` is the sender's error as a sentence; empty for a harmless repeat."""

    ticket: Ticket
    fault: str = ""


class Abandon(msgspec.Struct, frozen=True):
    """Discard the sum in progress, if there is one."""


class Finish(msgspec.Struct, frozen=True):
    """The sum of `step` is complete: divide it by `total_weight`. With `measure`, look at it: a decision is awaited.

    `not_finite` are the replicas whose loss was not finite; `gradients` those whose contribution was not finite.
    """

    step: int
    total_weight: float
    measure: bool
    not_finite: tuple[int, ...] = ()
    replicas: int = 0  # how many are in the sum
    gradients: tuple[int, ...] = ()


class Apply(msgspec.Struct, frozen=True):
    """Apply the finished mean gradient, times `scale`; the result is `version`. None: leave the parameters unchanged.

    `step` is the position in the learning-rate schedule; `rate` multiplies the schedule's rate. Keep the wire copies
    from version `oldest` on, and that of `pinned`. With `replicate`, also send the scaled gradient, as `replica`'s, to
    `copies`: the backup (False), the third server (True). One that is filled by a later effect gets it with that. The
    schedule's rate is reduced `reductions` times (`ReduceOnPlateau`).
    """

    version: int
    step: int
    scale: float | None
    oldest: int
    rate: float = 1.0
    replica: int = 0
    replicate: bool = False
    copies: tuple[bool, ...] = ()
    pinned: int = -1
    reductions: int = 0


class Reply(msgspec.Struct, frozen=True):
    """Send `version` to a follower: the parameters for `replica`'s step `clock`.

    `last`: it is the job's last version, and nothing follows.
    """

    follower: str
    replica: int
    clock: int
    version: int
    last: bool = False


class TellWait(msgspec.Struct, frozen=True):
    """Tell a follower that `replica`'s step `clock` has to wait.

    The follower may have another replica that is further behind and can be computed now.
    """

    follower: str
    replica: int
    clock: int


class Gather(msgspec.Struct, frozen=True):
    """The sum may be applied now, but can still take queued contributions. Send Fold when none are queued."""


class Publish(msgspec.Struct, frozen=True):
    """Send version `version` to every follower."""

    version: int


class Fill(msgspec.Struct, frozen=True):
    """Send the whole state, at `version`, to the backup (or to the third server)."""

    version: int
    incoming: bool = False
    clocks: tuple[int, ...] = ()


class Prove(msgspec.Struct, frozen=True):
    """Ask the backup whether it holds the state at `version` already: whether its digest is the same."""

    version: int


class Acknowledge(msgspec.Struct, frozen=True):
    """Tell the primary that this backup has `version`; with `chosen`, also the choice of contributions to the next one.

    `differs`: it was asked whether it has it, and does not.
    """

    version: int
    chosen: bool = False
    differs: bool = False


class BackupCaughtUp(msgspec.Struct, frozen=True):
    """Report that the backup (or the third server) has all published versions and will have each later one first: it
    may be promoted."""

    incoming: bool = False


class CaptureShard(msgspec.Struct, frozen=True):
    """Keep the state for the snapshot, as it is now at `version`; with its clocks, which go on before it is copied.

    With `missed` it is too late: the shard has passed the wanted version and is at `version`.
    """

    version: int
    missed: bool = False
    clocks: tuple[int, ...] = ()


class Accepted(msgspec.Struct, frozen=True):
    """An audited contribution is accepted: `agreed` have sent these bytes, `lost` have sent others."""

    step: int
    replica: int
    agreed: tuple[str, ...]
    lost: tuple[str, ...] = ()


class Disputed(msgspec.Struct, frozen=True):
    """The workers `heard` have sent different bytes for an audited contribution: it waits for another opinion."""

    step: int
    replica: int
    heard: tuple[str, ...]


Effect = (
    InstallFirst | Take | Merge | Discard | OnTime | Add | Hold | Drop | Abandon | Finish | Apply | Publish | Reply
    | TellWait | Gather | Chosen | Fill | Prove | Acknowledge | BackupCaughtUp | CaptureShard | Accepted | Disputed
)  # fmt: skip
