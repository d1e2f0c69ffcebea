"""Control messages: typed msgspec structs, encoded as msgpack. Small, rare, and not on the path of a step."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from rallypoint.core.job import JobRecord
from rallypoint.core.view import View
from rallypoint.errors import ProtocolError


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# ---- greeting --------------------------------------------------------------------------------------------------


class Challenge(_Message, frozen=True):
    """The listener's nonce; the answer proves the token without sending it."""

    nonce: bytes


class Hello(_Message, frozen=True):
    """Who connects: `role` is worker, server or observer; `address` is where a server listens."""

    role: str
    id: str
    host: str
    proof: bytes
    address: str = ""


class Welcome(_Message, frozen=True):
    """You are in. `overrides` come from the launcher's command line, `trace` says which steps to trace."""

    overrides: dict[str, Any] = {}
    folder: str = ""
    trace: tuple[int, int] = (0, 0)


class Refused(_Message, frozen=True):
    """You are not in, or no longer; the reason is a sentence."""

    reason: str


# ---- member to coordinator -------------------------------------------------------------------------------------


class Propose(_Message, frozen=True):
    """A worker's model and settings."""

    record: JobRecord


class Prepared(_Message, frozen=True):
    """A server has made room for its shards."""


class Report(_Message, frozen=True):
    """A replica's step: its loss, its weight, its samples."""

    step: int
    replica: int
    loss: float
    weight: float
    items: int


class Metrics(_Message, frozen=True):
    """What an evaluation found after `step` updates."""

    step: int
    values: dict[str, float]


class Say(_Message, frozen=True):
    """A line for the console and the event log."""

    text: str


class Skipped(_Message, frozen=True):
    """A step was skipped on all servers because these replicas (or the gradient) were not finite."""

    step: int
    replicas: tuple[int, ...]


class Done(_Message, frozen=True):
    """This worker holds the last version."""


class GiveUp(_Message, frozen=True):
    """This member cannot go on."""

    reason: str


# ---- coordinator to member -------------------------------------------------------------------------------------


class Prepare(_Message, frozen=True):
    """To servers: the job and the view."""

    record: JobRecord
    view: View


class Start(_Message, frozen=True):
    """To workers: the view; the job runs."""

    view: View


class Finished(_Message, frozen=True):
    """Everybody may go home."""


class Aborted(_Message, frozen=True):
    """The job cannot go on."""

    reason: str


# ---- coordinator to observer -----------------------------------------------------------------------------------


class Planned(_Message, frozen=True):
    """The job that runs: what a progress line needs to know."""

    steps: int
    replicas: int
    item: str
    words: int
    shards: int
    workers: tuple[str, ...]
    servers: tuple[str, ...]


class StepDone(_Message, frozen=True):
    """All replicas have reported `step`; `loss` is their weighted mean."""

    step: int
    loss: float
    items: int


class Waiting(_Message, frozen=True):
    """What the job waits for (I8)."""

    text: str


Message = (
    Challenge | Hello | Welcome | Refused | Propose | Prepared | Report | Metrics | Say | Skipped | Done | GiveUp
    | Prepare | Start | Finished | Aborted | Planned | StepDone | Waiting
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_M = TypeVar("_M")


def encode(message: Message) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message in these bytes. ProtocolError when there is none."""
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a control message that cannot be read: {error}") from None
    return message


def expect(data: bytes | bytearray | memoryview, kind: type[_M]) -> _M:
    """The message in these bytes, which must be a `kind`. ProtocolError otherwise."""
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"a {type(message).__name__} message where {kind.__name__} was expected")
    return message
