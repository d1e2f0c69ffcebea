"""The page's buttons: orders of whoever has the operator's token. Without one the page can only be read."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rallypoint.core.typed import Name
from rallypoint.errors import RallypointError

_MOST_BYTES, _MOST_AT_ONCE = 4096, 4
_WAITING = ("snapshot", "resize")  # orders that may take as long as a machine takes to come
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
    right ``Origin`` either. At most four orders are carried out at a time; and of those that wait for the cluster
    (snapshot, resize) one, beside them, so that a job can always be stopped.
    """

    token: str
    follow: Callable[[Wish], str]
    _quick: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_AT_ONCE))
    _waiting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    async def answer(self, request: Request) -> Response:
        """The answer to ``POST /order``: ``{"said": SENTENCE}``."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if request.headers.get("origin") != f"http://{request.headers.get('host')}":
            return _said("orders come from this page only", 403)
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return _said("that is not the operator's token, which `rallypoint watch --buttons` has printed", 403)
        try:
            wish = _wishes.decode(await _body(request))
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            return _said(f"that is no order: {error}", 400)
        room = self._waiting if wish.order in _WAITING else self._quick
        if room.locked():
            busy = "a snapshot or resize is" if room is self._waiting else f"{_MOST_AT_ONCE} orders are"
            return _said(f"{busy} being carried out: wait for that", 503)
        async with room:
            try:
                return _said(await _on_thread(lambda: self.follow(wish)))
            except RallypointError as error:
                return _said(str(error), 409)


async def _on_thread(call: Callable[[], str]) -> str:
    """Call it on a thread that nobody waits for at the end: an order may take minutes."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def settle(said: str, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result(said) if error is None else answer.set_exception(error)

    def run() -> None:
        said, failed = "", None
        try:
            said = call()
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the page has ended meanwhile
            loop.call_soon_threadsafe(settle, said, failed)

    threading.Thread(target=run, name="order", daemon=True).start()
    return await answer


async def _body(request: Request) -> bytes:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > _MOST_BYTES:
            raise ValueError("it is too long")
    return data


def _said(text: str, status: int = 200) -> Response:
    return JSONResponse({"said": text}, status)
