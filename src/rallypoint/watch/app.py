"""The page's web application: a few files, and a stream of what changes."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from rallypoint.errors import UsageError
from rallypoint.observe.usage import most_files
from rallypoint.watch.follow import Follower
from rallypoint.watch.state import RunState, Series, differing

HEADER = "X-Rallypoint-Token"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
}  # fmt: skip
_HOSTS = ["127.0.0.1", "localhost", "[::1]", "::1"]  # a page elsewhere cannot make a browser ask under its own name
_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}

Answer = Callable[[Request], Awaitable[Response]]


def locked(token: str, answer: Answer) -> Answer:
    """Give answers to who has `token`, in the header HEADER.

    It is in no cookie: a browser sends those of 127.0.0.1 to each of its ports, where other users may have servers. The
    page takes it out of the address ``/?token=TOKEN``, and keeps it in the storage of its tab.
    """

    async def asked(request: Request) -> Response:
        if hmac.compare_digest(request.headers.get(HEADER, "").encode(), token.encode()):
            response = await answer(request)
        else:
            response = PlainTextResponse("open the address that `rallypoint watch` has printed, with its token\n", 403)
        response.headers.update(_HEADERS)
        return response

    return asked


def middleware() -> list[Middleware]:
    """What stands before every answer: no other host's name, and gzip."""
    return [Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS), Middleware(GZipMiddleware)]


async def healthy(request: Request) -> Response:
    return PlainTextResponse("ok\n")


def file(name: str) -> Answer:
    """A file of the page. Anybody may have it: a browser can send no token before, and it tells nothing of the run."""
    kind = f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8"

    async def answer(request: Request) -> Response:
        text = files("rallypoint.watch").joinpath("page", name).read_bytes()
        return Response(text, media_type=kind, headers=_HEADERS)

    return answer


@dataclass(slots=True)
class PageReader:
    """What one page knows already. `news` is made for it alone."""

    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)  # curve -> its revision, and its last point's step
    _lists: dict[str, object] = field(default_factory=dict)  # part -> what it was made from
    revision: int = -1  # of the run; -1: this page knows nothing yet

    def news(self, run: RunState) -> dict[str, Any] | None:
        """What has changed since the last call, for JSON; None if nothing has."""
        if run.revision == self.revision:
            return None
        self.revision = run.revision
        said: dict[str, Any] = {
            "now": round(run.now, 2), "step": run.step, "sums": run.sums, "again": run.again, "ended": run.ended,
            "why": run.why, "late": {worker: round(seconds, 4) for worker, seconds in run.late.items()},
            "times": _times(run), "skipped": run.skipped, "stalled": run.stalled, "ledger": _ledger(run),
        }  # fmt: skip
        for part, curves in (("curves", run.curves), ("evaluations", run.evaluations)):
            said[part] = self._curves(part, curves)
        plan = None if run.plan is None else msgspec.to_builtins(run.plan)
        self._part(said, "plan", plan, lambda: plan)
        self._part(said, "members", run.members.revision, run.members.rows)
        self._part(said, "machines", run.machines.revision, run.machines.told)
        for name, kept in (("marks", run.marks), ("sentences", run.sentences), ("snapshots", run.snapshots)):
            self._part(said, name, (len(kept), kept[-1] if kept else None), partial(list, kept))
        return said

    def _part(self, said: dict[str, Any], name: str, made_from: object, make: Any) -> None:
        if name not in self._lists or self._lists[name] != made_from:
            self._lists[name] = made_from
            said[name] = make()

    def _curves(self, part: str, curves: Mapping[str, Series]) -> dict[str, Any]:
        """For each curve that has changed its points, from step `from` on: the page drops what it has from there on."""
        changed = {}
        for name, series in curves.items():
            revision, end = self._seen.get(f"{part} {name}", (-1, 0))
            if series.revision == revision:
                continue
            start = end if 0 <= series.whole <= revision else 0
            self._seen[f"{part} {name}"] = series.revision, series.end
            changed[name] = {"from": start, "width": series.width, **series.columns(start)}
        return changed


def _ledger(run: RunState) -> dict[str, Any]:
    """What was used and counted so far. `staleness`: [mean, most] updates, in streaming modes."""
    said: dict[str, Any] = {"updates": run.step, "used": run.step * (0 if run.plan is None else run.plan.items)}
    if (counted := run.accounted) is not None:
        said |= {name: getattr(counted, name) for name in ("applied", "folded", "dropped", "repeats")}
        if number := sum(counted.staleness.values()):
            mean = sum(updates * count for updates, count in counted.staleness.items()) / number
            said["staleness"] = [round(mean, 2), max(counted.staleness)]
    return said


def _times(run: RunState) -> dict[str, Any]:
    times = run.times
    seconds, step, cause = times.longest
    return {
        "p50": times.quantile(0.5), "p99": times.quantile(0.99), "goodput": round(times.goodput, 4),
        "stalls": times.stalls, "lost": {cause: round(lost, 2) for cause, lost in times.lost.items()},
        "longest": {"seconds": round(seconds, 2), "step": step, "cause": cause},
    }  # fmt: skip


_FILES = {"": "index.html", **{name: name for name in ("ask.js", "page.js", "page.css", "uplot.js", "uplot.css")}}
_EVERY_S, _STILL_S = 0.5, 15.0  # between two looks; between two signs of life
_LAST_S = 0.3  # at the end so long for what the follower has not read yet: longer than it takes between two looks
_MOST_STREAMS = 64


class Page:
    """The application for one run: ``Page(follower, facts, token).app``.

    `facts` do not change: the run's name, its settings. `resolved` returns all settings of the job, as far as they are
    known by then; it may block. Who shows `token` (see `locked`) is told of the run; others get the page's files alone,
    and ``/healthz``.
    """

    def __init__(
        self, follower: Follower, facts: dict[str, Any], token: str, resolved: Callable[[], dict[str, str]] = dict
    ) -> None:
        self._follower, self._facts, self._resolved = follower, facts, resolved
        self._streams, self.closing = 0, False
        lock = partial(locked, token)
        routes = [Route("/healthz", healthy), Route("/run", lock(self._whole)), Route("/news", lock(self._stream))]
        routes.append(Route("/settings", lock(self._settings)))
        routes += [Route(f"/{path}", file(name)) for path, name in _FILES.items()]
        self.app = Starlette(routes=routes, middleware=middleware())

    async def _whole(self, request: Request) -> Response:
        """Everything, once: for scripts."""
        return JSONResponse(self._news(PageReader()))

    async def _settings(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self._resolved))

    async def _stream(self, request: Request) -> Response:
        if self._streams >= _MOST_STREAMS:
            return PlainTextResponse(f"{_MOST_STREAMS} pages are open already: close one\n", 503)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        reader, generation, still = PageReader(), -1, 0.0
        self._streams += 1
        try:
            while not self.closing:
                if generation != self._follower.generation:
                    reader, generation = PageReader(), self._follower.generation
                news = self._news(reader)
                still = 0.0 if news is not None else still + _EVERY_S
                if news is not None:
                    yield b"data: " + msgspec.json.encode(news) + b"\n\n"
                elif still >= _STILL_S:
                    yield b": still here\n\n"
                    still = 0.0
                await asyncio.sleep(_EVERY_S)
            await asyncio.sleep(_LAST_S)
            if (news := self._news(reader)) is not None and generation == self._follower.generation:
                yield b"data: " + msgspec.json.encode(news) + b"\n\n"
        finally:
            self._streams -= 1

    def _news(self, reader: PageReader) -> dict[str, Any] | None:
        """What is new to this reader; with the facts if it knows nothing yet."""
        follower = self._follower
        with follower.lock:
            first = reader.revision < 0
            news = reader.news(follower.run)
        if news is None:
            return None
        log = follower.log
        read = {} if log.read >= log.size else {"read": round(log.read / max(1, log.size), 3)}
        return {**news, **read, **({"facts": self._facts} if first else {})}


_OF_ALL = ("ask.js", "compare.js", "page.css", "uplot.js", "uplot.css")
_COMPARED = {"": "compare.html", **{name: name for name in _OF_ALL}}


class ComparisonPage:
    """The application for several runs: ``ComparisonPage({name: follower}, {name: settings}, token).app``.

    ``GET /runs`` has all of them; ``/runs?seen=STATE`` answers 204 while nothing has changed since that state.
    """

    def __init__(
        self, followers: Mapping[str, Follower], settings: Mapping[str, Mapping[str, str]], token: str
    ) -> None:
        self._followers, self.closing, lock = followers, False, partial(locked, token)
        self._differ = differing(settings)
        routes = [Route("/healthz", healthy), Route("/runs", lock(self._runs))]
        routes += [Route(f"/{path}", file(name)) for path, name in _COMPARED.items()]
        self.app = Starlette(routes=routes, middleware=middleware())

    async def _runs(self, request: Request) -> Response:
        state = "-".join(f"{one.generation}.{one.run.revision}" for one in self._followers.values())
        if request.query_params.get("seen") == state:
            return Response(status_code=204)
        runs = []
        for name, follower in self._followers.items():
            with follower.lock:
                runs.append({"name": name, **_told(follower.run), "settings": self._differ.get(name, {})})
        return Response(msgspec.json.encode({"state": state, "runs": runs}), media_type="application/json")


def _told(run: RunState) -> dict[str, Any]:
    curves = {**run.curves, **{f"{name} (evaluation)": curve for name, curve in run.evaluations.items()}}
    return {
        "step": run.step, "steps": 0 if run.plan is None else run.plan.steps, "ended": run.ended, "why": run.why,
        **_times(run), "curves": {
            name: {key: column for key, column in curve.columns().items() if key in ("step", "mean")}
            for name, curve in curves.items()
        },
    }  # fmt: skip


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
        self.most = most or max(4, min(MOST, most_files() // 4))
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
GRACE_S = 2  # for what is being answered at the end


class PageServer(uvicorn.Server):
    """Answers on its socket. Ends the page's streams when it is told to end: it would wait for them."""

    def __init__(self, config: uvicorn.Config, page: Page | ComparisonPage, listening: socket.socket) -> None:
        super().__init__(config)
        self._page, self._listening = page, listening

    def answer(self) -> None:
        """Until SIGINT, SIGTERM or `end`."""
        self.run([self._listening])

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
    folder: Path, facts: dict[str, Any], port: int = 0, resolved: Callable[[], dict[str, str]] = dict
) -> Iterator[tuple[str, PageServer]]:
    """In the body the page of the run in `folder` can be opened: yields its address with its token, and the server to
    run. Raises UsageError if there is no log, or the port is taken."""
    follower, token = Follower(folder), secrets.token_urlsafe(16)
    with _serving(Page(follower, facts, token, resolved), [follower], token, port) as bound:
        yield bound


@contextmanager
def compared(
    folders: Mapping[str, Path], settings: Mapping[str, Mapping[str, str]], port: int = 0
) -> Iterator[tuple[str, PageServer]]:
    """As `served`, for a page that compares the runs in these folders, by the names that it shows."""
    followers, token = {name: Follower(folder) for name, folder in folders.items()}, secrets.token_urlsafe(16)
    with _serving(ComparisonPage(followers, settings, token), [*followers.values()], token, port) as bound:
        yield bound


@contextmanager
def _serving(
    page: Page | ComparisonPage, followers: Sequence[Follower], token: str, port: int
) -> Iterator[tuple[str, PageServer]]:
    with _listening(port) as listening, ExitStack() as following:
        config = uvicorn.Config(
            page.app, log_level="error", access_log=False, lifespan="off", server_header=False, ws="none",
            timeout_graceful_shutdown=GRACE_S, http=Visitors().protocol(), backlog=_AT_ONCE,
        )  # fmt: skip
        server = PageServer(config, page, listening)
        for follower in followers:
            follower.start()
            following.callback(follower.close)
        server.config.load()
        yield f"http://{_HOST}:{listening.getsockname()[1]}/?token={token}", server


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
