"""Frames: a fixed 48-byte header, then `length` bytes of payload. Typed, length-limited, never unpickled (I9).

    0  magic      4 bytes "RLPT"
    4  protocol   u8
    5  kind       u8
    6  flags      u8    bit 0, NOT_FINITE: the loss was not finite
                        bit 1, SKIP: the step changes nothing (Replicate; Version of a mean), or the version is no
                        longer kept (Rows, Words)
                        bit 2, NEWEST: if the version is not kept, send the newest one instead (PullRows; step LATEST
                        always asks for the newest)
                        bit 3, BAD_GRADIENT: the values of the contribution are not finite
                        bit 4, LENT: the payload does not follow, it is lent (channel.py)
    7  codec      u8    the codec of the payload (codec/); 0: raw fp32
    8  epoch      u32   the view's number: coordinator epoch ...
    12 count      u32   ... and count (I10)
    16 shard      u32
    20 replica    u32   (Credit: how many; PullWords: the first word, within the shard)
    24 step       u32   (Initial, Version, State, Ack, Replicate, PullRows, Rows, PullWords, Words: the version;
                         CodecState, Taken: the codec state's step; Choice: the step)
    28 base       u32   Push: where a shard's sum is a tree, how many more replicas than `replica`, the first, are in
                        the block; under a streaming policy, the version it was computed from
                        Version, Wait under a streaming policy: the clock
                        (PullRows, Rows, PullWords, Words: the pull's number; CodecState: 1 for a copy for a snapshot,
                        2 for one that is a step ahead; Replicate: the number of contributions in the update;
                        Ack: 1 if the choice of contributions is here too)
    32 weight     f64   (Replicate: the factor on the learning rate)
    40 length     u32   in bytes
    44 wants      u32   which parameters are asked for, or sent: 0 none, 1 the job's last version, r + 2 replica r's
                        (Push of a block: a bit for each of its first 32 replicas that is not finite;
                        PullWords: how many words)
"""

from __future__ import annotations

import enum
import math
import struct
from typing import NamedTuple

from rallypoint.core.view import ViewNumber
from rallypoint.errors import ProtocolError

PROTOCOL = 22
_MAGIC = b"RLPT"
_HEADER = struct.Struct("<4sBBBBIIIIIIdII")
HEADER_BYTES = _HEADER.size

NOT_FINITE = 1
SKIP = 2
NEWEST = 4
BAD_GRADIENT = 8
LENT = 16  # a frame's, not its header's: `pack` sets it, `unpack` leaves it out
LATEST = (1 << 32) - 1
COPY, AHEAD = 1, 2
_FLAGS = NOT_FINITE | SKIP | NEWEST | BAD_GRADIENT


class Kind(enum.IntEnum):
    """The kind of a frame. Group 1 carries msgspec messages, group 2 raw tensors, group 3 no payload."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSE = 4
    CONTROL = 5
    MEASURES = 6
    CHOICE = 7  # a primary tells its backup which contributions make an update
    PROVE = 8  # a primary asks its backup whether it holds the same state

    INITIAL = 16
    PUSH = 17
    VERSION = 18
    REPLICATE = 19
    STATE = 20
    PULL_ROWS = 21
    ROWS = 22
    CODEC_STATE = 23  # a replica's codec state (codec/build.py); empty: there is none, or nothing new
    WORDS = 24  # a range of a shard's parameters at one version

    CREDIT = 32
    FOLLOW = 33
    FETCH = 34
    UNFOLLOW = 35
    ACK = 36
    WANT = 37
    WAIT = 38
    RECALL = 39  # a worker asks for a replica's codec state
    TAKEN = 40  # a server has the codec state that a worker sent
    PULL_WORDS = 41  # a worker asks for a range of a shard's parameters


GREETING_LIMIT = 4 << 10
_LIMITS = {kind: 0 if kind >= Kind.CREDIT else 64 << 20 for kind in Kind} | {
    Kind.CHALLENGE: GREETING_LIMIT,
    Kind.HELLO: GREETING_LIMIT,
    Kind.WELCOME: 1 << 20,
    Kind.REFUSE: 64 << 10,
    Kind.MEASURES: 16 << 20,
    Kind.CHOICE: 1 << 20,
    Kind.PROVE: 16,  # of the digest of the state
    Kind.STATE: 456 << 20,  # parameters, three wire copies, the optimizer's two moments, an average; and their names
    Kind.CODEC_STATE: 256 << 20,  # two vectors, and what was sent of a third; the shard's own limit is checked too
    Kind.ACK: 16,  # the digest of what the backup holds
}  # bytes of a payload


_ENCODED = (Kind.PUSH, Kind.VERSION, Kind.CODEC_STATE)  # may be written by a codec


class Header(NamedTuple):
    """The decoded header of a frame. Fields that a kind does not use are zero."""

    kind: Kind
    view: ViewNumber = ViewNumber()
    shard: int = 0
    replica: int = 0
    step: int = 0
    weight: float = 0.0
    length: int = 0
    flags: int = 0
    codec: int = 0
    base: int = 0
    wants: int = 0

    @property
    def wanted(self) -> int | None:
        """The replica that `wants` names, EVERYTHING (-1), or None."""
        return self.wants - 2 if self.wants else None


def wants(replica: int | None) -> int:
    """The value of the field `wants` for a replica, for EVERYTHING (-1), or for none (None)."""
    return 0 if replica is None else replica + 2


def pack(header: Header, flags: int = 0) -> bytes:
    """Encode the header as 48 bytes, with `flags` beside its own."""
    return _HEADER.pack(
        _MAGIC, PROTOCOL, header.kind, header.flags | flags, header.codec, header.view.epoch, header.view.count,
        header.shard, header.replica, header.step, header.base, header.weight, header.length, header.wants,
    )  # fmt: skip


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """Decode 48 bytes. ProtocolError, with what is wrong, if they are not a header."""
    (
        magic, protocol, kind, flags, codec, epoch, count, shard, replica, step, base, weight, length, wanted,
    ) = _HEADER.unpack(data)  # fmt: skip
    if magic != _MAGIC:
        raise ProtocolError(f"the bytes {magic!r} do not begin a frame: is this another program's connection?")
    if protocol != PROTOCOL:
        raise ProtocolError(f"protocol {protocol} instead of {PROTOCOL}: run the same version of rallypoint everywhere")
    flags &= ~LENT
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"a frame of unknown kind {kind}")
    if length > _LIMITS[known]:
        raise ProtocolError(f"a {known.name} frame of {length} bytes: at most {_LIMITS[known]} are allowed")
    if not math.isfinite(weight) or (codec and known not in _ENCODED) or flags & ~_FLAGS:
        raise ProtocolError(f"a {known.name} frame of weight {weight}, codec {codec}, flags {flags}: impossible")
    return Header(known, ViewNumber(epoch, count), shard, replica, step, weight, length, flags, codec, base, wanted)


_KINDS = {int(kind): kind for kind in Kind}
