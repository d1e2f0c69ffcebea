"""The events of a shard's machine: from workers, from its backup or primary, from views, for snapshots."""

from __future__ import annotations

import msgspec

from rallypoint.core.sums import Block

Ticket = int  # names a payload; the shell maps it to a buffer
EVERYTHING = -1  # in place of a replica: the follower wants the last version of the job


class Initialise(msgspec.Struct, frozen=True):
    """The first worker uploads the shard's first version, from which all workers start."""

    ticket: Ticket
    version: int = 0


class Contribute(msgspec.Struct, frozen=True):
    """A contribution arrived, named by (shard, step, block): the sum of `count` replicas, the first of which is
    `replica`.

    `weight` is its weight in the mean. `finite` is False if the loss of one of its replicas was not finite, or if its
    values are not (then `whole` is False). `bad` names these replicas, where more than one contributed and they are
    known. `base` is the version that it was computed from. If it is audited, `digest` is that of its payload, which
    came from the worker `sender`.
    """

    step: int
    replica: int
    weight: float
    ticket: Ticket
    finite: bool = True
    base: int = 0
    whole: bool = True
    count: int = 1
    bad: tuple[int, ...] = ()
    sender: str = ""
    digest: bytes = b""

    @property
    def block(self) -> Block:
        """The replicas that it is the sum of."""
        return Block(self.replica, self.replica + self.count)


class Want(msgspec.Struct, frozen=True):
    """A follower wants the parameters for `replica`'s next step, or (EVERYTHING) the last version of the job.

    It replaces the follower's earlier Want.
    """

    follower: str
    replica: int


class Unfollowed(msgspec.Struct, frozen=True):
    """A follower disconnected."""

    follower: str


class Fold(msgspec.Struct, frozen=True):
    """No more contributions are queued: apply the sum in progress."""


class Decide(msgspec.Struct, frozen=True):
    """The decision of all servers on this step: apply with the gradient scaled by `scale`, or skip (None)."""

    step: int
    scale: float | None


class Loaded(msgspec.Struct, frozen=True):
    """The shard's whole state at `version` is loaded: on a primary from a snapshot, on a backup from the primary."""

    version: int
    clocks: tuple[int, ...] = ()


class Replicated(msgspec.Struct, frozen=True):
    """The primary's update of version `step` arrived: the finished, scaled gradient; with `skip`, nothing changes.

    Under a streaming policy it was `replica`'s contribution, applied at `rate` times the learning rate.
    """

    step: int
    skip: bool
    ticket: Ticket
    replica: int = 0
    rate: float = 1.0


class Chosen(msgspec.Struct, frozen=True):
    """The primary tells who has a copy which contributions are in the finished sum of `step`, in the order of adding.
    (It is an effect there, and an event here.)"""

    step: int
    replicas: tuple[int, ...]


class Acked(msgspec.Struct, frozen=True):
    """The backup acknowledged `version`; with `chosen`, also the choice of contributions that make the next one.

    `incoming`: not the backup but the third server did, which is filled beside it (`View.incoming`). `differs`: it was
    asked whether it has that version, and does not: it has to be filled.
    """

    version: int
    chosen: bool = False
    incoming: bool = False
    differs: bool = False


class Compared(msgspec.Struct, frozen=True):
    """The primary asked whether this backup holds its state at `version`: the digests were the `same`, or not."""

    version: int
    same: bool


class Assigned(msgspec.Struct, frozen=True):
    """A new view says whether this server is the shard's primary and whether there is a backup.

    `fresh` is True if that backup is new and has no state yet. `proven`: it, or this server if it is the backup, holds
    all that was published (`View.proven`). `arrived`: it was the third server until now. `incoming`: there is a third
    server; `incoming_fresh`: it is new.
    """

    primary: bool
    backup: bool
    fresh: bool
    proven: bool = False
    arrived: bool = False
    incoming: bool = False
    incoming_fresh: bool = False


class FillBackup(msgspec.Struct, frozen=True):
    """Send the backup (or the third server) the whole state now. Only a few are filled at once."""

    incoming: bool = False


class CaptureAt(msgspec.Struct, frozen=True):
    """A snapshot needs the shard's state at `version`; with `any_version`, as it is now."""

    version: int
    any_version: bool = False


Event = (
    Initialise | Contribute | Want | Unfollowed | Fold | Decide | Loaded | Replicated | Chosen | Acked | Assigned
    | Compared | FillBackup | CaptureAt
)  # fmt: skip
