"""Effects of a shard's machine: what is to be done to payloads and parameters, and who is to be told or sent what."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.shard.events import Ticket


@dataclass(frozen=True, slots=True)
class Install:
    """The ticket's payload becomes the version that all begin with."""

    ticket: Ticket
    version: int = 0


@dataclass(frozen=True, slots=True)
class Take:
    """The ticket's payload, times `weight`, becomes the sum (a backup's: the finished gradient).

    With `base` it is first compensated for the updates since that version.
    """

    ticket: Ticket
    weight: float
    base: int | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """The ticket's payload, times `weight`, is added to the sum; `base`: see Take."""

    ticket: Ticket
    weight: float
    base: int | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """The ticket waits for its turn."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Drop:
    """The ticket's payload is not needed; `fault` says why if the sender is at fault, else it is a harmless repeat."""

    ticket: Ticket
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Forget the sum in progress, if there is one."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The sum of `step` is complete: divide by `total_weight`. Measure it if a decision is awaited."""

    step: int
    total_weight: float
    measure: bool
    not_finite: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the finished mean gradient, scaled, which makes `version`; with None leave the parameters as they are.

    `step` is the place in the learning-rate schedule, `rate` multiplies what stands there. Wire copies from version
    `oldest` on are kept. With `replicate` the scaled gradient goes to the backup too, as `replica`'s.
    """

    version: int
    step: int
    scale: float | None
    oldest: int
    rate: float = 1.0
    replica: int = 0
    replicate: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Send `version` to a follower, as the parameters for `replica`'s step `clock`; `last`: nothing will follow."""

    follower: str
    replica: int
    clock: int
    version: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Tell a follower that it has to wait for `replica`'s step `clock`: perhaps it has one that is further behind."""

    follower: str
    replica: int
    clock: int


@dataclass(frozen=True, slots=True)
class Gather:
    """The sum may be applied, but would take more of what has queued up: Fold when nothing has."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Version `version` may be seen by everybody who follows."""

    version: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Send the whole state, at `version`, to the backup."""

    version: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the primary that `version` is held here."""

    version: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The backup holds all that has been published, and will before anything else is: it may be promoted."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Keep the state as it is now, at `version`, for the snapshot; or, with `missed`, it is too late: `version` now."""

    version: int
    missed: bool = False


Effect = (
    Install | Take | Add | Hold | Drop | Abandon | Finish | Apply | Publish | Reply | Wait | Gather | Fill
    | Acknowledge | CaughtUp | Capture
)  # fmt: skip
