"""Serves the page of one run until it is interrupted."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from rallypoint.errors import UsageError
from rallypoint.watch.app import Page
from rallypoint.watch.compare import Comparison
from rallypoint.watch.follow import EVENTS, Follower
from rallypoint.watch.operating import Operator
from rallypoint.watch.visitors import Visitors

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
    if not (folder / EVENTS).is_file():
        raise UsageError(f"{folder} has no {EVENTS}: name the folder of a run, as runs/20260131-235959")
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


def watch(
    folder: Path, facts: dict[str, Any], port: int, opened: Callable[[str], None], operator: Operator | None = None,
    resolved: Callable[[], dict[str, str]] = dict,
) -> None:  # fmt: skip
    """Serve the page (see `Page`) until Ctrl-C; `opened` is called with its address once it can be opened."""
    with served(folder, facts, port, operator, resolved) as (address, server):
        opened(address)
        server.run()


def compare(
    folders: Mapping[str, Path], settings: Mapping[str, Mapping[str, str]], port: int, opened: Callable[[str], None]
) -> None:
    """Serve the page that compares these runs until Ctrl-C, as `watch` does."""
    with compared(folders, settings, port) as (address, server):
        opened(address)
        server.run()
