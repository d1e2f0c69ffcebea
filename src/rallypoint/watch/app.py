"""The page's web application: a few files, and a stream of what changes. Without an operator it can only be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from rallypoint.watch.answer import Reader
from rallypoint.watch.follow import Follower
from rallypoint.watch.locked import Lock, file, healthy, middleware
from rallypoint.watch.operating import Operator

_FILES = {"": "index.html", **{name: name for name in ("ask.js", "page.js", "page.css", "uplot.js", "uplot.css")}}
_EVERY_S, _STILL_S = 0.5, 15.0  # between two looks; between two signs of life
_LAST_S = 0.3  # at the end so long for what the follower has not read yet: longer than it takes between two looks
_MOST_STREAMS = 64


class Page:
    """The application for one run: ``Page(follower, facts, token).app``.

    `facts` do not change: the run's name, its settings. `resolved` returns all settings of the job, as far as they are
    known by then; it may block. Who shows `token` (see `Lock`) is told of the run; others get the page's files alone,
    and ``/healthz``. With an `operator` it takes orders from who has that one's token too.
    """

    def __init__(
        self, follower: Follower, facts: dict[str, Any], token: str, operator: Operator | None = None,
        resolved: Callable[[], dict[str, str]] = dict,
    ) -> None:  # fmt: skip
        self._resolved = resolved
        self._follower, self._facts = follower, {**facts, "buttons": operator is not None}
        self._streams, self.closing = 0, False
        lock = Lock(token)
        routes = [Route("/healthz", healthy), Route("/run", lock(self._whole)), Route("/news", lock(self._stream))]
        routes.append(Route("/settings", lock(self._settings)))
        if operator is not None:
            routes.append(Route("/order", lock(operator.answer), methods=["POST"]))
        routes += [Route(f"/{path}", file(name)) for path, name in _FILES.items()]
        self.app = Starlette(routes=routes, middleware=middleware())

    async def _whole(self, request: Request) -> Response:
        """Everything, once: for scripts."""
        return JSONResponse(self._news(Reader()))

    async def _settings(self, request: Request) -> Response:
        """The job's resolved settings."""
        return JSONResponse(await run_in_threadpool(self._resolved))

    async def _stream(self, request: Request) -> Response:
        if self._streams >= _MOST_STREAMS:
            return PlainTextResponse(f"{_MOST_STREAMS} pages are open already: close one\n", 503)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        reader, generation, still = Reader(), -1, 0.0
        self._streams += 1
        try:
            while not self.closing:
                if generation != self._follower.generation:
                    reader, generation = Reader(), self._follower.generation
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

    def _news(self, reader: Reader) -> dict[str, Any] | None:
        """What is new to this reader; with the facts if it knows nothing yet."""
        follower = self._follower
        with follower.lock:
            first = not reader.began
            news = reader.news(follower.run)
        if news is None:
            return None
        log = follower.log
        read = {} if log.read >= log.size else {"read": round(log.read / max(1, log.size), 3)}
        return {**news, **read, **({"facts": self._facts} if first else {})}
