"""Workers' requests for rows of tables, or words of shards, at a version: which can be answered, with what version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_WAITING = 1 << 12  # of one link and shard
L = TypeVar("L")
W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Request(Generic[L, W]):
    """A worker asks on `link` for `what` of a shard, at `version`; with `newest` any newer version will do, too.

    It replaces the request of the same link, shard and `place` that still waits.
    """

    link: L
    version: int
    newest: bool
    what: W
    place: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Requests(Generic[L, W]):
    """The requests that wait, by shard: one of each link and place. They may be for a version that does not exist yet.

    Owner thread only.
    """

    _waiting: dict[int, list[Request[L, W]]] = field(default_factory=dict)

    @property
    def shards(self) -> list[int]:
        """The shards for which a request waits."""
        return list(self._waiting)

    def add(self, shard: int, request: Request[L, W]) -> None:
        """A worker asks. It has one pull of a place at a time, so this request replaces its earlier one.

        At most MOST_WAITING of one link wait: the oldest are dropped.
        """
        waiting = self._waiting.get(shard, [])
        others = [one for one in waiting if one.link is not request.link or one.place != request.place]
        if len(others) >= MOST_WAITING:
            own = [one for one in others if one.link is request.link]
            others = [one for one in others if len(own) < MOST_WAITING or one is not own[0]]
        self._waiting[shard] = [*others, request]

    def gone(self, link: L) -> None:
        """The link is closed: drop its requests."""
        for shard, requests in list(self._waiting.items()):
            self._keep(shard, (request for request in requests if request.link is not link))

    def refuse(self, shard: int) -> None:
        """Drop the shard's requests: this server is not its primary, and the workers will ask another server."""
        del self._waiting[shard]

    def answered(
        self, shard: int, published: int, keeps: Callable[[int], bool]
    ) -> list[tuple[Request[L, W], int | None]]:
        """Take out the requests that can be answered now, each with the version to answer with.

        None in place of a version: the one that was asked for is not kept any more. `published` is the newest version
        that workers may see (-1: none); `keeps` tells whether the rows of a version can still be had.
        """
        answers: list[tuple[Request[L, W], int | None]] = []
        waiting: list[Request[L, W]] = []
        for request in self._waiting.get(shard, []):
            if request.version <= published and keeps(request.version):
                answers.append((request, request.version))
            elif published < 0 or (request.version > published and not request.newest):
                waiting.append(request)
            else:
                answers.append((request, published if request.newest else None))
        self._keep(shard, waiting)
        return answers

    def _keep(self, shard: int, requests: Iterable[Request[L, W]]) -> None:
        self._waiting[shard] = list(requests)
        if not self._waiting[shard]:
            del self._waiting[shard]
