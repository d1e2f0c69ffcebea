"""The connections of a page: bounded in number and in time, because anybody on this machine can connect to it."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
from enum import Enum, auto
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 128  # connections; fewer where the process may open few files
ASK_S = 10.0  # seconds for a request, from the connection's beginning, or from the answer before, to the request's end
READ_S = 30.0  # seconds in which who is being answered has to read something


class Visitors:
    """The connections that are open, the oldest first; only the server's loop may use it.

    For one that comes when there are `most`, the oldest goes that has asked nothing yet, or does not read its answer.
    If there is none, the new one goes. Connections that are being answered, which takes the page's token, stay.
    """

    def __init__(self, most: int = 0) -> None:
        """`most`: 0: MOST, or a quarter of the files that this process may open."""
        self.most = most or max(4, min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._open: dict[Visitor, None] = {}

    def protocol(self) -> type[asyncio.Protocol]:
        """What uvicorn makes for each connection (its option `http`)."""
        return cast(type[asyncio.Protocol], partial(Visitor, self))

    def add(self, visitor: Visitor) -> None:
        """A connection was made."""
        self._open[visitor] = None
        if len(self._open) > self.most:
            next((one for one in self._open if one.idles), visitor).cut_off()

    def remove(self, visitor: Visitor) -> None:
        """A connection has ended, or is about to."""
        self._open.pop(visitor, None)


class Visitor(H11Protocol):
    """One connection. It asks, is answered, asks again; while it does not read what it is sent, it is `deaf`."""

    def __init__(self, visitors: Visitors, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._visitors = visitors
        self._state: _State | None = None
        self._until: asyncio.TimerHandle | None = None

    @property
    def idles(self) -> bool:
        """True while it has not asked, or does not read what it is answered."""
        return self._state is not _State.ANSWERED

    def cut_off(self) -> None:
        """End the connection at once, and drop what it has not read."""
        self._end()
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()
        self._visitors.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def _look(self) -> None:
        """Give it so much time as its state allows, from when that begins."""
        if self.transport.is_closing():
            return
        whole = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        state = _State.DEAF if self.flow.write_paused else _State.ANSWERED if whole else _State.ASKS
        if state is not self._state:
            self._end(forget=False)
            self._state = state
            if state is not _State.ANSWERED:
                self._until = self.loop.call_later(READ_S if state is _State.DEAF else ASK_S, self.cut_off)

    def _end(self, *, forget: bool = True) -> None:
        if self._until is not None:
            self._until.cancel()
            self._until = None
        if forget:
            self._visitors.remove(self)


class _State(Enum):
    ASKS = auto()
    ANSWERED = auto()
    DEAF = auto()
