"""Probes: one on each machine, before a job runs there. They tell their machine's facts, and measure the links.

A probe greets as the coordinator of a job of its own does, and takes only doctors (observers of this name) that prove
that they know the token. A doctor asks it for facts, or to measure the link to another probe; that probe sees a doctor
too. Nobody else is served, and every answer is bounded: in time, and in bytes.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rallypoint.core.protocol import Hello, Welcome
from rallypoint.core.typed import Count, Name, Seconds, printable
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError
from rallypoint.launch.access import Access
from rallypoint.launch.doctor.facts import Facts
from rallypoint.launch.doctor.findings import Link
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import COORDINATOR, Identity, introduce

NAME = "doctor"
_ROUNDS = 20  # round trips; their median counts
_PIECE = bytes(1 << 20)
_SENDS_S = 1.0  # so long a throughput is measured
_ANSWER_S = 30.0  # a probe that says nothing for longer is gone
_CONNECT_S = 5.0
_LONGEST = 64 << 10  # bytes of a question or an answer


class _Word(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What doctors and probes say to each other, in control frames."""


_T = TypeVar("_T", bound=_Word)


class AskFacts(_Word, frozen=True):
    """Tell your machine's facts."""


class Told(_Word, frozen=True):
    """The facts."""

    facts: Facts


class AskLink(_Word, frozen=True):
    """Measure the link from your machine to the probe at this address."""

    address: Name


class Measured(_Word, frozen=True):
    """The round trip in seconds and the rate in bytes a second; `trouble` says why there are none."""

    round_trip: Seconds = 0.0
    rate: Seconds = 0.0
    trouble: Name = ""


class Ping(_Word, frozen=True):
    """Send this back."""


class AskArrived(_Word, frozen=True):
    """How many bytes of tensor frames have come, and in how many seconds?"""


class Arrived(_Word, frozen=True):
    """Bytes, and the seconds from the first to the last."""

    nbytes: Count
    seconds: Seconds


_decoder = msgspec.msgpack.Decoder(AskFacts | Told | AskLink | Measured | Ping | AskArrived | Arrived)


class Probe:
    """Answers doctors at `bind` until `close`. UsageError if others can reach `bind` and the token is too short."""

    def __init__(self, access: Access, bind: str, facts: Callable[[], Facts]) -> None:
        self._access, self._facts = access, facts
        self._measuring = threading.Lock()  # two measurements at once would halve each other's figures
        me = Identity(COORDINATOR[0], COORDINATOR[1], access.token)
        self._gate = Gate(access.transport, bind, me, _admit, self._serve)
        self.address = self._gate.address

    def close(self) -> None:
        """Stop. Returns when all threads have ended."""
        self._gate.close()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        channel.connection.set_timeout(_ANSWER_S)
        nbytes, first, last = 0, 0.0, 0.0
        while True:
            header = channel.receive_header()
            if header.kind is Kind.STATE:
                first = first or time.monotonic()
                nbytes += _drop(channel, header)
                last = time.monotonic()
                continue
            match _word_of(channel, header):
                case AskFacts():
                    _say(channel, Told(msgspec.structs.replace(self._facts(), clock=time.time())))
                case AskLink(address=address):
                    with self._measuring:
                        _say(channel, _measured(self._access, address))
                case Ping():
                    _say(channel, Ping())
                case AskArrived():
                    _say(channel, Arrived(nbytes, last - first))
                    nbytes, first, last = 0, 0.0, 0.0
                case other:
                    raise ProtocolError(f"a doctor does not say {type(other).__name__}")


class Asking:
    """A doctor's link to the probe at `address`; a context manager. LinkError or AccessDenied if there is none."""

    def __init__(self, access: Access, address: str) -> None:
        self.address = address
        connection = access.transport.connect(address, _CONNECT_S)
        try:
            hello = Hello("observer", NAME, socket.gethostname(), to=COORDINATOR)
            # A machine that is probed needs no coordinator's certificate, with which it could be one
            _, keys = introduce(connection, hello, access.token, certificate="observer")
            self._channel = Channel(connection, address, keys)
        except BaseException:
            connection.close()
            raise
        connection.set_timeout(_ANSWER_S)

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def facts(self) -> Facts:
        """The facts about the probe's machine; `clock` is how far its clock is ahead of this machine's."""
        facts = self._ask(AskFacts(), Told).facts
        return msgspec.structs.replace(facts, clock=facts.clock - time.time())

    def link_to(self, address: str) -> Link:
        """Let the probe measure its link to another probe."""
        found = self._ask(AskLink(address), Measured)
        return Link(self.address, address, found.round_trip, found.rate, printable(found.trouble))

    def measure(self) -> Measured:
        """Measure the link from here to the probe: first round trips, then for a second as many bytes as it takes."""
        took = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            self._ask(Ping(), Ping)
            took.append(time.perf_counter() - began)
        until, sent = time.monotonic() + _SENDS_S, threading.Semaphore(4)
        while time.monotonic() < until:
            sent.acquire()
            self._channel.send(Header(Kind.STATE, length=len(_PIECE)), memoryview(_PIECE), sent.release)
            if self._channel.fault is not None:
                break
        arrived = self._ask_behind(AskArrived(), Arrived)
        rate = arrived.nbytes / arrived.seconds if arrived.seconds else 0.0
        return Measured(statistics.median(took), rate)

    def _ask_behind(self, word: _Word, kind: type[Arrived]) -> Arrived:
        """Ask behind the bulk, not before it."""
        data = msgspec.msgpack.encode(word)
        self._channel.send(Header(Kind.CONTROL, length=len(data)), memoryview(data))
        return self._answer(kind)

    def _ask(self, word: _Word, kind: type[_T]) -> _T:
        _say(self._channel, word)
        return self._answer(kind)

    def _answer(self, kind: type[_T]) -> _T:
        answer = _word_of(self._channel, self._channel.receive_header())
        if not isinstance(answer, kind):
            raise ProtocolError(f"{self.address} answered with {type(answer).__name__}")
        return answer


def _measured(access: Access, address: str) -> Measured:
    try:
        with Asking(access, address) as asking:
            return asking.measure()
    except RallypointError as error:
        return Measured(trouble=printable(str(error), 150))


def _admit(hello: Hello) -> Welcome:
    if (hello.role, hello.id) != ("observer", NAME):
        raise AccessDenied("this is a probe of `rallypoint doctor`, not a job's coordinator")
    return Welcome()


def _say(channel: Channel, word: _Word) -> None:
    data = msgspec.msgpack.encode(word)
    channel.send(Header(Kind.CONTROL, length=len(data)), memoryview(data), urgent=True)


def _word_of(channel: Channel, header: Header) -> object:
    """Receive the rest of a control frame. ProtocolError if it is none, or cannot be read."""
    if header.kind is Kind.REFUSE:
        channel.receive_bytes(header)
        raise LinkError(f"{channel.name} has ended the connection")
    if header.kind is not Kind.CONTROL or header.length > _LONGEST:
        raise ProtocolError(f"a {header.kind.name} frame of {header.length} bytes from a doctor or a probe")
    data = channel.receive_bytes(header)
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a question that cannot be read: {printable(str(error), 80)}") from None


def _drop(channel: Channel, header: Header) -> int:
    """Receive a piece of bulk, and forget it. Returns its bytes."""
    if header.length > len(_PIECE):
        raise ProtocolError(f"a piece of {header.length} bytes: at most {len(_PIECE)} are asked for")
    return len(channel.receive_bytes(header))
