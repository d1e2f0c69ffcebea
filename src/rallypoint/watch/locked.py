"""Who may read a page: who has its token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

HEADER = "X-Rallypoint-Token"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
}  # fmt: skip
_HOSTS = ["127.0.0.1", "localhost", "[::1]", "::1"]  # a page elsewhere cannot make a browser ask under its own name
_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}

Answer = Callable[[Request], Awaitable[Response]]


class Lock:
    """Gives answers to who has `token`: ``lock(answer)`` is one that asks for it first, in the header HEADER.

    It is in no cookie: a browser sends those of 127.0.0.1 to each of its ports, where other users may have servers. The
    page takes it out of the address ``/?token=TOKEN``, and keeps it in the storage of its tab.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, answer: Answer) -> Answer:
        async def locked(request: Request) -> Response:
            if hmac.compare_digest(request.headers.get(HEADER, "").encode(), self._token.encode()):
                response = await answer(request)
            else:
                response = PlainTextResponse(
                    "open the address that `rallypoint watch` has printed, with its token\n", 403
                )
            response.headers.update(_HEADERS)
            return response

        return locked


def middleware() -> list[Middleware]:
    """What stands before every answer: no other host's name, and gzip."""
    return [Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS), Middleware(GZipMiddleware)]


async def healthy(request: Request) -> Response:
    """The page is served."""
    return PlainTextResponse("ok\n")


def file(name: str) -> Answer:
    """A file of the page. Anybody may have it: a browser can send no token before, and it tells nothing of the run."""
    kind = f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8"

    async def answer(request: Request) -> Response:
        text = files("rallypoint.watch").joinpath("page", name).read_bytes()
        return Response(text, media_type=kind, headers=_HEADERS)

    return answer
