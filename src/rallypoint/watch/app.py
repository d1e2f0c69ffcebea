"""The page's web application: a few files, and a stream of what changes. It can only be read."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from rallypoint.watch.answer import Reader
from rallypoint.watch.follow import Follower

COOKIE = "rallypoint"
_FILES = {
    "": ("index.html", "text/html; charset=utf-8"), "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"), "uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
    "uplot.css": ("uplot.css", "text/css; charset=utf-8"),
}  # fmt: skip
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
}  # fmt: skip
_HOSTS = ["127.0.0.1", "localhost", "[::1]", "::1"]  # a page elsewhere cannot make a browser ask under its own name
_EVERY_S, _STILL_S = 0.5, 15.0  # between two looks; between two signs of life
_LAST_S = 0.3  # at the end so long for what the follower has not read yet: longer than it takes between two looks
_MOST_STREAMS = 64

Answer = Callable[[Request], Awaitable[Response]]


class Page:
    """The application for one run: ``Page(follower, facts, token).app``.

    `facts` do not change: the run's name, its settings. Whoever opens ``/?token=TOKEN`` gets a cookie; without one
    nothing is answered but ``/healthz``.
    """

    def __init__(self, follower: Follower, facts: dict[str, Any], token: str) -> None:
        self._follower, self._facts, self._token = follower, facts, token
        self._streams, self.closing = 0, False
        routes = [Route("/healthz", _healthy), Route("/run", self._locked(self._whole)),
                  Route("/news", self._locked(self._stream))]  # fmt: skip
        routes += [Route(f"/{path}", self._locked(_file(*what))) for path, what in _FILES.items()]
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS), Middleware(GZipMiddleware)]
        self.app = Starlette(routes=routes, middleware=middleware)

    def _locked(self, answer: Answer) -> Answer:
        async def locked(request: Request) -> Response:
            given = request.query_params.get("token", "")
            if given and self._is_token(given):  # out of the address, so that it is in no history and no screenshot
                response: Response = RedirectResponse(request.url.path, 303)
                response.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            elif self._is_token(request.cookies.get(COOKIE, "")):
                response = await answer(request)
            else:
                response = PlainTextResponse(
                    "open the address that `rallypoint watch` has printed, with its token\n", 403
                )
            response.headers.update(_HEADERS)
            return response

        return locked

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _whole(self, request: Request) -> Response:
        """Everything, once: for scripts."""
        return JSONResponse(self._news(Reader()))

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
        read = {} if follower.read >= follower.size else {"read": round(follower.read / max(1, follower.size), 3)}
        return {**news, **read, **({"facts": self._facts} if first else {})}


async def _healthy(request: Request) -> Response:
    return PlainTextResponse("ok\n")


def _file(name: str, kind: str) -> Answer:
    async def answer(request: Request) -> Response:
        return Response(files("rallypoint.watch").joinpath("page", name).read_bytes(), media_type=kind)

    return answer
