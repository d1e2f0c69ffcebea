"""What arrives on a store's links, checked: values, answers, and the ends of links. Called on the links' threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rallypoint.config import JobConfig
from rallypoint.core import keys as machine
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.view import Member
from rallypoint.core.worker.links import LinkTable
from rallypoint.errors import JobAborted, ProtocolError, RallypointError
from rallypoint.net.frames import SKIP, Header
from rallypoint.worker.keys.answers import Answers


class Heard(Protocol):
    """Takes what has arrived; the exchange of the store. Each takes the lock."""

    def valued(self, shard: int, contributor: int, clock: int, version: int, data: bytearray) -> None:
        """The answer to a want, with the shard's value."""

    def answered(self, shard: int, number: int, version: int, data: bytearray | None) -> None:
        """The answer to a pull; None: the version is not kept any more."""

    def fits(self, number: int, nbytes: int) -> bool:
        """Can so many bytes of rows answer the pull with that number?"""

    def to_wait(self, contributor: int) -> None:
        """The policy makes the contributor wait."""

    def link_up(self, server: str) -> None:
        """The link is up (again)."""

    def link_lost(self, server: str) -> None:
        """The link has ended."""

    def fail(self, error: BaseException) -> None:
        """Raise this error in whatever waits."""


class KeyArrivals:
    """The `Receiver` of all links of one store."""

    def __init__(self, layout: Layout, config: JobConfig, heard: Heard) -> None:
        self._layout, self._contributors, self._heard = layout, config.replicas, heard
        self._steps = config.rounds
        self._most = config.rounds * (config.replicas if config.clocks("parameters") else 1)  # versions of a shard
        self._landing = threading.local()  # each link has a thread, and receives one value at a time

    def arriving(self, header: Header, server: str) -> memoryview | None:
        shard = self._shard(header)
        nbytes = shard.nbytes if shard.part is None else 0
        if header.codec or header.length != nbytes:
            raise ProtocolError(f"{header.length} bytes for shard {shard.index}, which has {nbytes}")
        if header.wanted is None or not 0 <= header.wanted < self._contributors:
            raise ProtocolError(f"the parameters of contributor {header.wanted}: there are {self._contributors}")
        if header.base > self._steps:
            raise ProtocolError(f"contributor {header.wanted} is said to be at step {header.base} of {self._steps}")
        self._landing.now = header, bytearray(header.length)
        return memoryview(self._landing.now[1])

    def landed(self, shard: int) -> None:
        header, data = self._landing.now
        self._heard.valued(shard, header.wants - 2, header.base, header.step, data)

    def rows(self, header: Header, data: bytearray) -> None:
        shard = self._shard(header)
        if header.flags & SKIP:
            self._heard.answered(shard.index, header.base, header.step, None)
        elif len(data) != shard.nbytes if shard.part is None else not self._heard.fits(header.base, len(data)):
            raise ProtocolError(f"{len(data)} bytes of shard {shard.index}, for another number of rows")
        else:
            self._heard.answered(shard.index, header.base, header.step, data)

    def to_wait(self, replica: int, clock: int) -> None:
        if not 0 <= replica < self._contributors:
            raise ProtocolError(f"contributor {replica} is to wait: there are {self._contributors}")
        self._heard.to_wait(replica)

    def link_up(self, server: Member) -> None:
        self._heard.link_up(server.id)

    def link_lost(self, server: Member, error: RallypointError) -> None:
        if isinstance(error, ProtocolError):
            self._heard.fail(JobAborted(f"the link to server {server.id} is gone: {error}"))
        self._heard.link_lost(server.id)

    def link_failed(self, server: Member, fault: Exception) -> None:
        self._heard.fail(JobAborted(f"the link to server {server.id} has failed: {fault!r}"))

    def _shard(self, header: Header) -> Shard:
        if not 0 <= header.shard < len(self._layout.shards):
            raise ProtocolError(f"a {header.kind.name} frame for shard {header.shard}: not in this store's layout")
        if header.step > self._most:
            raise ProtocolError(f"version {header.step} of shard {header.shard}, which has {self._most} at most")
        return self._layout.shards[header.shard]

    # ---- what no server sends to a store ----

    def decode(self, shard: int, payload: memoryview) -> None:
        raise ProtocolError(f"an encoded value of shard {shard}: a store's values are raw")

    def words_arriving(self, header: Header) -> memoryview | None:
        raise ProtocolError(f"a {header.kind.name} frame: this job is a store")

    def words_arrived(self, header: Header) -> None:
        raise ProtocolError(f"a {header.kind.name} frame: this job is a store")

    def state(self, header: Header, data: bytearray, server: str) -> None:
        raise ProtocolError(f"a {header.kind.name} frame: this job is a store")

    def check_codec_state(self, header: Header) -> None:
        raise ProtocolError(f"a {header.kind.name} frame: this job is a store")

    def codec_state(self, header: Header, data: bytearray) -> None:
        raise ProtocolError(f"a {header.kind.name} frame: this job is a store")

    def codec_state_taken(self, header: Header) -> None:
        raise ProtocolError(f"a {header.kind.name} frame: this job is a store")


# ---- What has arrived on a store's links goes to the machine, and to who has asked. See `arrivals.Heard` ----


Change = Callable[[], Sequence[machine.Effect]]


@dataclass(frozen=True, slots=True)
class KeysHeard:
    """Called on the links' threads. `changed` is the exchange's lock; `apply` makes a change under it, and then sends
    what follows; `fail` ends all waits with an error."""

    keys: machine.KeyMachine
    answers: Answers
    table: LinkTable
    changed: threading.Condition
    apply: Callable[[Change], None]
    fail: Callable[[BaseException], None]

    def valued(self, shard: int, contributor: int, clock: int, version: int, data: bytearray) -> None:
        """The answer to a want, with the shard's value (of a part of a table: without any)."""

        def replied() -> list[machine.Effect]:
            counts = clock > self.keys.lines[shard].pushes.get(contributor, clock)
            if counts and shard not in self.keys.tables:
                self.answers.with_push[shard] = version, data
            return self.keys.replied(shard, contributor, clock, version)

        self.apply(replied)

    def answered(self, shard: int, number: int, version: int, data: bytearray | None) -> None:
        """The answer to a pull; None: the version is not kept any more."""

        def answers() -> list[machine.Effect]:
            pushed = bool(self.keys.lines[shard].pushes)
            done, effects = self.keys.answered(shard, number, version, kept=data is not None)
            if data is not None:
                self.answers.came(done, version, data)
                if number == machine.OWN and pushed and shard not in self.keys.tables:
                    self.answers.with_push[shard] = version, data
            return effects

        self.apply(answers)

    def to_wait(self, contributor: int) -> None:
        """The policy makes the contributor wait."""
        self.apply(lambda: self.keys.to_wait(contributor))

    def link_up(self, server: str) -> None:
        """The link is up (again)."""
        self.apply(lambda: self.keys.link_up(server) if self.table.up(server) else [])

    def link_lost(self, server: str) -> None:
        """The link has ended."""

        def lost() -> list[machine.Effect]:
            self.table.lost(server)
            return self.keys.link_lost(server)

        self.apply(lost)

    def fits(self, number: int, nbytes: int) -> bool:
        """Can so many bytes of rows answer the pull with that number?"""
        with self.changed:
            return self.answers.fits(number, nbytes) if number != machine.OWN else not nbytes
