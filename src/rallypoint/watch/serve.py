"""Serves the page of one run, or of several, until it is interrupted."""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rallypoint.errors import UsageError
from rallypoint.watch.app import Comparison, Operator, Page
from rallypoint.watch.follow import Follower, check_log

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


_HOST = "127.0.0.1"
_AT_ONCE, _QUEUE = 32, 1024  # connections that are taken before there is a look at how many there are; that wait
GRACE_S = 2  # for what is being answered at the end: an order may take minutes


class _Server(uvicorn.Server):
    """Ends the page's streams when it is told to end: it would wait for them."""

    def __init__(self, config: uvicorn.Config, page: Page | Comparison) -> None:
        super().__init__(config)
        self._page = page

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_QUEUE)  # asyncio takes one number for both

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._page.closing = True
        super().handle_exit(sig, frame)

    def end(self) -> None:
        """Let the server end; any thread may call it."""
        self._page.closing = True
        self.should_exit = True


@contextmanager
def served(
    folder: Path, facts: dict[str, Any], port: int = 0, operator: Operator | None = None,
    resolved: Callable[[], dict[str, str]] = dict,
) -> Iterator[tuple[str, Bound]]:
    """In the body the page of the run in `folder` can be opened: yields its address with its token, and the server to
    run. Raises UsageError if there is no log, or the port is taken."""
    follower, token = _follower(folder), secrets.token_urlsafe(16)
    with _serving(Page(follower, facts, token, operator, resolved), [follower], token, port) as bound:
        yield bound


@contextmanager
def compared(
    folders: Mapping[str, Path], settings: Mapping[str, Mapping[str, str]], port: int = 0
) -> Iterator[tuple[str, Bound]]:
    """As `served`, for a page that compares the runs in these folders, by the names that it shows."""
    followers, token = {name: _follower(folder) for name, folder in folders.items()}, secrets.token_urlsafe(16)
    with _serving(Comparison(followers, settings, token), [*followers.values()], token, port) as bound:
        yield bound


def _follower(folder: Path) -> Follower:
    check_log(folder)
    return Follower(folder)


@contextmanager
def _serving(
    page: Page | Comparison, followers: Sequence[Follower], token: str, port: int
) -> Iterator[tuple[str, Bound]]:
    with _listening(port) as listening, ExitStack() as following:
        config = uvicorn.Config(
            page.app, log_level="error", access_log=False, lifespan="off", server_header=False, ws="none",
            timeout_graceful_shutdown=GRACE_S, http=Visitors().protocol(), backlog=_AT_ONCE,
        )  # fmt: skip
        server = _Server(config, page)
        for follower in followers:
            follower.start()
            following.callback(follower.close)
        server.config.load()
        yield f"http://{_HOST}:{listening.getsockname()[1]}/?token={token}", Bound(server, listening)


class Bound:
    """The server with its socket."""

    def __init__(self, server: _Server, listening: socket.socket) -> None:
        self._server, self._listening = server, listening

    def run(self) -> None:
        """Answer until SIGINT, SIGTERM or `end`."""
        self._server.run([self._listening])

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """In the body a thread answers."""
        thread = threading.Thread(target=self.run, name="page", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.end()
            thread.join()


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    listening = socket.socket()
    with listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((_HOST, port))
        except OSError as error:
            raise UsageError(f"port {port} cannot be used ({error.strerror}): choose another --port") from None
        listening.listen(_QUEUE)
        yield listening
