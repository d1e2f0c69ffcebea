"""Frames as an attacker makes them: real ones, recorded from a running job, with something changed."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from rallypoint.core.view import ViewNumber
from rallypoint.net.frames import Header, Kind

_EDGES = [0, 1, 2, 3, 7, 8, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1]
_NUMBERS = [
    -1, 0, 1, 2, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 0.0, -0.5,
    1e-300, 1e12, 1e300, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
_WORDS = [float("nan"), float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e-45, -0.0, 1e6]
_TEXTS = ["", "worker0", "server0", "x" * 5000, "\x1b[2J\x00\n", "../../etc", "\u202e", "é" * 199]
_MESSAGES = (Kind.CONTROL, Kind.MEASURES, Kind.CHOICE, Kind.CHALLENGE, Kind.HELLO, Kind.WELCOME, Kind.REFUSE)
_KEPT = 200  # frames of each kind
_LONGEST = 1 << 16  # bytes by which a payload may grow


class Frame(NamedTuple):
    """A frame before it is sealed. `header.length` may lie."""

    header: Header
    payload: bytes = b""


class Corpus:
    """Real frames by kind, a bounded number of each; of control messages, by the message's type."""

    def __init__(self) -> None:
        self._frames: dict[object, list[Frame]] = defaultdict(list)
        self._seen: dict[object, int] = defaultdict(int)

    def add(self, frame: Frame) -> None:
        """Keep the frame; once there are enough of its kind, in the place of another one."""
        kind: object = frame.header.kind
        if kind is Kind.CONTROL:
            kind = msgspec.msgpack.decode(frame.payload)["type"]
        self._seen[kind] += 1
        frames = self._frames[kind]
        if len(frames) < _KEPT:
            frames.append(frame)
        else:
            frames[self._seen[kind] * 7919 % _KEPT] = frame

    @property
    def kinds(self) -> list[object]:
        """What there is: kinds of frames, and names of control messages."""
        return sorted(self._frames, key=str)

    def frames(self, kind: object) -> list[Frame]:
        """All kept frames of this kind."""
        return self._frames[kind]

    def choose(self, rng: random.Random, kinds: list[object] | None = None) -> Frame:
        """Some frame; every kind is as likely as every other one."""
        return rng.choice(self._frames[rng.choice(self.kinds if kinds is None else kinds)])


class Mutator:
    """Changes something in a frame: a field of its header, its payload, what the payload says, its kind."""

    def __init__(self, rng: random.Random, corpus: Corpus) -> None:
        self.rng, self.corpus = rng, corpus

    def mutate(self, frame: Frame, *, gently: bool = False) -> Frame:
        """The frame with one to three changes; in one of ten cases unchanged: said once more.

        gently: it stays a possible one of its kind and length, so that the connection mostly goes on.
        """
        rng = self.rng
        if rng.random() < 0.1:
            return frame
        if gently:
            return rng.choice([self._plausible, self._plausible, self._words, self._another])(frame)
        ways: list[Callable[[Frame], Frame]] = [self._field, self._field, self._field, self._bytes]
        if frame.payload:
            ways += [self._longer, self._shorter, self._other_payload]
            ways += [self._said, self._said, self._said] if frame.header.kind in _MESSAGES else [self._words]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            frame = rng.choice(ways)(frame)
        return frame

    def lie(self, frame: Frame) -> Frame:
        """The frame with another length than its payload has: what follows it is not understood any more."""
        return frame._replace(header=frame.header._replace(length=self._number(frame.header.length)))

    # ---- the header ----

    def _number(self, now: int) -> int:
        rng = self.rng
        return rng.choice(
            [max(0, now - 1), min(now + 1, (1 << 32) - 1), rng.randrange(6), rng.choice(_EDGES), rng.randrange(1 << 32)]
        )

    def _plausible(self, frame: Frame) -> Frame:
        """Numbers that could be: near the true one, or small."""
        rng, header = self.rng, frame.header
        field = rng.choice(["view", "shard", "replica", "step", "base", "wants"])
        if field == "view":
            count = max(0, header.view.count + rng.choice([-2, -1, 1]))
            return frame._replace(header=header._replace(view=ViewNumber(header.view.epoch, count)))
        near = rng.choice([max(0, getattr(header, field) + rng.choice([-2, -1, 1, 2])), rng.randrange(20)])
        return frame._replace(header=header._replace(**{field: near}))

    def _another(self, frame: Frame) -> Frame:
        """Another frame of the same kind as it was, or its payload under this header if it is as long."""
        kind: object = frame.header.kind
        others = self.corpus.frames(kind) if kind is not Kind.CONTROL else []
        other = self.rng.choice(others) if others else frame
        if len(other.payload) == len(frame.payload) and self.rng.random() < 0.7:
            return self._with(frame, other.payload)
        return other

    def _field(self, frame: Frame) -> Frame:
        rng, header = self.rng, frame.header
        match rng.choice(["view", "shard", "replica", "step", "base", "wants", "weight", "flags", "codec", "kind"]):
            case "view":
                epoch, count = self._number(header.view.epoch), self._number(header.view.count)
                number = rng.choice([ViewNumber(header.view.epoch, count), ViewNumber(epoch, header.view.count)])
                return frame._replace(header=header._replace(view=number))
            case "weight":
                weight = rng.choice([0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), rng.uniform(-2, 2)])
                return frame._replace(header=header._replace(weight=weight))
            case "flags":
                return frame._replace(header=header._replace(flags=rng.choice([1, 2, 4, 8, 15, 16, 255])))
            case "codec":
                return frame._replace(header=header._replace(codec=rng.randrange(256) % rng.choice([12, 256])))
            case "kind":
                return frame._replace(header=header._replace(kind=rng.choice(list(Kind))))
            case field:
                return frame._replace(header=header._replace(**{field: self._number(getattr(header, field))}))

    # ---- the payload ----

    def _with(self, frame: Frame, payload: bytes) -> Frame:
        return Frame(frame.header._replace(length=len(payload)), payload)

    def _longer(self, frame: Frame) -> Frame:
        more = self.rng.choice([1, 3, 4, 64, len(frame.payload), self.rng.randrange(1, _LONGEST)])
        return self._with(frame, frame.payload + self.rng.randbytes(min(more, _LONGEST)))

    def _shorter(self, frame: Frame) -> Frame:
        return self._with(frame, frame.payload[: self.rng.choice([0, 4, self.rng.randrange(len(frame.payload) + 1)])])

    def _bytes(self, frame: Frame) -> Frame:
        data = bytearray(frame.payload)
        for _ in range(self.rng.randrange(1, 5) if data else 0):
            data[self.rng.randrange(len(data))] = self.rng.randrange(256)
        return self._with(frame, bytes(data))

    def _words(self, frame: Frame) -> Frame:
        """Some words of fp32 (or of a codec's scales) become extreme."""
        data = bytearray(frame.payload)
        for _ in range(self.rng.randrange(1, 4)):
            if len(data) >= 4:
                at = self.rng.randrange(len(data) // 4) * 4
                data[at : at + 4] = struct.pack("<f", self.rng.choice(_WORDS))
        return self._with(frame, bytes(data))

    def _other_payload(self, frame: Frame) -> Frame:
        return self._with(frame, self.corpus.choose(self.rng).payload)

    # ---- what a message says ----

    def _said(self, frame: Frame) -> Frame:
        try:
            content = msgspec.msgpack.decode(frame.payload)
        except (msgspec.DecodeError, UnicodeDecodeError):  # something else has been changed in it before
            return self._bytes(frame)
        return self._with(frame, msgspec.msgpack.encode(self._changed(content)))

    def _changed(self, content: Any) -> Any:
        """The same with one thing changed somewhere in it."""
        rng = self.rng
        if isinstance(content, dict) and content and rng.random() < 0.9:
            key = rng.choice(list(content))
            match rng.randrange(8):
                case 0:
                    return {k: v for k, v in content.items() if k != key}
                case 1:
                    return {**content, rng.choice([*_TEXTS, 0, -1, 1 << 40]): content[key]}
                case _:
                    return {**content, key: self._changed(content[key])}
        if isinstance(content, list) and content and rng.random() < 0.9:
            at = rng.randrange(len(content))
            match rng.randrange(8):
                case 0:
                    return content[:at] + content[at + 1 :]
                case 1:
                    return content + content[at : at + 1] * rng.choice([1, 3, 1000])
                case _:
                    return [*content[:at], self._changed(content[at]), *content[at + 1 :]]
        return self._leaf(content)

    def _leaf(self, content: Any) -> Any:
        rng = self.rng
        if rng.random() < 0.15:
            deep: Any = None
            for _ in range(rng.choice([1, 50, 600])):
                deep = [deep]
            return rng.choice([None, True, [], {}, b"", b"\xff" * 33, "x", 1, 0.5, deep, [content] * 40])
        if isinstance(content, bool):
            return not content
        if isinstance(content, int) and rng.random() < 0.5:
            return max(-(1 << 63), min(content + rng.choice([-1, 1, 2]), (1 << 64) - 1))
        if isinstance(content, int | float):
            return rng.choice(_NUMBERS)
        if isinstance(content, bytes):
            return rng.choice([content[:-1], content + b"\0", bytes(len(content)), rng.randbytes(32)])
        return rng.choice(_TEXTS) if isinstance(content, str) else content
