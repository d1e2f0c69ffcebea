"""The page's buttons: orders of whoever has the operator's token. Without one the page can only be read."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rallypoint.core.typed import Name
from rallypoint.errors import RallypointError

_MOST_BYTES, _MOST_AT_ONCE = 4096, 4
_Number = Annotated[int, msgspec.Meta(ge=0, le=10_000)]


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One press of a button. `member` is for ``drain``, `reason` for ``stop``, numbers (0: keep it) for ``resize``."""

    order: Literal["snapshot", "pause", "continue", "stop", "drain", "resize"]
    member: Name = ""
    reason: Name = ""
    workers: _Number = 0
    servers: _Number = 0


_wishes = msgspec.json.Decoder(Wish)


@dataclass(slots=True)
class Operator:
    """Takes orders from who shows `token`, and has `follow` carry them out.

    `follow` may block, is called on threads of its own, and returns a sentence; RallypointError is a refusal.

    The token comes in a header, never in an address, and a page elsewhere cannot set that header; it could not send a
    right ``Origin`` either. At most four orders are carried out at a time.
    """

    token: str
    follow: Callable[[Wish], str]
    _busy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_AT_ONCE))

    async def answer(self, request: Request) -> Response:
        """The answer to ``POST /order``: ``{"said": SENTENCE}``."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if request.headers.get("origin") != f"http://{request.headers.get('host')}":
            return _said("orders come from this page only", 403)
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return _said("that is not the operator's token, which `rallypoint watch --buttons` has printed", 403)
        if self._busy.locked():
            return _said(f"{_MOST_AT_ONCE} orders are being carried out: wait for one of them", 503)
        try:
            wish = _wishes.decode(await _body(request))
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            return _said(f"that is no order: {error}", 400)
        async with self._busy:
            try:
                return _said(await run_in_threadpool(self.follow, wish))
            except RallypointError as error:
                return _said(str(error), 409)


async def _body(request: Request) -> bytes:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > _MOST_BYTES:
            raise ValueError("it is too long")
    return data


def _said(text: str, status: int = 200) -> Response:
    return JSONResponse({"said": text}, status)
