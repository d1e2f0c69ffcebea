"""What stands between a server's machine and its links, without any of them: who follows, who asks, who is whose peer.

`server/reducer/` runs it over TCP channels, `testing/simulation/server.py` over simulated wires. It decides what of
all that arrives may reach the machine. What comes out are the machine's effects, in order; whom they are for is asked
here: `followers`, `workers`, `peers`, `backup_link`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events
from rallypoint.core.shard.clip import Measure, Verdict
from rallypoint.core.shard.links import Fence
from rallypoint.core.shard.server import Effect, On, ServerMachine
from rallypoint.core.view import Member, View, ViewNumber


class Link(Protocol):
    """A connection. Of two from the same worker the one with the higher `number` counts: it was accepted later."""

    @property
    def number(self) -> int: ...


L = TypeVar("L", bound=Link)


@dataclass(frozen=True, slots=True)
class Answer(Generic[L]):
    """Acknowledge `version` on the link on which it came."""

    link: L
    shard: int
    version: int


@dataclass(slots=True)
class ServerShell(Generic[L]):
    """One server in one job.

    Attributes:
        followers: links that get every version.
        workers: each worker's newest link.
        peers: the links that stand to other servers of the view, by server.
    """

    machine: ServerMachine
    fence: Fence = field(default_factory=Fence)
    followers: list[L] = field(default_factory=list)
    workers: dict[str, L] = field(default_factory=dict)
    peers: dict[str, L] = field(default_factory=dict)
    _filled_under: dict[int, ViewNumber] = field(default_factory=dict)

    # ---- the coordinator ----

    def adopt(self, view: View) -> Sequence[Effect]:
        """A new view; nothing if it is not newer."""
        before = self.machine.view
        if not self.fence.adopt(view):
            return []
        stayed = {member.id for member in view.servers if before is not None and member in before.servers}
        self.peers = {id: link for id, link in self.peers.items() if id in stayed}
        return self.machine.adopt(view)

    def say_again(self, *, new: bool) -> Mapping[int, ViewNumber]:
        """A coordinator let this server in: the shards whose backup is caught up, which it may have forgotten.

        To a coordinator that sees a `new` member nothing is repeated: what was held before does not count.
        """
        return {} if new else self.machine.caught_up

    # ---- workers ----

    def linked(self, link: L, worker: str) -> bool:
        """A worker connected (again); False if this is an older link than the one that is known.

        Both may have waited for the same view, and be told of it in any order.
        """
        if (other := self.workers.get(worker)) is not None and other.number >= link.number:
            return False
        self.workers[worker] = link
        return True

    def gone(self, link: L, worker: str) -> Sequence[Effect]:
        """The link is closed."""
        self.unfollow(link)
        if not self.is_current(link, worker):
            return []
        del self.workers[worker]
        return self.machine.unfollowed(worker)

    def is_current(self, link: L, worker: str) -> bool:
        """Is it the worker's newest link? What an older one still brings of wants does not count."""
        return self.workers.get(worker) is link

    def follow(self, link: L) -> list[tuple[int, int]]:
        """Every version from now on goes there; first these: (shard, version)."""
        if link not in self.followers:
            self.followers.append(link)
        primaries = ((index, self.machine.machine(index)) for index in self.machine.held)
        return [(i, m.published) for i, m in primaries if m is not None and m.primary and m.published >= 0]

    def unfollow(self, link: L) -> None:
        """The link wants no more versions."""
        if link in self.followers:
            self.followers.remove(link)

    def may_see(self, shard: int, version: int) -> bool:
        """Is that version of a shard held here published?"""
        machine = self.machine.machine(shard)
        return machine is not None and version <= machine.published

    def is_last(self, shard: int, version: int) -> bool:
        """Is it the shard's version at the end of the job?"""
        return version >= self.machine.plan.rounds_of(shard)

    def takes(self, shard: int, number: ViewNumber) -> bool:
        """Does what was sent for the shard under view `number` count here?

        If not, its sender has an older view, and will send it again where it belongs.
        """
        return self.machine.is_primary(shard) and not self.fence.is_stale(number)

    def want(self, link: L, worker: str, shard: int, replica: int) -> Sequence[Effect]:
        """A worker wants the parameters for a replica's next step."""
        if not (self.is_current(link, worker) and self.machine.is_primary(shard)):
            return []
        return self.machine.handle(shard, events.Want(worker, replica))

    # ---- other servers ----

    def peer_linked(self, peer: Member, link: L) -> Sequence[Effect]:
        """The link to another server stands. Does nothing if the view has that server in another incarnation by now:
        this link has been closed then, and nobody would report its loss."""
        if self.machine.view is None or peer not in self.machine.view.servers:
            return []
        self.peers[peer.id] = link
        return self.machine.peer_linked(peer.id)

    def peer_lost(self, peer: str, link: L) -> Sequence[Effect]:
        """The link to another server is gone."""
        if self.peers.get(peer) is not link:
            return []
        del self.peers[peer]
        return self.machine.peer_lost(peer)

    def backup_link(self, shard: int) -> L:
        """The link to the shard's backup."""
        assert self.machine.view is not None
        return self.peers[self.machine.view.backup[shard]]

    def fill(self, shard: int) -> L:
        """The shard's whole state goes out now, on this link: acknowledgements of earlier ones do not count."""
        self._filled_under[shard] = self.fence.number
        return self.backup_link(shard)

    def takes_from(self, shard: int, sender: str, number: ViewNumber) -> bool:
        """Does what `sender` says of the shard under view `number` count, to this backup of it?"""
        return not self.fence.is_stale(number) and self.machine.takes_from(shard, sender)

    def replicated(
        self, link: L, shard: int, event: events.Replicated | events.Loaded
    ) -> Sequence[Effect | Answer[L]]:
        """A primary's update or state, which `takes_from` has let pass; it is acknowledged on its link."""
        effects: list[Effect | Answer[L]] = []
        for effect in self.machine.handle(shard, event):
            match effect:
                case On(effect=shard_effects.Acknowledge(version=version)):
                    effects.append(Answer(link, shard, version))
                case _:
                    effects.append(effect)
        return effects

    def acked(self, peer: str, link: L, shard: int, version: int, number: ViewNumber) -> Sequence[Effect]:
        """A backup holds a version. What it said under an older view may be of a state that it let go of since."""
        view = self.machine.view
        current = self.peers.get(peer) is link and view is not None and view.backup.get(shard) == peer
        newest_state = self._filled_under.get(shard, self.fence.number)
        if not current or not self.machine.is_primary(shard) or number < newest_state:
            return []
        return self.machine.handle(shard, events.Acked(version))

    def told(self, step: int, measures: Iterable[Measure], number: ViewNumber) -> Sequence[Effect]:
        """Another server's measures."""
        return [] if self.fence.is_stale(number) else self.machine.told(step, measures)

    def decided(self, verdict: Verdict) -> Sequence[Effect]:
        """A verdict that was put behind the effects which brought it."""
        return self.machine.decided(verdict)

    # ---- a snapshot ----

    def restored(self, shard: int, generation: ViewNumber, event: events.Loaded) -> Sequence[Effect]:
        """The shard came from a snapshot, for that generation. `wants_state` has let it pass."""
        assert self.wants_state(shard, generation)
        return self.machine.handle(shard, event)

    def wants_state(self, shard: int, generation: ViewNumber) -> bool:
        """Does the shard still begin with what is read from the snapshot of that generation?"""
        machine = self.machine.machine(shard)
        return self.fence.generation == generation and machine is not None and machine.primary and machine.version < 0
