"""The parts of the reducer: each keeps one kind of thing for it. All of them run on the owner's thread."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rallypoint.codec.base import digest_of
from rallypoint.core.layout import Layout
from rallypoint.core.protocol import Accounted, Applied, AuditFound, Message, Updated
from rallypoint.core.shard import clip, events
from rallypoint.core.shard.effects import Accepted, Apply, Disputed, Finish, Reply
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.pulls import Request, Requests
from rallypoint.core.shard.server import Effect
from rallypoint.core.shard.shell import Answer, Fence, ServerShell, applied_in
from rallypoint.core.sums import pieces_of
from rallypoint.core.typed import MOST_NORM
from rallypoint.core.view import ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import NEWEST, SKIP, Header, Kind, wants
from rallypoint.net.pool import Buffer
from rallypoint.net.transport import Limits
from rallypoint.observe.trace import Tracer
from rallypoint.server.held import HeldShard
from rallypoint.server.inbox import ChoiceCame, Event, QuestionCame, StateCame, UpdateCame
from rallypoint.server.rows import Ids, OwnedRows
from rallypoint.server.shard import OwnedShard, StreamedShard
from rallypoint.store.record import ShardRecord, encode_record

# ---- Payloads between their arrival and their use in a sum, and the credits of their senders ----
#
# A machine names a payload by its ticket. A sender has credits for a few payloads (DESIGN.md, incast). It gets a credit
# back when its payload has been used, or is held within the job's limit of held bytes.


@dataclass(slots=True)
class _Arrived:
    shard: int
    channel: Channel
    buffer: Buffer
    nbytes: int
    credited: bool = False
    came: float = 0.0  # when; 0.0: nobody asks


class _Early(msgspec.Struct, frozen=True):
    """A part of a sum that came before its turn: the bytes that count as held, and whose credit is kept back."""

    nbytes: int
    owed: Channel | None


class PayloadTickets:
    """`fence` gives the current view. `limit`: bytes that may be held with their credit returned. `used` hears who has
    sent a payload that is used, and when it came. Owner thread only."""

    def __init__(self, fence: Fence, limit: int, used: Callable[[str, float], None]) -> None:
        self._fence, self._limit, self._used = fence, limit, used
        self._arrived: dict[int, _Arrived] = {}
        self._early: dict[tuple[int, int], _Early] = {}  # (shard, first replica)
        self._last = 0
        self._held_bytes = 0

    def issue(
        self, channel: Channel, header: Header, buffer: Buffer, *, credited: bool = False, came: float = 0.0
    ) -> int:
        """A ticket for a payload. `credited`: its sender needs no credit back (servers do not use credits)."""
        self._last += 1
        self._arrived[self._last] = _Arrived(header.shard, channel, buffer, header.length, credited, came)
        self._held_bytes += header.length if credited else 0
        return self._last

    def nbytes(self, ticket: int) -> int:
        return self._arrived[ticket].nbytes

    def settle(self, ticket: int, *, early: int | None = None) -> Buffer:
        """Take the payload out for its use. The caller must release the buffer.

        `early`: it is a part of a sum that begins at that replica, and lower replicas are missing. Its bytes count as
        held until `on_time`; its sender gets the credit then, or now if the limit allows it.
        """
        arrived = self._arrived.pop(ticket)
        if arrived.credited:
            self._held_bytes -= arrived.nbytes
        if early is not None:
            self._keep_early(arrived, early)
        elif not arrived.credited:
            self.credit(arrived.channel)
        if arrived.came:
            self._used(arrived.channel.name, arrived.came)
        return arrived.buffer

    def _keep_early(self, arrived: _Arrived, at: int) -> None:
        may = arrived.credited or self._held_bytes + arrived.nbytes <= self._limit
        if may and not arrived.credited:
            self.credit(arrived.channel)
        self._early[arrived.shard, at] = _Early(arrived.nbytes if may else 0, None if may else arrived.channel)
        self._held_bytes += arrived.nbytes if may else 0

    def on_time(self, shard: int, at: int) -> None:
        """The part of a sum that begins at replica `at` is not early any more."""
        early = self._early.pop((shard, at))
        self._held_bytes -= early.nbytes
        if early.owed is not None:
            self.credit(early.owed)

    def all_on_time(self, shard: int) -> None:
        """A shard's sum is given up: nothing of it is early."""
        for key in [key for key in self._early if key[0] == shard]:
            self.on_time(*key)

    def hold(self, ticket: int, *, always: bool = False) -> None:
        """The payload has to wait. Returns the sender's credit if the limit of held bytes allows it, or `always`."""
        arrived = self._arrived[ticket]
        if always or self._held_bytes + arrived.nbytes <= self._limit:
            arrived.credited = True
            self._held_bytes += arrived.nbytes
            self.credit(arrived.channel)

    def drop(self, ticket: int, fault: str) -> None:
        """Release a payload that is not needed. With a `fault`, refuse its sender, which ends the connection."""
        arrived = self._arrived[ticket]
        arrived.came = 0.0
        self.settle(ticket).release()
        if fault:
            arrived.channel.refuse(fault)

    def drop_all(self, shard: int) -> None:
        """This server no longer holds the shard: release its payloads."""
        self.all_on_time(shard)
        for ticket in [ticket for ticket, arrived in self._arrived.items() if arrived.shard == shard]:
            self.drop(ticket, "")

    def credit(self, channel: Channel) -> None:
        """Let the sender send one more payload."""
        channel.send(Header(Kind.CREDIT, self._fence.number, replica=1), urgent=True)


# ---- How many contributions each update took, for the coordinator's ledger (I6) and stall report (I8) ----

ENTRIES = 64  # entries kept, to repeat them to a restarted coordinator
_ACCOUNT_EVERY = 32  # updates


class LedgerEntries:
    """Sends entries to the coordinator with `say`. `fence` gives the current generation. Owner thread only."""

    def __init__(self, say: Callable[[Message], None], fence: Fence) -> None:
        self._say, self._fence = say, fence
        self._arrivals: dict[str, float] = {}  # worker -> time of its last contribution to the step in progress
        self._added: dict[int, int] = {}  # replicas in a shard's last finished sum
        self._told: dict[int, int] = {}  # the same at the primary, for shards with their backup here
        self._entries: deque[Applied] = deque(maxlen=ENTRIES)
        self._applied = -1  # the last step that was said to be applied

    def arrived(self, worker: str, at: float) -> None:
        """A contribution to the step that is entered next came from this worker at this time."""
        self._arrivals[worker] = at

    def finished(self, shard: int, replicas: int) -> None:
        self._added[shard] = replicas

    def told(self, shard: int, added: int) -> None:
        """The primary's number of contributions in the update that this backup makes next."""
        self._told[shard] = added

    def added(self, shard: int) -> int:
        return self._added.get(shard, 0)

    def enter(self, shard: int, step: int, *, primary: bool, norm: float | None = None) -> None:
        """Report the shard's update as the step's entry. Primary and backup both report it: one of them may die.

        `norm` is that of the step's mean gradient, if it is known.
        """
        first = min(self._arrivals.values(), default=0.0)
        late = {worker: round(when - first, 4) for worker, when in self._arrivals.items()}
        self._arrivals.clear()
        added = (self._added if primary else self._told).get(shard, 0)
        entry = Applied(step, added, time.time(), late, self._fence.generation, norm)
        self._entries.append(entry)
        self._applied = max(self._applied, step)
        self._say(entry)

    def proves(self, step: int) -> None:
        """The shards here prove that `step` is applied: say so, unless it was said.

        The server that has applied it may be gone, and what it has said of that lost. Else the coordinator would wait
        for that step for ever.
        """
        if step > self._applied:
            self._applied = step
            self._say(Applied(step, 0, 0.0, generation=self._fence.generation))

    def account(self, machine: ShardMachine, step: int, rounds: int) -> None:
        """Report the shard's tally every 32 updates and at the end. For modes that may fold or drop contributions."""
        if machine.slowest >= rounds or step % _ACCOUNT_EVERY == 0:
            tally = machine.tally
            counts = (tally.applied, tally.folded, tally.dropped, tally.repeats)
            self._say(Accounted(*counts, dict(tally.staleness), self._fence.generation))

    def repeat(self) -> None:
        """Send the last entries again: a restarted coordinator may not have them."""
        for entry in self._entries:
            self._say(entry)
        last, self._applied = self._applied, -1
        self.proves(last)

    def rolled_back(self) -> None:
        """A new generation began: forget all counts and entries."""
        self._entries.clear()
        self._applied = -1
        self._arrivals.clear()
        self._added.clear()
        self._told.clear()


# ---- Digests of what a server's shards hold, at every so many versions (`fingerprints=`) ----


class Fingerprints:
    """Sends digests to the coordinator with `say`, at every `every`-th version. Owner thread only.

    Primary and backup both do: one of them may die. `fence` gives the current generation.
    """

    def __init__(self, layout: Layout, every: int, say: Callable[[Message], None], fence: Fence) -> None:
        self._every, self._say, self._fence = every, say, fence
        self._pieces = pieces_of(layout)

    def applied(self, shard: int, version: int, held: HeldShard) -> None:
        """The shard holds this version now."""
        if version % self._every or not isinstance(held, OwnedShard | OwnedRows):
            return
        if pieces := self._pieces[shard]:
            digests = b"".join(digest_of(held.master.view(-1)[piece.start : piece.stop]) for piece in pieces)
            self._say(Updated(version, shard, digests, self._fence.generation))


# ---- Tells the coordinator what audits of workers have found ----

_KEPT = 1024  # the last findings, to tell them to a restarted coordinator


class AuditReports:
    """What audits on this server have found. `fence` gives the current generation. Owner thread only.

    Of one contribution and the same workers only the first shard is told: a worker that computes something else mostly
    does so in all of them. In another view it is told once more: shards may have moved, and come back.
    """

    def __init__(self, say: Callable[[Message], None], fence: Fence) -> None:
        self._say, self._fence = say, fence
        self._told: deque[tuple[ViewNumber, AuditFound]] = deque(maxlen=_KEPT)

    def found(self, shard: int, effect: Accepted | Disputed) -> None:
        """An audit of this shard was decided, or has to be."""
        if isinstance(effect, Accepted):
            if not effect.lost:
                return
            agreed, others = effect.agreed, effect.lost
        else:
            agreed, others = (), effect.heard
        found = AuditFound(effect.step, effect.replica, shard, agreed, others, self._fence.generation)
        number = self._fence.number
        if all((number, _named(found)) != (when, _named(before)) for when, before in self._told):
            self._told.append((number, found))
            self._say(found)

    def repeat(self) -> None:
        """Tell the last findings again: a restarted coordinator may not have them."""
        for _, found in self._told:
            if found.generation == self._fence.generation:
                self._say(found)


def _named(found: AuditFound) -> tuple[object, ...]:
    return found.generation, found.step, found.replica, found.agreed, found.others


# ---- Sends versions: every version to workers that follow, one version to a worker that asks ----


class Followers:
    """Sends frames to workers. Not thread-safe: only the owner thread calls it.

    `owned` is the reducer's dict of shards. The shell knows which workers follow. With `newest_is_enough` a version
    replaces the shard's older one that still waits for a slow follower. With `ranks`, one for each shard, versions of a
    lower rank go out first.
    """

    def __init__(
        self, shell: ServerShell[Channel], owned: Mapping[int, HeldShard], *, newest_is_enough: bool,
        ranks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._shell, self._owned, self._newest_is_enough = shell, owned, newest_is_enough
        self._ranks = ranks
        self._limits = Limits()  # of each worker's link

    def linked(self, channel: Channel, worker: str) -> Sequence[Effect]:
        """A worker connected (again). Returns the effects to run.

        Closes the connection that this one replaces: if its worker is still there, it connects and follows again.
        """
        older = self._shell.workers.get(worker)
        effects = self._shell.linked(channel, worker)
        if effects is None:
            return []
        self._limits.set_on(channel.connection)
        if older is not None:
            older.connection.close()
        return effects

    def share(self, limits: Limits, workers: int) -> None:
        """Set what `workers` workers may have in flight to this server, and get from it, together."""
        before, self._limits = self._limits, limits.shared(workers)
        for channel in self._shell.workers.values():
            self._limits.set_on(channel.connection, before)

    def publish(self, shard: int, version: int) -> None:
        """Send a version to all followers."""
        if self._shell.followers:
            self.send(self._shell.followers, shard, version)

    def send(self, channels: Iterable[Channel], shard: int, version: int, *, asked: bool = False) -> None:
        """Send a version to some followers. The job's last version is sent raw, because it is the result.

        `asked`: they need this very version (I5), so it neither replaces a newer one nor is replaced.
        """
        place = ("version", shard) if self._newest_is_enough and not asked else None
        raw = self._shell.is_last(shard, version)
        self._send(channels, shard, Header(Kind.VERSION, step=version), raw=raw, place=place)

    def reply(self, shard: int, reply: Reply) -> None:
        """Send the version that a worker asked for, if the worker is still connected.

        It replaces the shard's answer that still waits: since then the worker has asked for another replica's.
        """
        if (channel := self._shell.workers.get(reply.follower)) is not None:
            header = Header(Kind.VERSION, step=reply.version, base=reply.clock, wants=wants(reply.replica))
            self._send((channel,), shard, header, raw=reply.last, place=("reply", shard))

    def tell(self, worker: str, header: Header, payload: memoryview | None = None, *, urgent: bool = False) -> None:
        """Send any other frame to a worker, if it is still connected."""
        if (channel := self._shell.workers.get(worker)) is not None:
            channel.send(header._replace(view=self._shell.fence.number), payload, urgent=urgent)

    def _send(
        self, channels: Iterable[Channel], shard: int, header: Header, *, raw: bool, place: Hashable = None
    ) -> None:
        owned = self._owned[shard]
        code, buffer, nbytes = owned.raw(header.step) if raw else owned.encoded(header.step)
        header = owned.named(header._replace(view=self._shell.fence.number, shard=shard, length=nbytes, codec=code))
        rank = (header.step, self._ranks[shard]) if self._ranks else ()
        for channel in channels:
            channel.send(header, buffer.retain().bytes[:nbytes], sent=buffer.release, place=place, rank=rank)


# ---- Requests of workers for rows, words or whole shards, at a version that may not exist yet ----

_ANSWER = {Kind.PULL_ROWS: Kind.ROWS, Kind.PULL_WORDS: Kind.WORDS}


class Pulls:
    """Runs `Requests` on frames. Not thread-safe: only the owner thread calls it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.requests: Requests[Channel, tuple[Header, Ids | None]] = Requests()
        self.wait = False  # does any request wait?

    def add(self, channel: Channel, header: Header, ids: Ids | None) -> None:
        """A worker asks for the rows `ids` of a table's part, or for all of another shard; None: for the words that the
        header names."""
        newest = bool(header.flags & NEWEST)
        place = (0, 0) if ids is not None else (header.replica, header.wants)
        self.requests.add(header.shard, Request(channel, header.step, newest, (header, ids), place))
        self.wait = True

    def answer(self, shard: int, machine: ShardMachine, owned: HeldShard, number: ViewNumber) -> None:
        """Answer every request that can be answered now."""
        for request, version in self.requests.answered(shard, machine.published, owned.keeps):
            asked, ids = request.what
            answer = Header(_ANSWER[asked.kind], number, shard=asked.shard, step=asked.step, base=asked.base)
            if version is None:
                request.link.send(answer._replace(flags=SKIP))
                continue
            with self._tracer.span("rows" if ids is not None else "words", shard=asked.shard, version=version):
                buffer, payload = _payload(owned, version, asked, ids)
            answer = answer._replace(step=version, length=len(payload))
            request.link.send(answer, payload, sent=buffer.release)


def _payload(owned: HeldShard, version: int, asked: Header, ids: Ids | None) -> tuple[Buffer, memoryview]:
    """What was asked for, and the buffer to release when it is sent. The intake has looked at what may be asked."""
    if ids is None:
        assert isinstance(owned, StreamedShard), "only streamed parameters are pulled by words"
        return owned.words(version, asked.replica, asked.wants)
    if not isinstance(owned, OwnedRows):
        _, kept, nbytes = owned.raw(version)
        return kept.retain(), kept.bytes[:nbytes]
    buffer, nbytes = owned.rows(version, ids)
    return buffer, buffer.bytes[:nbytes]


# ---- The decisions that all servers of a job take together: sends measures, applies verdicts ----


class ReducerContext(Protocol):
    """What the reducer calls besides followers and peers. The service implements it."""

    def say(self, message: Message) -> None:
        """Send a message to the coordinator."""

    def not_finite(self, verdict: clip.StepVerdict, *, alone: bool) -> None:
        """A step was skipped, or must stop the job. `alone`: only this server has decided so, about one shard."""


class StepVerdicts:
    """Not thread-safe: only the owner thread calls it. `put` appends an event to the inbox."""

    def __init__(self, shell: ServerShell[Channel], context: ReducerContext, put: Callable[[Event], None]) -> None:
        self._shell, self._context, self._put = shell, context, put
        self._measures = msgspec.msgpack.Encoder()
        self._verdicts: deque[clip.StepVerdict] = deque(maxlen=2)  # the last ones

    def measured(self, owned: HeldShard, finish: Finish) -> Sequence[Effect]:
        """A shard's sum is finished. If a decision is awaited, look at it and tell the machine.

        A norm that clipping needs also says whether all values are finite.
        """
        if not finish.measure:
            return []
        rule = self._shell.machine.plan.rule
        norms = owned.norms() if owned.measured and rule.clip is not None else ()
        known = bool(norms) and all(map(math.isfinite, norms))
        at = -1 if known or not rule.examines else owned.first_not_finite()
        measure = clip.Measure(
            owned.shard.index, norms, finish.not_finite, finish.gradients, at,
            owned.loss_scale if rule.scaled else 0.0,
        )  # fmt: skip
        return self._shell.machine.measured(finish.step, measure)

    def tell(self, tell: clip.Tell) -> None:
        """Send measures to every other server."""
        data = memoryview(self._measures.encode(tell.measures))
        header = Header(Kind.MEASURES, self._shell.fence.number, step=tell.step, length=len(data))
        for peer in self._shell.peers.values():
            peer.send(header, data, urgent=True)

    def decide(self, verdict: clip.StepVerdict) -> None:
        """A step's verdict is known: report one that is not finite, and queue the verdict for the shards."""
        if verdict.scale is None:
            self._context.not_finite(verdict, alone=False)
        self._verdicts.append(verdict)
        # Into the inbox, not now: the shard whose Finish brought the verdict is still running its effects.
        self._put(verdict)

    def norm(self, step: int) -> float | None:
        """The norm of a step's mean gradient, before clipping; None if nobody measures it, or it is not finite.

        Only of the last two steps that were decided.
        """
        if self._shell.machine.plan.rule.clip is None:
            return None
        asked = (step, self._shell.fence.generation)
        found = next((v.norm for v in self._verdicts if (v.step, v.generation) == asked), None)
        return found if found is not None and found <= MOST_NORM else None


# ---- Keeps backups: sends states and updates as a primary, applies and acknowledges them as a backup ----


class Replication:
    """Not thread-safe: only the owner thread calls it."""

    def __init__(
        self,
        shell: ServerShell[Channel],
        tickets: PayloadTickets,
        ledger: LedgerEntries,
        owned: Mapping[int, HeldShard],
    ) -> None:
        self._shell, self._tickets, self._ledger, self._owned = shell, tickets, ledger, owned
        self._choices = msgspec.msgpack.Encoder()
        # Shard and server ("": this one, as a backup) -> version, and the digest of what is held at it. A part of a
        # table is digested from the state on that was sent to that server.
        self._digests: dict[tuple[int, str], tuple[int, bytes]] = {}

    # ---- the primary's side ----

    def send_state(self, record: ShardRecord, *, incoming: bool) -> None:
        """Send a shard's whole state to its backup, or to the third server."""
        server = self._shell.machine.pairs.server(record.shard, incoming=incoming)
        data = encode_record(record, "none")
        header = Header(Kind.STATE, self._shell.fence.number, shard=record.shard, step=record.version, length=len(data))
        digest = self._digest_of_state(record.shard, server, record.version)
        self._shell.fill(record.shard, server, record.version, digest).send(header, memoryview(data))

    def ask(self, shard: int, version: int) -> None:
        """Ask the shard's backup whether it holds this version. It is sent no digest that it could repeat."""
        server = self._shell.machine.pairs.server(shard, incoming=False)
        digest = self._digest_of_state(shard, server, version)
        data = memoryview(sealed(digest))
        header = Header(Kind.PROVE, self._shell.fence.number, shard=shard, step=version, length=len(data))
        self._shell.fill(shard, server, version, digest).send(header, data)

    def send_update(self, shard: int, update: Apply, gradient: tuple[Buffer, int]) -> None:
        """Send who has a copy the finished gradient of an update that was just applied here, or that it changed
        nothing."""
        buffer, nbytes = gradient
        skip = update.scale is None
        header = Header(
            Kind.REPLICATE, self._shell.fence.number, shard=shard, step=update.version - 1,
            flags=SKIP * skip, length=0 if skip else nbytes, replica=update.replica, weight=update.rate,
            base=self._ledger.added(shard),
        )  # fmt: skip
        payload = None if skip else buffer.bytes[:nbytes]
        servers = [self._shell.machine.pairs.server(shard, incoming=incoming) for incoming in update.copies]
        done = buffer.release if len(servers) == 1 else after(len(servers), buffer.release)
        for server in servers:
            digest = self._digest_of_update(shard, server, update.version)
            self._shell.replicate(shard, server, update.version, digest).send(header, payload, sent=done)

    def send_choice(self, shard: int, choice: events.Chosen) -> None:
        """Tell who has a copy which contributions make an update. Nobody hears its norm before they know them."""
        data = memoryview(self._choices.encode(choice.replicas))
        header = Header(Kind.CHOICE, self._shell.fence.number, shard=shard, step=choice.step, length=len(data))
        machines = self._shell.machine
        machine = machines.machine(shard)
        for server in [] if machine is None else machines.pairs.replicating(shard, machine):
            self._shell.peers[server].send(header, data, urgent=True)

    # ---- the backup's side ----

    def updated(self, event: UpdateCame) -> Sequence[Effect | Answer[Channel]]:
        """An update from the primary arrived."""
        header = event.header
        if not self._shell.takes_from(header.shard, event.sender, header.view):
            event.buffer.release()
            return []
        ticket = self._tickets.issue(event.channel, header, event.buffer, credited=True)
        self._ledger.told(header.shard, header.base)
        skip = bool(header.flags & SKIP)
        update = events.Replicated(header.step, skip, ticket, header.replica, header.weight)
        return self._shell.replicated(event.channel, header.shard, update)

    def filled(self, event: StateCame) -> Sequence[Effect | Answer[Channel]]:
        """A whole state from the primary arrived."""
        record = event.record
        if not self._shell.takes_from(record.shard, event.sender, event.number):
            return []
        self._owned[record.shard].load(record)
        self._digest_of_state(record.shard, "", record.version)
        loaded = events.Loaded(record.version, record.clocks)
        answers = self._shell.replicated(event.channel, record.shard, loaded)
        self._ledger.proves(applied_in(self._shell.machine, [record.shard]))
        return answers

    def chosen(self, event: ChoiceCame) -> Sequence[Effect | Answer[Channel]]:
        """The primary told which contributions make an update."""
        header = event.header
        if not self._shell.takes_from(header.shard, event.sender, header.view):
            return []
        return self._shell.replicated(event.channel, header.shard, events.Chosen(header.step, event.replicas))

    def asked(self, event: QuestionCame) -> Sequence[Effect | Answer[Channel]]:
        """The primary asks whether this backup holds a version."""
        header = event.header
        if not self._shell.takes_from(header.shard, event.sender, header.view):
            return []
        if same := self._shell.holds(header.shard, header.step):
            same = sealed(self._digest_of_state(header.shard, "", header.step)) == event.sealed
        return self._shell.replicated(event.channel, header.shard, events.Compared(header.step, same))

    def acknowledge(self, answer: Answer[Channel]) -> None:
        """Tell the primary that this backup has a version, and prove it; or that it does not have it."""
        digest = b"" if answer.differs else self._digest_of_update(answer.shard, "", answer.version)
        header = Header(
            Kind.ACK, self._shell.fence.number, shard=answer.shard, step=answer.version, base=int(answer.chosen),
            length=len(digest),
        )  # fmt: skip
        answer.link.send(header, memoryview(digest), urgent=True)

    # ---- either ----

    def _digest_of_state(self, shard: int, server: str, version: int) -> bytes:
        peers = ("", *self._shell.peers)
        self._digests = {copy: known for copy, known in self._digests.items() if copy[1] in peers}
        digest = self._owned[shard].digest(b"")
        self._digests[shard, server] = (version, digest)
        return digest

    def _digest_of_update(self, shard: int, server: str, version: int) -> bytes:
        """The digest after the update that made `version`, computed once."""
        known, digest = self._digests[shard, server]
        if known != version:
            digest = self._owned[shard].digest(digest)
            self._digests[shard, server] = (version, digest)
        return digest


def sealed(digest: bytes) -> bytes:
    """16 bytes that say whether another digest is the same, and from which it cannot be had."""
    return hashlib.blake2b(digest, digest_size=16).digest()


def after(times: int, call: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `call` when it is called for the last of so many times. Threads may call it at once."""
    left = iter(range(times - 1, -1, -1))
    return lambda: None if next(left) else call()
