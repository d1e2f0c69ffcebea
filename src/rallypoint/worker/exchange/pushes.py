"""Sends contributions: slots of the exchange buffer, raw or encoded, and rows of tables."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from rallypoint.core.layout import Layout
from rallypoint.core.worker import slots as machine
from rallypoint.net.frames import NOT_FINITE, Header, Kind, wants
from rallypoint.net.pool import bytes_of
from rallypoint.worker.exchange.encoder import Encoder
from rallypoint.worker.exchange.links import Links

Sent = Callable[[int, int], None]
Queued = Callable[[int, int], bool]


class Pushes:
    """Sends what the machine names out of the `buffer`, and calls `sent(shard, serial)` when a slot is free again.

    `queued(shard, serial)` says whether the slot still holds that gradient. It is called under `lock`.
    """

    def __init__(
        self, layout: Layout, buffer: torch.Tensor, encoder: Encoder, links: Links, *, sent: Sent, queued: Queued,
        lock: threading.Condition,
    ) -> None:  # fmt: skip
        self._layout, self._buffer, self._bytes = layout, buffer, bytes_of(buffer)
        self._encoder, self._links = encoder, links
        self._sent, self._queued, self._lock = sent, queued, lock
        self._rows: dict[int, memoryview] = {}  # shard -> the contribution to that part of a table
        self._weight, self._finite = 1.0, True

    def begin(self, weight: float, finite: bool) -> None:
        """Set the weight of the following contributions, and whether their loss was finite."""
        self._weight, self._finite = weight, finite

    def set_rows(self, shard: int, gradient: memoryview) -> None:
        """Set what the next `push` of this part of a table sends."""
        self._rows[shard] = gradient

    def slot(self, shard: int) -> memoryview:
        """Return the bytes of the shard's slot."""
        place = self._layout.shards[shard]
        return self._bytes[place.start * 4 : place.stop * 4]

    def words(self, shard: int) -> torch.Tensor:
        """Return the shard's slot as 1-D fp32."""
        place = self._layout.shards[shard]
        return self._buffer[place.start : place.stop]

    def push(self, send: machine.Send) -> None:
        """Send one shard's contribution. It is lost if its link is lost."""
        place = self._layout.shards[send.shard]
        if place.part is not None:
            self._push_rows(send, self._rows.pop(send.shard))
            return
        payload = self._encoder.encode(send.shard, send.step, send.replica, self.words(send.shard))
        weight = 1.0 if place.role == "buffers" else self._weight
        if payload is None:
            self._push_slot(send, self._header(send, place.nbytes, weight))
            return
        if (link := self._links.get(send.server)) is not None:
            header = self._header(send, len(payload.data), weight)._replace(codec=payload.code)
            link.push(header, payload.data, sent=payload.buffer.release)
        else:
            payload.buffer.release()
        self._sent(send.shard, send.serial)  # the gradient was encoded into a buffer of its own: the slot is free

    def _push_slot(self, send: machine.Send, header: Header) -> None:
        """Queue the slot's own bytes, unless the slot has been reused.

        After the machine decided to send, the link may have ended and reconnected. That freed the slot, so the main
        thread may be writing to it. The check is safe under the lock: the thread that reports a link's end needs it
        too.
        """
        with self._lock:
            link = self._links.get(send.server)
            if link is not None and self._queued(send.shard, send.serial):
                link.push(header, self.slot(send.shard), sent=lambda: self._sent(send.shard, send.serial))

    def _push_rows(self, send: machine.Send, gradient: memoryview) -> None:
        if (link := self._links.get(send.server)) is not None:
            link.push(self._header(send, len(gradient), self._weight), gradient, sent=_nothing)
        self._sent(send.shard, send.serial)  # the slot is not used: it is free at once

    def _header(self, send: machine.Send, nbytes: int, weight: float) -> Header:
        return Header(
            Kind.PUSH, send.view, shard=send.shard, replica=send.replica, step=send.step, length=nbytes, weight=weight,
            flags=0 if self._finite else NOT_FINITE, base=send.base, wants=wants(send.wants),
        )  # fmt: skip


def _nothing() -> None:
    """For rows: their bytes are not reused."""
