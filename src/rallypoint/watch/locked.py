"""Who may read a page: who has its token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

COOKIE = "rallypoint"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
}  # fmt: skip
_HOSTS = ["127.0.0.1", "localhost", "[::1]", "::1"]  # a page elsewhere cannot make a browser ask under its own name
_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}

Answer = Callable[[Request], Awaitable[Response]]


class Lock:
    """Gives answers to who has `token`: ``lock(answer)`` is one that asks for it first.

    Whoever opens an address with ``?token=TOKEN`` gets a cookie.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, answer: Answer) -> Answer:
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


def middleware() -> list[Middleware]:
    """What stands before every answer: no other host's name, and gzip."""
    return [Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS), Middleware(GZipMiddleware)]


async def healthy(request: Request) -> Response:
    """The page is served."""
    return PlainTextResponse("ok\n")


def file(name: str) -> Answer:
    """A file of the page."""
    kind = f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8"

    async def answer(request: Request) -> Response:
        return Response(files("rallypoint.watch").joinpath("page", name).read_bytes(), media_type=kind)

    return answer
