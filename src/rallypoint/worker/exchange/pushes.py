"""Sends contributions: slots of the exchange buffer, raw or encoded, and rows of tables."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rallypoint.codec.base import all_finite, decode_gradient
from rallypoint.core.layout import Layout
from rallypoint.core.sums import Part
from rallypoint.core.worker import slots as machine
from rallypoint.net.channel import Rank
from rallypoint.net.frames import BAD_GRADIENT, NOT_FINITE, Header, Kind, wants
from rallypoint.worker.exchange.encoder import Encoder
from rallypoint.worker.exchange.links import Links
from rallypoint.worker.streamed.memory import SlotMemory

# The memory of a worker that adds up its replicas before it sends them (core/sums/presum.py decides what).


@dataclass(frozen=True, slots=True)
class Sum:
    """The total weight of a block, and its replicas with a loss, or a gradient, that is not finite."""

    weight: float
    losses: frozenset[int]  # the replicas whose loss is not finite
    gradients: frozenset[int]  # the replicas whose loss is finite, and whose gradient is not


class Partials:
    """Weighted sums of blocks, by shard and first replica. Only the thread that fills slots calls it, but for `sum`."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, Sum]] = {}  # fp32, 1-D
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._sums: dict[int, Sum] = {}

    @torch.no_grad()
    def add_up(self, shard: int, part: Part, slot: torch.Tensor, leaf: Sum) -> None:
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
            found = Sum(kept.weight + found.weight, kept.losses | found.losses, kept.gradients | found.gradients)
            self._free[shard].append(values)
        if part.keep:
            self._keep((shard, part.block.start), (self._room(shard, slot).copy_(slot), found))
        else:
            self._sums[shard] = found

    def sum(self, shard: int) -> Sum:
        """What is known of the block that is in the shard's slot now."""
        return self._sums.pop(shard)

    def clear(self) -> None:
        """Another step begins: what is kept is not needed. The memory is used again."""
        for (shard, _), (values, _) in self._kept.items():
            self._free[shard].append(values)
        self._kept.clear()
        self._sums.clear()

    def _keep(self, key: tuple[int, int], kept: tuple[torch.Tensor, Sum]) -> None:
        if key in self._kept:
            self._free[key[0]].append(self._kept[key][0])
        self._kept[key] = kept

    def _room(self, shard: int, slot: torch.Tensor) -> torch.Tensor:
        free = self._free[shard]
        return free.pop() if free else torch.empty_like(slot, device="cpu", pin_memory=False)


Sent = Callable[[int, int], None]
Queued = Callable[[int, int], bool]


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
        self._layout, self._memory = layout, memory
        self.slot, self.words = memory.slot, memory.words
        self._encoder, self._links = encoder, links
        self._sent, self._queued, self._lock = sent, queued, lock
        self._rows: dict[int, memoryview] = {}  # shard -> the contribution to that part of a table
        self.weight, self._finite = 1.0, True
        self.partials = Partials()
        self._examines = examines
        self.ranks: Sequence[int] = ()  # of each shard: the forward pass needs those of a low rank first; (): in order

    def begin(self, weight: float, finite: bool) -> None:
        """Set the weight of the following contributions, and whether their loss was finite."""
        self.weight, self._finite = weight, finite

    def add_up(self, shard: int, replica: int, part: Part) -> None:
        """Add up the slot, which is full with `replica`'s contribution, with other replicas of this worker."""
        values, this = self.words(shard), frozenset({replica})
        bad = self._finite and not self._whole(values)
        leaf = Sum(self.weight, frozenset() if self._finite else this, this if bad else frozenset())
        self.partials.add_up(shard, part, values, leaf)

    def set_rows(self, shard: int, gradient: memoryview) -> None:
        """Set what the next `push` of this part of a table sends."""
        self._rows[shard] = gradient

    def push(self, send: machine.Send) -> None:
        """Send one shard's contribution. It is lost if its link is lost."""
        place = self._layout.shards[send.shard]
        if place.part is not None:
            self._push_rows(send, self._rows.pop(send.shard))
            return
        if send.count > 1:
            self._push_block(send, place.nbytes)
            return
        payload = self._encoder.encode(send.shard, send.step, send.replica, self.words(send.shard))
        parameters = place.role == "parameters"  # buffers hold numbers of any type
        whole = self._whole(self.words(send.shard)) if parameters else True
        weight = self.weight if parameters else 1.0
        if payload is None:
            self._push_slot(send, self._header(send, place.nbytes, weight, whole=whole))
            return
        if (link := self._links.get(send.server)) is not None:
            header = self._header(send, len(payload.data), weight, whole=whole)._replace(codec=payload.code)
            link.push(header, payload.data, sent=payload.buffer.release, rank=self._rank(send))
        else:
            payload.buffer.release()
        self._sent(send.shard, send.serial)  # the gradient was encoded into a buffer of its own: the slot is free

    def _push_block(self, send: machine.Send, nbytes: int) -> None:
        block = self.partials.sum(send.shard)
        flags = (NOT_FINITE if block.losses else 0) | (BAD_GRADIENT if block.gradients else 0)
        bad = block.losses or block.gradients
        named = [replica - send.replica for replica in bad if replica - send.replica < 32]
        header = self._header(send, nbytes, block.weight, whole=True)
        self._push_slot(send, header._replace(flags=flags, wants=sum(1 << bit for bit in named)))

    def _push_slot(self, send: machine.Send, header: Header) -> None:
        """Queue the slot's own bytes, unless the slot has been reused.

        After the machine decided to send, the link may have ended and reconnected. That freed the slot, so the main
        thread may be writing to it. The check is safe under the lock: the thread that reports a link's end needs it
        too.
        """
        with self._lock:
            link = self._links.get(send.server)
            if link is not None and self._queued(send.shard, send.serial):
                sent = partial(self._sent, send.shard, send.serial)
                link.push(header, self.slot(send.shard), sent=sent, rank=self._rank(send))

    def _rank(self, send: machine.Send) -> Rank:
        """A lower replica goes first: while it is missing, servers keep credit of the others back."""
        return (send.step, send.replica, self.ranks[send.shard]) if self.ranks else ()

    def _push_rows(self, send: machine.Send, gradient: memoryview) -> None:
        if (link := self._links.get(send.server)) is not None:
            columns = self._layout.shards[send.shard].columns
            whole = self._whole(decode_gradient(gradient, columns)[1].view(-1))
            link.push(self._header(send, len(gradient), self.weight, whole=whole), gradient, sent=_nothing)
        self._sent(send.shard, send.serial)  # the slot is not used: it is free at once

    def _whole(self, values: torch.Tensor) -> bool:
        return not self._examines or all_finite(values)

    def _header(self, send: machine.Send, nbytes: int, weight: float, *, whole: bool) -> Header:
        return Header(
            Kind.PUSH, send.view, shard=send.shard, replica=send.replica, step=send.step, length=nbytes, weight=weight,
            flags=(0 if self._finite else NOT_FINITE) | (0 if whole else BAD_GRADIENT), base=send.base + send.count - 1,
            wants=wants(send.wants),
        )  # fmt: skip


def _nothing() -> None:
    """For rows: their bytes are not reused."""
