"""What an aggregator's machine takes (`BlockContribution`), and what it wants done (effects).

A *part* is a block of the sum of (shard, step) that the aggregator keeps; `at` is its first replica. A payload that
arrives is named by its `ticket`; each ticket goes out once, in `Keep` or `DropPayload`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.sums import Block


@dataclass(frozen=True, slots=True)
class BlockContribution:
    """A block of replicas' contribution to a shard's step. A block of one replica is not weighted yet.

    Attributes:
        losses, gradients: the replicas in it whose loss, or only whose gradient, is not finite, as far as known.
    """

    shard: int
    step: int
    block: Block
    weight: float
    ticket: int
    losses: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Keep:
    """The payload becomes a part."""

    shard: int
    step: int
    at: int
    ticket: int


@dataclass(frozen=True, slots=True)
class DropPayload:
    """The payload is not needed. `fault`: end the sender's connection with this sentence. No honest worker sends it, or
    this aggregator is far behind: then the worker sends the step in progress again, to the servers."""

    ticket: int
    fault: str = ""


@dataclass(frozen=True, slots=True)
class MergeParts:
    """Add part `right` to part `left`, each times its factor first (a leaf's weight; 1.0 for what is weighted)."""

    shard: int
    step: int
    left: int
    right: int
    left_factor: float
    right_factor: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Release a part."""

    shard: int
    step: int
    at: int


@dataclass(frozen=True, slots=True)
class PushPart:
    """Send a part to the shard's primary. It is kept: it may have to be sent again."""

    shard: int
    step: int
    block: Block
    weight: float
    server: str
    losses: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KeepVersion:
    """Keep the version that has arrived."""

    shard: int
    version: int
    ticket: int


@dataclass(frozen=True, slots=True)
class GiveVersion:
    """Send a kept version to a worker. `asked`: it needs this very version."""

    worker: str
    shard: int
    version: int
    asked: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseVersion:
    """Release a kept version."""

    shard: int
    version: int


@dataclass(frozen=True, slots=True)
class FollowServer:
    """Ask a server for the newest version of each of its shards, and each later one."""

    server: str


@dataclass(frozen=True, slots=True)
class FetchVersion:
    """Ask a shard's primary for one version."""

    shard: int
    version: int
    server: str


@dataclass(frozen=True, slots=True)
class DismissWorkers:
    """End the connections of these workers: they are to use the servers. `why` is a sentence for them."""

    workers: tuple[str, ...]
    why: str


Effect = (
    Keep | DropPayload | MergeParts | Forget | PushPart | KeepVersion | GiveVersion | ReleaseVersion | FollowServer
    | FetchVersion | DismissWorkers
)  # fmt: skip
