"""The bookkeeping between a server's machine and its links, without any input or output.

It knows who follows, who asks, and which link leads to which server, and it decides which incoming frames reach the
machine. `server/reducer.py` runs it, in the simulation too. Its methods return the machine's effects, in order. To find
an effect's receiver, ask `followers`, `workers` or `peers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events
from rallypoint.core.shard.clip import Measure
from rallypoint.core.shard.machine import Digest, Proofs
from rallypoint.core.shard.server import Effect, On, ServerMachine, TellDisproved
from rallypoint.core.view import Member, View, ViewNumber

_NONE = ViewNumber()


@dataclass(slots=True)
class Fence:
    """The number of the newest known view, which decides about frames (I10).

    A frame of a newer view waits for that view. A frame of an older generation is stale and is dropped.

    Example: at view 1.7 with generation 1.5, a frame of 1.8 waits, one of 1.6 counts, one of 1.4 is dropped.
    """

    number: ViewNumber = _NONE
    generation: ViewNumber = _NONE
    known: bool = False

    def adopt(self, view: View) -> bool:
        """Adopt a view. Returns False if it is not newer than the known one."""
        if self.known and view.number <= self.number:
            return False
        self.generation = view.generation  # before `number`: another thread that reads the new number reads this too
        self.number = view.number
        self.known = True
        return True

    def has_come(self, number: ViewNumber) -> bool:
        """Is the view of that number, or a newer one, known here?"""
        return self.known and number <= self.number

    def is_stale(self, number: ViewNumber) -> bool:
        """Does this view number belong to an older generation?"""
        return number < self.generation


class Link(Protocol):
    """A connection. Of two links from the same worker, the one with the higher `number` is newer and counts."""

    @property
    def number(self) -> int: ...


L = TypeVar("L", bound=Link)


@dataclass(frozen=True, slots=True)
class Answer(Generic[L]):
    """Acknowledge `version` on the link on which the update came; with `chosen`, also the choice of contributions.

    `differs`: say that this version is not held here.
    """

    link: L
    shard: int
    version: int
    chosen: bool = False
    differs: bool = False


def applied_in(machine: ServerMachine, shards: Iterable[int] | None = None) -> int:
    """Return the last round that the versions of these shards here (None: of all) prove to be applied; -1: none.

    A round counts as applied when its witness is (`Cadence.witness`). A server whose entries have not arrived, and one
    that has got the shard from another, knows it by this.
    """
    cadence, rounds = machine.plan.cadence, [-1]
    for index in machine.held if shards is None else shards:
        held = machine.machine(index)
        if held is not None and held.version > 0:
            round = cadence.round_of(index, held.version - 1)
            rounds += [round] if cadence.witness(round) == index else []
    return max(rounds)


@dataclass(slots=True)
class ServerShell(Generic[L]):
    """One server in one job. Not thread-safe: only the owner thread calls it.

    Attributes:
        followers: links that get every version.
        workers: each worker's newest link.
        peers: the links to other servers of the view that are up, by server.
    """

    machine: ServerMachine
    fence: Fence = field(default_factory=Fence)
    followers: list[L] = field(default_factory=list)
    workers: dict[str, L] = field(default_factory=dict)
    peers: dict[str, L] = field(default_factory=dict)
    _filled_under: dict[tuple[int, str], ViewNumber] = field(default_factory=dict)  # shard and server
    _proofs: Proofs = field(default_factory=Proofs)

    # ---- the coordinator ----

    def adopt(self, view: View) -> Sequence[Effect]:
        """Adopt a new view. Returns nothing if it is not newer."""
        before = self.machine.view
        if not self.fence.adopt(view):
            return []
        stayed = {member.id for member in view.servers if before is not None and member in before.servers}
        self.peers = {id: link for id, link in self.peers.items() if id in stayed}
        self._filled_under = {copy: number for copy, number in self._filled_under.items() if copy[1] in stayed}
        self._proofs.keep(stayed)
        return self.machine.adopt(view)

    def say_again(self, *, new: bool) -> list[Mapping[int, ViewNumber]]:
        """The coordinator admitted this server: returns the shards whose backup is caught up, and those whose third
        server is, to report them again.

        A coordinator that was restarted may not know them. Returns nothing if this server is `new` to it: then what the
        server held before does not count.
        """
        return [] if new else [known for known in (self.machine.caught_up, self.machine.arrived) if known]

    # ---- workers ----

    def linked(self, link: L, worker: str) -> Sequence[Effect] | None:
        """A worker connected (again). Returns None, and ignores the link, if a newer one from this worker is known.

        Two connections of one worker can wait for the same view and be reported in either order. The older link counts
        as gone from now on: one whose other end has vanished may be reported much later.
        """
        other = self.workers.get(worker)
        if other is not None and other.number >= link.number:
            return None
        effects = [] if other is None else self.gone(other, worker)
        self.workers[worker] = link
        return effects

    def gone(self, link: L, worker: str) -> Sequence[Effect]:
        self.unfollow(link)
        if not self.is_current(link, worker):
            return []
        del self.workers[worker]
        return self.machine.unfollowed(worker)

    def is_current(self, link: L, worker: str) -> bool:
        """Is it the worker's newest link? Wants from an older link are ignored."""
        return self.workers.get(worker) is link

    def follow(self, link: L) -> list[tuple[int, int]]:
        """Send every later version on this link. Returns the versions to send now, as (shard, version) pairs."""
        if link not in self.followers:
            self.followers.append(link)
        primaries = ((index, self.machine.machine(index)) for index in self.machine.held)
        return [(i, m.published) for i, m in primaries if m is not None and m.primary and m.published >= 0]

    def unfollow(self, link: L) -> None:
        """Send no more versions on this link."""
        if link in self.followers:
            self.followers.remove(link)

    def may_see(self, shard: int, version: int) -> bool:
        """Does this server hold the shard, and is that version published?"""
        machine = self.machine.machine(shard)
        return machine is not None and version <= machine.published

    def is_last(self, shard: int, version: int) -> bool:
        """Is it the shard's version at the end of the job?"""
        plan, view = self.machine.plan, self.machine.view
        rounds = plan.rounds_of(shard)
        return version >= (rounds if view is None else view.orders.last(rounds))

    def takes(self, shard: int, number: ViewNumber) -> bool:
        """Does a frame for the shard, sent under view `number`, count here?

        If not, the sender has an older view. It will send the frame again to the right server.
        """
        return self.machine.is_primary(shard) and not self.fence.is_stale(number)

    def may_contribute(self, worker: str, first: int, count: int, step: int = -1) -> bool:
        """Does a contribution of these replicas (to `step`), or a codec state, count if it comes from `worker`?

        Every honest one does. A worker that was given up meanwhile counts none of what it sent as delivered.
        """
        view, audits, replicas = self.machine.view, self.machine.plan.audits, range(first, first + count)
        if view is None or view.takes(worker, replicas):
            return view is not None
        return audits is not None and step >= 0 and audits.may_contribute(view, worker, step)

    def may_begin(self, worker: str) -> bool:
        """Is this the worker that uploads the first version of the generation? Keys: any worker; the first one wins.

        Where the generation begins from a snapshot, nobody does: a worker that has just joined may say what a key
        begins with while the server still reads what it is.
        """
        view = self.machine.view
        if view is not None and self.machine.plan.keyed:
            return not view.origin
        return view is not None and view.uploader == worker

    def want(self, link: L, worker: str, shard: int, replica: int) -> Sequence[Effect]:
        """A worker asks for the parameters for a replica's next step."""
        if not (self.is_current(link, worker) and self.machine.is_primary(shard)):
            return []
        return self.machine.handle(shard, events.Want(worker, replica))

    # ---- other servers ----

    def peer_linked(self, peer: Member, link: L) -> Sequence[Effect]:
        """The link to another server is up.

        Ignored if the current view does not have that incarnation of the server. That link is closed already, and no
        event would report its loss.
        """
        if self.machine.view is None or peer not in self.machine.view.servers:
            return []
        self.peers[peer.id] = link
        return self.machine.peer_linked(peer.id)

    def peer_lost(self, peer: str, link: L) -> Sequence[Effect]:
        """The link to another server is lost. Ignored if it is not the current link."""
        if self.peers.get(peer) is not link:
            return []
        del self.peers[peer]
        return self.machine.peer_lost(peer)

    def fill(self, shard: int, server: str, version: int, digest: Digest) -> L:
        """The caller sends the shard's whole state now, on the returned link to that server; or asks it whether it
        holds the state.

        `digest` is that of the state, at `version`. From now on, acknowledgements that were sent under an older view
        are ignored.
        """
        self._filled_under[shard, server] = self.fence.number
        self._proofs.filled(shard, server, version, digest)
        return self.peers[server]

    def replicate(self, shard: int, server: str, version: int, digest: Digest) -> L:
        """The caller sends the update that makes `version` now, on the returned link. `digest` is the version's."""
        self._proofs.sent(shard, server, version, digest)
        return self.peers[server]

    def takes_from(self, shard: int, sender: str, number: ViewNumber) -> bool:
        """Does a frame of `sender` for the shard, sent under view `number`, count at this backup? Not if it was sent
        before the sender became the primary that it is."""
        view = self.machine.view
        began = self.fence.generation if view is None else view.homed.get(shard, view.generation)
        return number >= began and self.machine.takes_from(shard, sender)

    def holds(self, shard: int, version: int) -> bool:
        """Is the shard at that version here?"""
        machine = self.machine.machine(shard)
        return machine is not None and machine.version == version

    def replicated(
        self, link: L, shard: int, event: events.Replicated | events.Loaded | events.Chosen | events.Compared
    ) -> Sequence[Effect | Answer[L]]:
        """A primary's update, state, choice or question arrived. Call `takes_from` first.

        The effects contain an Answer for each acknowledgement, on the link on which the frame came.
        """
        effects: list[Effect | Answer[L]] = []
        for effect in self.machine.handle(shard, event):
            match effect:
                case On(effect=shard_effects.Acknowledge(version=version, chosen=chosen, differs=differs)):
                    effects.append(Answer(link, shard, version, chosen, differs))
                case _:
                    effects.append(effect)
        return effects

    def acked(
        self, peer: str, link: L, shard: int, acked: events.Acked, number: ViewNumber, digest: Digest
    ) -> Sequence[Effect]:
        """A backup acknowledged a version, and proves by its digest that it holds it.

        Ignored if it was sent under an older view than the last `fill`: it may be about a state that the backup has
        released.
        """
        view, machine = self.machine.view, self.machine.machine(shard)
        current = self.peers.get(peer) is link and view is not None and peer in view.holders_of(shard)[1:]
        newest_state = self._filled_under.get((shard, peer), self.fence.number)
        if view is None or machine is None or not current or not machine.primary or number < newest_state:
            return []
        incoming = view.backup.get(shard) != peer
        match self._proofs.check(shard, peer, acked.version, digest):
            case True:
                return self.machine.handle(shard, replace(acked, incoming=True) if incoming else acked)
            case False if machine.copies.of(incoming).asks:
                return self.machine.handle(shard, replace(acked, incoming=incoming, differs=True))
            case False:
                paired = view.incoming[shard].paired if incoming else view.paired[shard]
                return [TellDisproved(shard, acked.version, paired)]
            case None:
                return []

    def told(self, step: int, measures: Iterable[Measure], number: ViewNumber) -> Sequence[Effect]:
        """Another server sent its measures, under view `number`. Ignored if they are stale."""
        return [] if self.fence.is_stale(number) else self.machine.told(step, measures)

    def wants_state(self, shard: int, generation: ViewNumber) -> bool:
        """Is that generation current, and is the shard primary here and still without a state?"""
        machine = self.machine.machine(shard)
        return self.fence.generation == generation and machine is not None and machine.primary and machine.version < 0
