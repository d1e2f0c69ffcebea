"""What leaves a worker: slots of the exchange buffer, raw or encoded, and rows of tables."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rallypoint.codec.base import Codec, NonFinitePayload, Scratch, Stateful, all_finite, decode_gradient, digest_of
from rallypoint.codec.blocks import BF16
from rallypoint.codec.build import CodecState, ShardCodecs, ShardCodecStates, build, build_stateless, dump, load
from rallypoint.config import JobConfig, codec_of
from rallypoint.core.layout import Layout, Shard, forward_ranks
from rallypoint.core.order import derive_seed
from rallypoint.core.sums import DIGEST_BYTES, Part, dense_shards
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker import slots
from rallypoint.core.worker.aligned import OverlapMachine
from rallypoint.core.worker.handover import Encoding, Key, encoding_of
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.errors import ProtocolError
from rallypoint.net.channel import Rank
from rallypoint.net.frames import AHEAD, BAD_GRADIENT, COPY, NOT_FINITE, Header, Kind, wants
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.optim import Pieces
from rallypoint.worker.exchange.links import Links, nothing
from rallypoint.worker.exchange.locked import LockedShell, NarrowVector, Rewound, SlotMemory

# ---- A worker's side of compression: encodes gradients into payloads and decodes versions into slots ----


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded gradient: the codec's number, the bytes, and the pooled buffer that holds them."""

    code: int
    data: memoryview
    buffer: Buffer


class EncoderClosed(Exception):
    """The codec states go to others: what would be encoded is not sent."""


class Encoder:
    """Encodes contributions with the codecs of their groups, and decodes versions. Shards of buffers go raw both ways.

    For a codec with a state (error feedback, DGC, PowerSGD) the encoder keeps each payload until the next step. So a
    contribution that is sent again has the same bytes, and its residual is updated only once.
    """

    def __init__(self, layout: Layout, config: JobConfig, *, narrow: bool = False) -> None:
        """`narrow`: contributions are in their slots as they travel."""
        self._layout, self._config = layout, config
        self._scratch = Scratch()
        self._lock = threading.Lock()  # guards the scratch memory and the codec states
        self._codecs: dict[tuple[int, int], Codec] = {}
        # (shard, replica) -> (step, payload); None: it went raw
        self._kept: dict[tuple[int, int], tuple[int, Payload | None]] = {}
        self._decoders = threading.local()
        self._pools = [None] * len(layout.shards) if narrow else _pools(layout, ShardCodecs(config, self._scratch))
        self.raw = frozenset(shard for shard, pool in enumerate(self._pools) if pool is None)  # not encoded
        self._encode_locked: Callable[..., Payload | None] = self._encode

    def encode(self, shard: int, step: int, replica: int, values: torch.Tensor) -> Payload | None:
        """Encode `values` (the shard's words, 1-D fp32) as a payload. The caller releases its buffer.

        Returns None if the contribution goes raw: the group's codec is raw, or the values contain a NaN or an infinity
        that the codec cannot carry and that the servers must see. Raises EncoderClosed after `close`.
        """
        pool = self._pools[shard]
        if pool is None:
            return None
        with self._lock:
            return self._encode_locked((shard, replica), step, values, pool)

    def close(self) -> None:
        """Encode nothing any more: the codec states go to others. Waits for what is being encoded."""
        with self._lock:
            self._encode_locked = _closed

    def reset(self) -> None:
        """Drop all codec states: a roll-back has made them stale."""
        with self._lock:
            for codec in self._codecs.values():
                if isinstance(codec, Stateful):
                    codec.reset()
            for key in list(self._kept):
                self._let_go(key)

    def give(self, shard: int, replica: int) -> CodecState | None:
        """Remove the codec state of (shard, replica) from this encoder and return it; None if there is none."""
        key = (shard, replica)
        with self._lock:
            codec_state = self._dump(key) if key in self._kept else None
            self._codecs.pop(key, None)
            self._let_go(key)
            return codec_state

    def copy(self, shard: int, replica: int, step: int) -> CodecState | None:
        """Return a copy of the codec state with which the contribution to `step` is encoded, without data if there is
        none; or of the one after it, which has that contribution. None if a later one was encoded already."""
        key = (shard, replica)
        with self._lock:
            kept, _ = self._kept.get(key, (None, None))
            encoding = encoding_of(kept, step, drops=self._config.quorum is not None)
            if encoding is Encoding.OVER or self._encode_locked is _closed:
                return None
            without = kept is None or encoding is Encoding.ANEW
            return CodecState(step - 1, 0, memoryview(b"")) if without else self._dump(key)

    def take(self, shard: int, replica: int, codec_state: CodecState | None) -> None:
        """Install a codec state that another worker had; None drops the one here.

        Raises ProtocolError if the bytes do not fit.
        """
        key, pool = (shard, replica), self._pools[shard]
        with self._lock:
            self._codecs.pop(key, None)
            self._let_go(key)
            if codec_state is None:
                return
            codec = self._codec(key)
            sent = load(codec, codec_state.code, codec_state.data)
            if pool is None or len(sent) > codec.bytes_for(self._layout.shards[shard].words):
                raise ProtocolError(f"a codec state of shard {shard} with a contribution of {len(sent)} bytes")
            payload = None
            if len(sent):
                buffer = pool.take()
                buffer.bytes[: len(sent)] = sent
                payload = Payload(codec.code, buffer.bytes[: len(sent)], buffer)
            self._keep(key, codec_state.step, payload)

    def decode(self, payload: memoryview, into: torch.Tensor) -> None:
        """Decode a version's payload, as a server sent it, into `into`.

        Raises ProtocolError if the payload is invalid.
        """
        codec = getattr(self._decoders, "codec", None)
        if codec is None:
            codec = self._decoders.codec = build_stateless(self._config.down)
        codec.decode(payload, into)

    def _dump(self, key: tuple[int, int]) -> CodecState:
        codec, (step, payload) = self._codecs[key], self._kept[key]
        assert isinstance(codec, Stateful)
        data = dump(codec) + (bytes(payload.data) if payload is not None else b"")
        return CodecState(step, codec.code, memoryview(data))

    def _encode(self, key: tuple[int, int], step: int, values: torch.Tensor, pool: BufferPool) -> Payload | None:
        last, kept = self._kept.get(key, (None, None))
        match encoding_of(last, step, drops=self._config.quorum is not None):
            case Encoding.AGAIN:
                if kept is not None:
                    kept.buffer.retain()
                return kept
            case Encoding.OVER:
                return None
            case Encoding.ANEW:
                self._codecs.pop(key, None)
                self._let_go(key)
            case Encoding.NEXT:
                pass
        codec = self._codec(key)
        buffer = pool.take()
        seed = derive_seed(self._config.seed, "codec", step, key[1], key[0])
        try:
            used = codec.encode(values, buffer.bytes, seed=seed)
        except NonFinitePayload:
            buffer.release()
            if isinstance(codec, Stateful):
                self._keep(key, step, None)
            return None
        payload = Payload(codec.code, buffer.bytes[:used], buffer)
        if isinstance(codec, Stateful):
            buffer.retain()
            self._keep(key, step, payload)
        return payload

    def _keep(self, key: tuple[int, int], step: int, payload: Payload | None) -> None:
        self._let_go(key)
        self._kept[key] = (step, payload)

    def _let_go(self, key: tuple[int, int]) -> None:
        _, payload = self._kept.pop(key, (-1, None))
        if payload is not None:
            payload.buffer.release()

    def _codec(self, key: tuple[int, int]) -> Codec:
        if key not in self._codecs:
            shard = self._layout.shards[key[0]]
            self._codecs[key] = build(codec_of(self._config, shard.group), shard.shape, self._scratch)
        return self._codecs[key]


def _closed(*about: object) -> None:
    raise EncoderClosed


def _pools(layout: Layout, codecs: ShardCodecs) -> list[BufferPool | None]:
    """Buffer pools for the payloads, by shard: one pool for each group; None for shards that go raw."""
    bounds: dict[int, int] = {}
    for shard in layout.shards:
        if (codec := codecs.of(shard)) is not None:
            bounds[shard.group] = max(bounds.get(shard.group, 0), codec.bytes_for(shard.words))
    pools = {group: BufferPool(-(-nbytes // 4)) for group, nbytes in bounds.items()}
    return [pools[shard.group] if codecs.of(shard) is not None else None for shard in layout.shards]


# ---- Sends contributions: slots of the exchange buffer, raw or encoded, and rows of tables ----


@dataclass(frozen=True, slots=True)
class BlockTally:
    """The total weight of a block, and its replicas with a loss, or a gradient, that is not finite."""

    weight: float
    losses: frozenset[int]  # the replicas whose loss is not finite
    gradients: frozenset[int]  # the replicas whose loss is finite, and whose gradient is not


class Partials:
    """Weighted sums of blocks, by shard and first replica. Only the thread that fills slots calls it, but for `sum`."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Any, BlockTally]] = {}  # fp32, 1-D
        self._rooms: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # memory to use again
        self._sums: dict[int, BlockTally] = {}

    @torch.no_grad()
    def add_up(self, shard: int, part: Part, slot: Any, leaf: BlockTally) -> None:
        """Weigh the slot, which holds one replica's contribution, and add to it, or keep it, as `part` says.

        `leaf` is what is known of that replica. Each addition is a node of the tree (I3): one rounding, of two
        neighbouring blocks.
        """
        if leaf.weight != 1.0:
            slot.mul_(leaf.weight)
        found = leaf
        for at in part.merges:
            values, kept = self._kept.pop((shard, at))
            slot.add_(values)
            found = BlockTally(kept.weight + found.weight, kept.losses | found.losses, kept.gradients | found.gradients)
            self._free(shard, values)
        if part.keep:
            self._keep((shard, part.block.start), (self._to_keep(shard, slot), found))
        else:
            self._sums[shard] = found

    def sum(self, shard: int) -> BlockTally:
        """What is known of the block that is in the shard's slot now."""
        return self._sums.pop(shard)

    def clear(self) -> None:
        """Another step begins: what is kept is not needed. The memory is used again."""
        for (shard, _), (values, _) in self._kept.items():
            self._free(shard, values)
        self._kept.clear()
        self._sums.clear()

    def _keep(self, key: tuple[int, int], kept: tuple[Any, BlockTally]) -> None:
        if key in self._kept:
            self._free(key[0], self._kept[key][0])
        self._kept[key] = kept

    def _to_keep(self, shard: int, slot: Any) -> Any:
        rooms = self._rooms[shard]
        room = rooms.pop() if rooms else torch.empty_like(slot, device="cpu", pin_memory=False)
        return room.copy_(slot)

    def _free(self, shard: int, values: Any) -> None:
        self._rooms[shard].append(values)


class PiecesPartials(Partials):
    """The same of gradients where autograd has made them (`Pieces`): they need no copy beside them."""

    def _to_keep(self, shard: int, slot: Pieces) -> Pieces:
        return slot.owned()

    def _free(self, shard: int, values: Pieces) -> None:
        """Does nothing: the memory goes with `values`."""


Sent = Callable[[int, int], None]
Queued = Callable[[int, int], bool]


_GOLDEN = 40503  # 2**16 / 1.618: any part of its multiples is spread evenly (Knuth, vol. 3, 6.4)


class Pushes:
    """Sends what the machine names out of the slots' `memory`.

    It calls `sent(shard, serial)` when a slot is free again. `queued(shard, serial)` says whether the slot still holds
    that gradient. It is called under `lock`. With `examines` a contribution that is not finite is marked, so that the
    servers, which look at sums, can name its replica.
    """

    def __init__(
        self, layout: Layout, memory: SlotMemory, encoder: Encoder, links: Links, *, sent: Sent, queued: Queued,
        lock: threading.Condition, examines: bool = False,
    ) -> None:  # fmt: skip
        narrow = memory.parameters if isinstance(memory, NarrowVector) else ()
        self._layout, self.in_place = layout, memory.in_place
        self._nbytes = [
            0 if shard.index in self.in_place else shard.nbytes >> (shard.index in narrow) for shard in layout.shards
        ]  # fmt: skip
        self._codes = [BF16 if shard.index in narrow else 0 for shard in layout.shards]  # of what is in the slots
        self.slot, self.words = memory.slot, memory.words
        self._encoder, self._links = encoder, links
        self._sent, self._queued, self._lock = sent, queued, lock
        self.rows: dict[int, memoryview] = {}  # shard -> the contribution to that part of a table
        self.weight, self._finite = 1.0, True
        self.partials = PiecesPartials() if self.in_place else Partials()
        self._examines = examines
        self.ranks: Sequence[int] = ()  # of each shard: the forward pass needs those of a low rank first; (): in order
        self._computing = False  # a backward pass

    def begin(self, weight: float, finite: bool) -> None:
        """Set the weight of the following contributions, and whether their loss was finite. A backward pass begins."""
        self.weight, self._finite, self._computing = weight, finite, True

    def end(self) -> None:
        """The backward pass is over, or given up."""
        self._computing = False
        if self.ranks:
            self._links.reorder(self.ranks)

    def add_up(self, shard: int, replica: int, part: Part) -> None:
        """Add up the slot, which is full with `replica`'s contribution, with other replicas of this worker."""
        values, this = self.words(shard), frozenset({replica})
        bad = self._finite and not self._whole(values)
        leaf = BlockTally(self.weight, frozenset() if self._finite else this, this if bad else frozenset())
        self.partials.add_up(shard, part, values, leaf)

    def push(self, send: slots.Send) -> None:
        """Send one shard's contribution. It is lost if its link is lost."""
        place = self._layout.shards[send.shard]
        if place.part is not None:
            self._push_rows(send, self.rows.pop(send.shard))
            return
        if send.count > 1:
            self._push_block(send, self._nbytes[send.shard])
            return
        values, payload = self.words(send.shard), None
        if send.shard not in self._encoder.raw:
            try:
                payload = self._encoder.encode(send.shard, send.step, send.replica, values)
            except EncoderClosed:
                self._sent(send.shard, send.serial)
                return
        parameters = place.role == "parameters"  # buffers hold numbers of any type
        whole = not parameters or self._whole(values)
        weight = self.weight if parameters else 1.0
        if payload is None:
            self._push_slot(send, self._header(send, self._nbytes[send.shard], weight, whole=whole))
            return
        if (link := self._links.get(send.server)) is not None:
            header = self._header(send, len(payload.data), weight, whole=whole)._replace(codec=payload.code)
            link.push(header, payload.data, sent=payload.buffer.release, rank=self._rank(send))
        else:
            payload.buffer.release()
        self._sent(send.shard, send.serial)  # the gradient was encoded into a buffer of its own: the slot is free

    def _push_block(self, send: slots.Send, nbytes: int) -> None:
        block = self.partials.sum(send.shard)
        flags = (NOT_FINITE if block.losses else 0) | (BAD_GRADIENT if block.gradients else 0)
        bad = block.losses or block.gradients
        named = [replica - send.replica for replica in bad if replica - send.replica < 32]
        header = self._header(send, nbytes, block.weight, whole=True)
        self._push_slot(send, header._replace(flags=flags, wants=sum(1 << bit for bit in named)))

    def _push_slot(self, send: slots.Send, header: Header) -> None:
        """Queue the slot's own bytes, unless the slot has been reused. After the machine decided to send, the link may
        have ended and reconnected. That freed the slot, so the main thread may be writing to it. The check is safe
        under the lock: the thread that reports a link's end needs it too."""
        with self._lock:
            link = self._links.get(send.server)
            if link is not None and self._queued(send.shard, send.serial):
                sent = partial(self._sent, send.shard, send.serial)
                link.push(header, self.slot(send.shard), sent=sent, rank=self._rank(send))

    def _rank(self, send: slots.Send) -> Rank:
        """A lower replica goes first: while it is missing, servers keep credit of the others back. Then as the forward
        pass needs them, from the end of the backward pass on. Until then in an order that is scattered over all layers,
        and the same on every worker. With the newest first, workers that are a little apart send different ones, and
        few sums are whole; with the oldest first, those of the middle layers come too late."""
        if not self.ranks:
            return ()
        rank = self.ranks[send.shard]
        return send.step, send.replica, (rank * _GOLDEN & 0xFFFF) if self._computing else rank

    def _push_rows(self, send: slots.Send, gradient: memoryview) -> None:
        if (link := self._links.get(send.server)) is not None:
            columns = self._layout.shards[send.shard].columns
            whole = self._whole(decode_gradient(gradient, columns)[1].view(-1))
            link.push(self._header(send, len(gradient), self.weight, whole=whole), gradient, sent=nothing)
        self._sent(send.shard, send.serial)  # the slot is not used: it is free at once

    def _whole(self, values: torch.Tensor | Pieces) -> bool:
        if self._examines and isinstance(values, Pieces):
            values.finite = all(map(all_finite, values.parts))
            return values.finite
        return not self._examines or all_finite(values)  # type: ignore[arg-type]

    def _header(self, send: slots.Send, nbytes: int, weight: float, *, whole: bool) -> Header:
        return Header(
            Kind.PUSH, send.view, shard=send.shard, replica=send.replica, step=send.step, length=nbytes, weight=weight,
            flags=(0 if self._finite else NOT_FINITE) | (0 if whole else BAD_GRADIENT), base=send.base + send.count - 1,
            wants=wants(send.wants), codec=self._codes[send.shard],
        )  # fmt: skip


# ---- Runs the shell's effects on real links ----


class LinkEffects:
    """Runs the machine's effects. Drops an effect whose link is gone: the lost link is an event of its own."""

    def __init__(self, shell: WorkerShell, links: Links, pushes: Pushes, codec_states: CodecStates | None) -> None:
        self._shell, self._links, self._pushes, self._codec_states = shell, links, pushes, codec_states

    def run_locked(self, effect: slots.CodecEffect) -> None:
        """Run one effect on codec states. Needs the exchange's lock."""
        assert self._codec_states is not None, f"{effect}, though this job's codecs have no state"
        self._codec_states.run(effect)

    def run(self, effects: Sequence[slots.Effect]) -> None:
        """Run all other effects, in order, without the lock."""
        shell = self._shell
        for effect in effects:
            match effect:
                case slots.Send():
                    if self._codec_states is not None and shell.snapshots.copies(effect, shell.links.connections):
                        self._codec_states.copy(effect)
                    self._pushes.push(effect)
                case slots.Fetch(shard=shard, version=version, server=server):
                    if (link := self._links.get(server)) is not None:
                        link.fetch(shard, version, shell.number)
                case slots.AskNext(shard=shard, replica=replica, server=server):
                    if (link := self._links.get(server)) is not None:
                        link.want(shard, replica, shell.number)
                case slots.Follow(server=server, on=on, step=step):
                    if (link := self._links.get(server)) is not None:
                        link.follow(shell.number, on=on, step=step)
                case _:
                    raise AssertionError(f"an effect that cannot follow here: {effect}")


# ---- Moves codec states between the encoder and a shard's primary server ----


class CodecStates:
    """Runs the shell's effects on codec states (decided in `core/worker/handover.py`).

    Methods need the exchange's lock, but for `check`, `copy` and `hand_over`. None blocks: frames are only queued.
    """

    def __init__(self, locked: LockedShell, encoder: Encoder, formats: ShardCodecStates, links: Links) -> None:
        self._locked, self._shell, self._links = locked, locked.shell, links
        self._encoder, self._formats = encoder, formats
        self._given: dict[Key, CodecState] = {}  # taken out of the encoder, not yet confirmed by a server

    def run(self, effect: slots.CodecEffect) -> None:
        match effect:
            case slots.ResetCodecs():
                self._encoder.reset()
                self._given.clear()
            case slots.Recall(shard=shard, replica=replica, server=server):
                self._send(server, Header(Kind.RECALL, shard=shard, replica=replica), None)
            case slots.ReleaseState(shard=shard, replica=replica):
                if (codec_state := self._encoder.give(shard, replica)) is not None:
                    self._given[shard, replica] = codec_state
                else:
                    self._given.pop((shard, replica), None)
            case slots.GiveCopy():
                self.copy(effect)
            case slots.Give(shard=shard, replica=replica, server=server):
                given = self._given.get((shard, replica))
                self._send(server, _header(shard, replica, given), None if given is None else given.data)

    def check(self, shard: Shard, header: Header) -> None:
        """Raise ProtocolError unless this frame is a valid codec state of that shard, or says that there is none."""
        if header.length:
            self._formats.of(shard).check(header.codec, header.length)

    def arrived(self, header: Header, data: bytearray) -> None:
        """Handle the answer of a shard's primary: a codec state, or that there is none."""
        if self._shell.states.answered(header.shard, header.replica):
            codec_state = CodecState(header.step, header.codec, memoryview(data)) if data else None
            self._encoder.take(header.shard, header.replica, codec_state)

    def taken(self, shard: int, replica: int) -> None:
        """Handle a server's confirmation that it has stored this codec state."""
        self._shell.states.taken(shard, replica)
        self._given.pop((shard, replica), None)

    def hand_over(self) -> bool:
        """This process ends soon, whatever its main thread does: give all codec states, and encode nothing more.

        Returns True if the servers have them all. Takes the exchange's lock.
        """
        if self._shell.number.count:
            self._encoder.close()
            self._locked.apply(lambda: self._shell.states.hand_over(self._shell.paths))
        return self._shell.states.settled

    def copy(self, of: slots.Send | slots.GiveCopy) -> None:
        """Send the codec state of the step before, for a snapshot; at the latest before the next step's."""
        codec_state = self._encoder.copy(of.shard, of.replica, of.step)
        if codec_state is not None:
            base = COPY if codec_state.step < of.step else AHEAD
            header = _header(of.shard, of.replica, codec_state)._replace(step=of.step - 1, base=base)
            self._send(of.server, header, codec_state.data, of.view)

    def _send(self, server: str, header: Header, payload: memoryview | None, view: ViewNumber | None = None) -> None:
        """Send under the number of `view`, or of the view in force if `view` is None."""
        if (link := self._links.get(server)) is not None:
            link.send_codec_state(header._replace(view=self._shell.number if view is None else view), payload)


def _header(shard: int, replica: int, codec_state: CodecState | None) -> Header:
    header = Header(Kind.CODEC_STATE, shard=shard, replica=replica)
    if codec_state is None:
        return header
    return header._replace(step=codec_state.step, codec=codec_state.code, length=len(codec_state.data))


# ---- The replica that the main thread computes: its slots are claimed, written, and sent as each is full ----

_UNKNOWN = bytes(DIGEST_BYTES)


class Contributions:
    """The digests of the replica in progress, at every `every`-th step; 0: never.

    Calls for each replica: `begin`, `filled` for each shard, `take`. `filled` comes from the thread that fills slots,
    which is idle when `take` is called.
    """

    def __init__(self, layout: Layout, every: int) -> None:
        self._every = every
        self._places = {shard: place for place, shard in enumerate(dense_shards(layout))}
        self._digests: list[bytes] = []
        self.active = False

    def begin(self, step: int, replica: int) -> None:
        """A replica begins. `active` is True while its contribution is recorded."""
        self.active = self._every > 0 and step % self._every == 0
        self._digests = [_UNKNOWN] * len(self._places) if self.active else []

    def filled(self, shard: int, gradient: torch.Tensor, weight: float) -> None:
        """The replica's gradient for this shard is whole: fp32, 1-D, in the host's memory. It is not changed."""
        if self.active and (place := self._places.get(shard)) is not None:
            self._digests[place] = digest_of(gradient, weight)

    def take(self) -> bytes:
        """The replica is computed: return the digests in the order of `dense_shards`.

        They are zeros for a shard that was not seen; b"" if none are recorded.
        """
        found, self._digests, self.active = b"".join(self._digests), [], False
        return found


class ReplicaPushes:
    """Main thread only, except for `filled`, which the staging thread calls too.

    Calls for each replica: `begin`; for each shard `claim`, then `filled`; at last `computed`. Or, at any point,
    `abandoned`.
    """

    def __init__(
        self, layout: Layout, locked: LockedShell, pushes: Pushes, links: Links, contributions: Contributions
    ) -> None:
        self._buffers = [shard for shard in layout.shards if shard.role == "buffers"]
        self._locked, self._pushes, self._links = locked, pushes, links
        self.contributions = contributions  # records digests of what the replica contributes
        self._presum, self._replica = locked.machine.presum, -1
        self._began: tuple[int, ViewNumber] | None = None
        # Waits until this slot may be written; False if it need not be. Raises Rewound like `Exchange.check`.
        self.claim: Callable[[int], bool] = partial(locked.claim, describe=self._where_full)

    def begin(self, step: int, replica: int) -> ViewNumber | None:
        """Begin to compute this replica and return its generation. None if it is not to be computed (now)."""
        with self._locked.changed:
            generation = self._locked.shell.begin_replica(step, replica)
        self._replica = replica
        self.contributions.begin(step, replica)
        if generation is not None and (step, generation) != self._began:
            self._began = step, generation
            self._pushes.partials.clear()
        return generation

    def buffers_of(self, replica: int) -> list[Shard]:
        """The shards of buffers to which this replica contributes, ascending; they lie one after the other."""
        return [s for s in self._buffers if self._locked.machine.contributes(s.index, replica)]

    def weigh(self, weight: float, *, finite: bool) -> None:
        """Set the weight of the following contributions, and whether their loss was finite."""
        self._pushes.begin(weight, finite)

    def _where_full(self) -> str:
        held = self._locked.machine.slots
        busy = held.unsent or [shard for shard, slot in enumerate(held) if slot is slots.Slot.LANDING]
        what = f"room for {len(busy)} gradients" if held.unsent else "versions that arrive where gradients belong"
        return f"{what}: {self._links.describe(busy, self._locked.shell.view.primary)}"

    def filled(self, shard: int) -> None:
        """The slot holds the replica's whole gradient: push it, or add it up with others of this worker (I3)."""
        if self.contributions.active:
            self.not_needed(shard, self._pushes.words(shard))
        with self._locked.changed:
            part = self._presum.part(shard, self._replica)
        if part is not None:
            self._pushes.add_up(shard, self._replica, part)
        self._locked.handle(slots.Filled(shard, part))

    def not_needed(self, shard: int, gradient: torch.Tensor) -> None:
        """The replica's gradient for this shard is whole: only record it, nobody needs it from here."""
        self.contributions.filled(shard, gradient, self._pushes.weight)

    def filled_rows(self, shard: int, gradient: memoryview) -> None:
        """Like `filled` for a part of a table. Its gradient (see `codec/base.py`) needs no slot."""
        self._pushes.rows[shard] = gradient
        self._locked.handle(slots.Filled(shard))

    def computed(self) -> None:
        """The replica is computed: all of its contributions are queued or sent."""
        self._end(whole=True)

    def abandoned(self) -> None:
        """The replica was given up halfway: its slots are not written any more."""
        self._end(whole=False)

    def _end(self, *, whole: bool) -> None:
        self._pushes.end()
        self._locked.apply(lambda: self._locked.shell.end_replica(whole=whole))
        if (memory := self._locked.memory) is not None:
            self._locked.set(lambda: memory.free(self._locked.machine.slots))


# ---- The version that a forward pass reads while it arrives. `core/worker/aligned.py` decides what may be done ----


class ForwardVersion:
    """Waits for shards of the version that is being installed, and gives them to the main thread. Main thread only."""

    def __init__(
        self, layout: Layout, locked: LockedShell, pushes: Pushes, links: Links, describe: Callable[[], str]
    ) -> None:
        """`describe` says what the main thread waits for, as a phrase."""
        self.waited = 0.0  # seconds that the forward pass in progress has waited for shards
        self._task = slots.Compute(-1, -1)  # the replica in progress
        self._locked, self._pushes, self._links, self._describe = locked, pushes, links, describe
        machine = locked.machine
        self._machine = machine if isinstance(machine, OverlapMachine) else None
        if self._machine is not None:
            pushes.ranks = forward_ranks(layout)

    @property
    def possible(self) -> bool:
        """True if forward passes may begin early in this job."""
        return self._machine is not None

    def learn(self, order: Sequence[int]) -> None:
        """A forward pass needed the shards in this order: from now on contributions are sent in it (Jayarajan et al.,
        2019: Priority-based Parameter Propagation; Peng et al., 2019: ByteScheduler)."""
        ranks = {shard: rank for rank, shard in enumerate(order)}
        self._pushes.ranks = [ranks[shard] for shard in range(len(ranks))]

    def allow(self, allowed: bool) -> None:
        """Allow (or not) that `Exchange.next_action` begins the next step before all of its version is here."""
        if self._machine is not None:
            with self._locked.changed:
                self._machine.allow_early(allowed)

    def begin(self, step: int, replica: int) -> bool:
        """A replica begins. Returns True if its forward pass begins early."""
        self.waited, self._task = 0.0, slots.Compute(step, replica)
        return self._machine is not None and self._machine.early

    def take(self, shards: Sequence[int]) -> list[int]:
        """Wait until these shards are here. Returns those that the model does not hold yet: swap slot and model.

        Raises Rewound when the forward pass is stale, and the error of whatever has failed.
        """
        machine, began = self._machine, self._locked.clock()
        assert machine is not None
        with self._locked.changed:
            if not machine.rewound and not machine.here(shards):
                self._locked.wait_for_shards(shards, lambda: machine.here(shards), self._describe)
                self.waited += self._locked.clock() - began
            if machine.rewound:
                raise Rewound
            return machine.to_swap(shards)

    def installed(self) -> None:
        """Report that the model holds all of the version. Raises Rewound when the forward pass is stale."""
        with self._locked.changed:
            if self._locked.machine.rewound:
                raise Rewound
            effects = self._locked.settle(self._locked.shell.installed())
            self._locked.progress.given(slots.Install(self._task.step), ends_round=True)
            self._locked.progress.given(self._task)
            self._locked.changed.notify_all()
        self._locked.effects.run(effects)
        self._links.installed(self._task.step)
