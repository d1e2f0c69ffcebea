"""TCP, with large payloads by NIXL's one-sided writes into the other side's memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import mmap
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

from rallypoint.errors import LinkError, UsageError, to_install
from rallypoint.net.handshake import expand
from rallypoint.net.memory import heard, say
from rallypoint.net.tcp import TcpConnection, TcpListener, TcpTransport
from rallypoint.net.transport import PLAIN, Lender, Secured
from rallypoint.observe.lines import Sparingly
from rallypoint.observe.usage import Traffic

# ---- What we use of NIXL: an agent with UCX, memory that others may write, and writes into theirs ----
#
# An agent has two threads of its own (outside Python), and file descriptors. It starts with the first connection that
# needs it and ends with the last (`Agents`).
#
# Memory that was written by others is never given back to the system while the agent lives. UCX's emulated writes (over
# TCP, say) go to an address that the sender names, also when we have taken the registration back: a write that comes
# too late must not meet memory that is something else by now. So the memory of a connection that has ended waits to
# become that of another connection, whose frames have MACs.

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")  # wheels of the same API; the first two need no CUDA on the machine
_BACKEND = "UCX"
_PROGRESS_US = 1000  # NIXL's thread looks so often for what UCX has to do in software; with 0 it never sleeps
_STARTING = threading.Lock()  # of the environment, which all agents of the process share


class Remote(NamedTuple):
    """Memory of another agent that we may write: its agent's name there, and where it begins."""

    agent: str
    address: int


class Region:
    """Bytes that an agent may write from, and that others may write into. Never moved, never unmapped by us.

    It is shared with children of this process (MAP_SHARED), so a fork does not make copies that the device misses.
    """

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes
        self.registered: Any = None


class Write:
    """A write on its way. `done` asks how it goes; `end` is called in any case, at last."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state

    def done(self) -> bool:
        """Have all bytes arrived? LinkError if they never will."""
        if self._state == "PROC":
            self._state = _asked(lambda: self._agent.check_xfer_state(self._handle))
        if self._state not in ("DONE", "PROC"):
            raise LinkError("a write into the other side's memory has failed")
        return self._state == "DONE"

    def end(self) -> bool:
        """Let it go. Returns False if it is still on its way, and reads our memory."""
        try:
            self._handle.release()
        except Exception:  # it cannot be cancelled; the agent lets it go at its own end
            return False
        return True


class Agent:
    """One NIXL agent with UCX. Thread-safe. LinkError, with the reason, if it cannot be started.

    `environment`: variables that UCX reads while it starts (`choice.environment_of`).
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        try:
            self._nixl = _started(environment)
        except Exception as error:  # no library, no device, no memory: the connection goes on without
            raise LinkError(f"NIXL cannot be started: {error!r}") from None
        self._lock = threading.Lock()
        self._spare: list[Region] = []
        self._kept: list[Region] = []  # registered and mapped until the agent ends
        self._peers: dict[str, int] = {}  # how many connections use each

    def memory(self, nbytes: int) -> Region:
        """Registered memory of this size. LinkError if it cannot be registered."""
        with self._lock:
            found = next((memory for memory in self._spare if memory.nbytes == nbytes), None)
            if found is not None:
                self._spare.remove(found)
        memory = found or Region(nbytes)
        try:
            memory.registered = _asked(lambda: self._nixl.register_memory([(memory.address, nbytes, 0, "")], "DRAM"))
        except LinkError:
            with self._lock:
                self._spare.append(memory)  # others may have written it, so it stays mapped
            raise
        return memory

    def release(self, memory: Region, *, in_use: bool) -> None:
        """Nobody may write this memory any more. `in_use`: a write of our own may still read it, so it stays."""
        if in_use:
            with self._lock:
                self._kept.append(memory)
            return
        with contextlib.suppress(Exception):  # the agent takes back what is left
            self._nixl.deregister_memory(memory.registered)
        with self._lock:
            self._spare.append(memory)

    def described(self, memory: Region) -> bytes:
        """What another agent needs so that it can write this memory: its `load`."""
        return bytes(self._nixl.get_partial_agent_metadata(memory.registered, True, [_BACKEND]))

    def load(self, description: bytes) -> str:
        """Get to know another agent and its memory. Returns its name, for `forget`. LinkError if it cannot be."""
        with self._lock:
            try:
                name = self._nixl.add_remote_agent(description)
            except Exception as error:
                raise LinkError(f"NIXL cannot reach the other side's memory: {error!r}") from None
            text = name.decode() if isinstance(name, bytes) else str(name)
            self._peers[text] = self._peers.get(text, 0) + 1
            return text

    def forget(self, name: str) -> None:
        """A connection to that agent has ended; after the last one it is no longer known."""
        with self._lock:
            self._peers[name] -= 1
            if not self._peers[name]:
                del self._peers[name]
                with contextlib.suppress(Exception):
                    self._nixl.remove_remote_agent(name)

    def write(self, memory: Region, offset: int, count: int, to: Remote, at: int) -> Write:
        """Begin to write `count` bytes of our memory from `offset` to the other's, `at` bytes from its beginning.

        LinkError if it cannot begin.
        """
        mine, theirs = (memory.address + offset, count, 0), (to.address + at, count, 0)
        places = _asked(lambda: [self._nixl.get_xfer_descs([one], "DRAM") for one in (mine, theirs)])  # (of 64 bits)
        handle = _asked(lambda: self._nixl.initialize_xfer("WRITE", *places, to.agent))
        try:
            return Write(self._nixl, handle, _asked(lambda: self._nixl.transfer(handle)))
        except LinkError:
            with contextlib.suppress(Exception):
                handle.release()
            raise

    def close(self) -> None:
        """End the agent's threads; its memory goes with the last reference. No connection uses it any more."""
        del self._nixl


class Agents:
    """One agent for all connections that are open, and none when there is none. Thread-safe."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._users = 0

    def taken(self) -> Agent:
        """The agent, for one more connection. LinkError if it cannot be started."""
        with self._lock:
            if self._agent is None:
                self._agent = Agent(self._environment)
            self._users += 1
            return self._agent

    def given_back(self) -> None:
        """A connection needs it no more."""
        with self._lock:
            self._users -= 1
            if not self._users and self._agent is not None:
                self._agent.close()
                self._agent = None


def installed() -> str:
    """The name of the NIXL package that is installed; "" if there is none. Imports nothing of it."""
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), "")


def _started(environment: Mapping[str, str]) -> Any:
    api = importlib.import_module(f"{installed() or MODULES[0]}._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes its news to the standard output
    name = uuid.uuid4().hex
    with _STARTING, _variables(environment):
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=[], enable_prog_thread=False))
        agent.agent = api.nixlBind.nixlAgent(name, _settings(api.nixlBind))  # NIXL's Python has no name for the delay
        agent.create_backend(_BACKEND)
    return agent


def _settings(bindings: Any) -> Any:
    settings = bindings.nixlAgentConfig()
    settings.useProgThread, settings.useListenThread = True, False
    settings.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    settings.pthrDelay = _PROGRESS_US
    return settings


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables for a moment: UCX takes its settings from nowhere else."""
    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def _asked(ask: Any) -> Any:
    """What NIXL answers. Its exceptions have no common class: each is a LinkError here."""
    try:
        return ask()
    except Exception as error:
        raise LinkError(f"NIXL has failed: {error!r}") from None


# ---- Which way large payloads go: by the network card into memory, or through the stream like all else ----

TCP, NIXL, AUTO = "tcp", "nixl", "auto"
TRANSPORTS = (TCP, NIXL, AUTO)
DEVICES = Path("/sys/class/infiniband")  # Linux lists InfiniBand, RoCE and other RDMA cards here


def rdma_devices(folder: Path = DEVICES) -> tuple[str, ...]:
    """The names of this machine's RDMA devices, as ("mlx5_0",)."""
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()


def chosen(word: str, *, secure: bool, devices: Path = DEVICES) -> str:
    """TCP or NIXL, for what a person has asked for: TCP, NIXL, or AUTO (NIXL where the machine has a device for it).

    UsageError for another word, and where NIXL is asked for and the package is missing, or links have TLS.
    """
    if word not in TRANSPORTS:
        raise UsageError(f"there is no transport '{word}': choose of {', '.join(TRANSPORTS)}")
    if word == NIXL and secure:
        raise UsageError("--transport nixl does not encrypt, and --tls asks for that: choose one of the two")
    if word == NIXL and not installed():
        raise UsageError(f"--transport nixl needs NIXL ({', '.join(MODULES[:2])}): {to_install('rdma')}")
    if word == AUTO:
        return NIXL if rdma_devices(devices) and installed() and not secure else TCP
    return word


def environment_of(devices: Path = DEVICES, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables with which UCX is to start, where nobody has set them.

    UCX asks nobody who connects to it for a proof, and lets who has connected write any memory of the process. So it
    stays off the machine's ordinary networks: with RDMA devices it uses them, and no TCP. Without, it uses shared
    memory and loopback, for trying it out. Whoever sets UCX_TLS or UCX_NET_DEVICES says what is right instead.
    """
    given = os.environ if given is None else given
    # Where there is no device for it, UCX's part for InfiniBand only brings a libnl that crashes at the process's end.
    without = {"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"}
    wanted = {"UCX_TLS": "^tcp"} if rdma_devices(devices) else without
    return {name: value for name, value in wanted.items() if name not in given}


# ---- The large payloads of one connection, written by NIXL into a ring of memory of the other side ----
#
#     sender                                                      receiver
#       waits until there is room below the edge                    its memory:  [ ring ][ edge ]
#       copies a piece into its own registered memory
#       WRITE: piece  ------------------------------------------->  ring, at (bytes written before) mod its size
#       when the write has arrived, in the TCP stream:
#       record (inline, in the ring), inline bytes  ------------->  copies the piece out of the ring
#       its edge  <------------------------- WRITE: edge  --------  bytes taken + size of the ring, now and then
#
# All that goes through the stream is in records of 8 bytes and so many inline bytes; order, life and end of the
# connection are the stream's. The edge goes by a write too, because a sender must hear of room while nobody receives on
# its side. Both counts only rise.
#
# What lies in the ring may change under the receiver's eyes: the other side can write there any time. So bytes are
# copied out first, and who called `recv_into` checks the copy (`channel.py`). The sender's place in the ring follows
# from what it has sent, and the receiver's from what it has taken, so no record can name a place outside.

PIECE = 512 << 10  # bytes of one write; two are on their way: one is copied while the other one travels
LEAST_BYTES = 32 << 10  # shorter payloads go through the stream
_LONGEST_RECORD = 1 << 30  # inline bytes of one record
_RECORD = struct.Struct("<II")  # inline bytes, bytes in the ring
_EDGE = struct.Struct("<Q")
PAGE = 4096
_LOOK = 32  # moments of a wait, after which we look whether the other side is there
_GONE_S = 2.0  # a write that has not arrived so long after the other side's end never will
Pause = Callable[[int], None]  # waits a moment, the n-th of this wait; LinkError when the wait is over


class RingLayout:
    """Where things are in the memory of one side, whose ring has `ring` bytes: a multiple of a page."""

    def __init__(self, ring: int) -> None:
        self.ring = ring
        self.edge = ring  # the other side writes here how far we may send
        self.told = ring + _EDGE.size  # what we write there
        self.pieces = ring + PAGE
        self.nbytes = self.pieces + 2 * PIECE


class Rings:
    """Sends and receives in records. One thread may send while another one receives. See the module.

    `there`: the other side's memory, laid out as `theirs`. `pause` is called again and again while a thread waits.
    """

    def __init__(
        self, stream: TcpConnection, agent: Agent, memory: Region, mine: RingLayout, there: Remote, theirs: RingLayout,
        pause: Pause,
    ) -> None:  # fmt: skip
        self._stream, self._agent, self._memory, self._pause = stream, agent, memory, pause
        self._mine, self._there, self._theirs = mine, there, theirs
        self._view = memory.view
        self._window = mine.ring
        self.stuck = False  # a write of ours may still read our memory
        self._slot = 0
        self._sent = self._edge = 0  # of the other side's ring
        self._taken = self._granted = 0  # of ours
        self._inline = self._in_ring = 0  # what is left of the record that came last
        self._record = memoryview(bytearray(_RECORD.size))
        self._granting = threading.Lock()

    # ---- sending: one thread only ----

    def send(self, head: bytes, payload: memoryview | None, *, by_ring: bool = True) -> None:
        """Send both completely. LinkError when that cannot be; then the stream is of no use any more."""
        if payload is None or len(payload) < LEAST_BYTES or not by_ring:
            self._send_inline(head, payload)
            return
        going: tuple[Write, bytes, int] | None = None
        try:
            while len(payload):
                if going is not None and not self._room():
                    last, going = going, None
                    self._arrived(*last)  # only then can the other side make room
                count = min(len(payload), PIECE, self._wait_for_room())
                write = self._begin(payload[:count])
                if going is not None:
                    before, going = going, (write, b"", count)
                    self._arrived(*before)
                else:
                    going = write, head, count
                head, payload = b"", payload[count:]
            if going is not None:
                last, going = going, None
                self._arrived(*last)
        finally:
            if going is not None:
                self._let_go(going[0])

    def _send_inline(self, head: bytes, payload: memoryview | None) -> None:
        size = len(payload) if payload is not None else 0
        if len(head) + size <= _LONGEST_RECORD:
            self._stream.send(_RECORD.pack(len(head) + size, 0) + head, payload)
            return
        for whole in (memoryview(head), payload or memoryview(b"")):
            for at in range(0, len(whole), _LONGEST_RECORD):
                piece = whole[at : at + _LONGEST_RECORD]
                self._stream.send(_RECORD.pack(len(piece), 0), piece)

    def _begin(self, piece: memoryview) -> Write:
        """Copy a piece into memory of our own, and begin to write it into the ring."""
        self._slot ^= 1
        at = self._mine.pieces + self._slot * PIECE
        self._view[at : at + len(piece)] = piece
        write = self._agent.write(self._memory, at, len(piece), self._there, self._sent % self._theirs.ring)
        self._sent += len(piece)
        return write

    def _arrived(self, write: Write, inline: bytes, count: int) -> None:
        """Wait until the write has arrived, and say so in the stream."""
        try:
            self._wait(write.done)
        finally:
            self._let_go(write)
        self._stream.send(_RECORD.pack(len(inline), count) + inline)
        self._stream.count(sent=count)

    def _room(self) -> int:
        """How many bytes may be written at the place that is next, in one piece."""
        (edge,) = _EDGE.unpack_from(self._view, self._mine.edge)
        self._edge = max(self._edge, min(edge, self._sent + self._theirs.ring))
        return min(self._edge - self._sent, self._theirs.ring - self._sent % self._theirs.ring)

    def _wait_for_room(self) -> int:
        tries = 0
        while not (room := self._room()):
            self._pause(tries)
            tries += 1
            if self._stream.hung_up():
                self._stream.send(_RECORD.pack(0, 0))  # it tells whether the other side has only finished, or is gone
        return room

    # ---- receiving: one thread only ----

    def recv_into(self, view: memoryview) -> None:
        """Fill the view. LinkError when the stream ends first."""
        while len(view):
            if self._inline:
                count = min(len(view), self._inline)
                self._stream.recv_into(view[:count])
                self._inline -= count
            elif self._in_ring:
                count = self._take(view)
            else:
                self._stream.recv_into(self._record)
                self._inline, self._in_ring = _RECORD.unpack(self._record)
                continue
            view = view[count:]

    def _take(self, view: memoryview) -> int:
        """Copy what has come next out of the ring. Returns how many bytes."""
        at = self._taken % self._mine.ring
        count = min(len(view), self._in_ring, self._mine.ring - at)
        view[:count] = self._view[at : at + count]
        self._in_ring -= count
        self._taken += count
        self._stream.count(received=count)
        if self._taken + self._window - self._granted >= max(1, self._window // 4):
            try:
                self.grant()
            except LinkError:
                if not self._stream.hung_up():
                    raise  # the other side would wait for ever
        return count

    def limit(self, nbytes: int) -> None:
        """From now on, let about `nbytes` lie in the ring. What was granted before may still come."""
        self._window = max(PAGE, min(nbytes, self._mine.ring))

    def grant(self) -> None:
        """Tell the other side how far it may send. LinkError if it cannot be told."""
        with self._granting:
            edge = max(self._granted, self._taken + self._window)
            _EDGE.pack_into(self._view, self._mine.told, edge)
            write = self._agent.write(self._memory, self._mine.told, _EDGE.size, self._there, self._theirs.edge)
            try:
                self._wait(write.done)
            finally:
                self._let_go(write)
            self._granted = edge

    # ---- both ----

    def _wait(self, happened: Callable[[], bool]) -> None:
        tries, gone = 0, 0.0
        while not happened():
            self._pause(tries)
            tries += 1
            if tries % _LOOK == 0 and self._stream.hung_up():
                gone = gone or time.monotonic()
                if time.monotonic() - gone > _GONE_S:
                    raise LinkError(f"{self._stream.peer} has ended before its memory was written")

    def _let_go(self, write: Write) -> None:
        if not write.end():
            self.stuck = True


# ---- A connection over TCP; large payloads go by NIXL once both sides have proved themselves ----
#
# Before that it is a TCP connection: nobody who has proved nothing makes this process parse what NIXL says of memory,
# or gets a place to write to. `upgrade` is called by the greeting (`handshake.py`), on both sides at the same point of
# the stream:
#
#   both sides   description of my ring, and a MAC      ->     each loads the other's, and tries it: it writes its edge
#     both sides   whether that has worked, and a MAC     ->     both yes: records from here on; else TCP as before
#
# The MACs have keys of this connection. So the descriptions are the other member's own.

log = logging.getLogger("rallypoint")

OFFER = "nixl/1"  # both sides say the same, or use TCP
_LONGEST = 64 << 10  # bytes of a description
_HEAD = struct.Struct("<QQ")  # where the memory is, the ring's size; then the description
_LONGEST_RING = 1 << 30
_LABEL = b"rallypoint/nixl"
_BUSY = 64  # so often a wait only lets other threads run; then it sleeps
_NAPS_S = (2e-5, 1e-3)  # from, to
_TRIES_S = 5.0  # for the first write


class _Waits(local):
    """When this thread's wait began."""

    began = 0.0


class NixlConnection:
    """A Connection over `stream`, and by NIXL once `upgrade` has succeeded. `ring`: bytes of this side's ring."""

    secured: Secured = PLAIN
    lender: Lender | None = None

    def __init__(self, stream: TcpConnection, agents: Agents, ring: int, lines: Sparingly) -> None:
        self._stream, self._agents, self._ring, self._lines = stream, agents, ring, lines
        self._lock = threading.Lock()
        self._users, self._closed = 0, False  # threads inside `send` and `recv_into`
        self._agent: Agent | None = None
        self._memory: Region | None = None
        self._remote = ""
        self._made: Rings | None = None  # to be tried
        self._rings: Rings | None = None  # the same, set last
        self._timeout: float | None = None
        self._deadline: float | None = None
        self._paced, self._window = False, ring
        self._waits = _Waits()

    @property
    def peer(self) -> str:
        return self._stream.peer

    @property
    def offers(self) -> str:
        """What both sides have to name in their greeting so that `upgrade` is called."""
        return OFFER

    @property
    def upgraded(self) -> bool:
        """Do large payloads go by NIXL?"""
        return self._rings is not None

    # ---- from TCP to NIXL ----

    def upgrade(self, sending: bytes, receiving: bytes) -> None:
        """Agree with the other side, which does the same, and use NIXL for what is sent next; else stay with TCP.

        The keys are this side's of this connection. No other thread may use it meanwhile. LinkError when the stream
        ends or the other side has not sent what it should: NIXL's own troubles are only said.
        """
        self._enter()
        try:
            keys = expand(sending, _LABEL), expand(receiving, _LABEL)
            layout = RingLayout(self._ring)
            description = self._described(layout)
            say(self._stream, keys[0], description)
            rings = self._try(heard(self._stream, keys[1], _LONGEST), layout) if description else None
            if not description:
                heard(self._stream, keys[1], _LONGEST)
            say(self._stream, keys[0], b"yes" if rings is not None else b"no")
            if heard(self._stream, keys[1], _LONGEST) == b"yes" and rings is not None:
                self._rings = rings
                log.info("large payloads to and from %s go by NIXL", self.peer)
            if self._rings is None:
                self._give_back()
        finally:
            self._leave()

    def _described(self, layout: RingLayout) -> bytes:
        """What the other side needs to write into this side's ring; b"" if there can be none."""
        try:
            self._agent = self._agents.taken()
            self._memory = self._agent.memory(layout.nbytes)
            # Before the other side knows where it is, for it may write its edge as soon as it does.
            self._memory.view[layout.edge : layout.pieces] = bytes(layout.pieces - layout.edge)
            description = self._agent.described(self._memory)
        except Exception as error:
            self._say_once(error)
            return b""
        return _HEAD.pack(self._memory.address, layout.ring) + description

    def _try(self, said: bytes, layout: RingLayout) -> Rings | None:
        """Write into the other side's ring for the first time. None if there is none, or that does not work."""
        if len(said) <= _HEAD.size:
            return None
        address, ring = _HEAD.unpack_from(said)
        if not 0 < ring <= _LONGEST_RING or ring % PAGE:
            raise LinkError(f"{self.peer} says that its ring has {ring} bytes: that is none")
        assert self._agent is not None
        assert self._memory is not None
        deadline, self._deadline = self._deadline, min(self._deadline or 1e18, time.monotonic() + _TRIES_S)
        try:
            self._remote = self._agent.load(said[_HEAD.size :])
            self._made = rings = Rings(
                self._stream, self._agent, self._memory, layout, Remote(self._remote, address), RingLayout(ring),
                self._pause,
            )  # fmt: skip
            rings.limit(self._window)
            rings.grant()
        except LinkError as error:
            self._say_once(error)
            return None
        finally:
            self._deadline = deadline
        return rings

    def _say_once(self, error: Exception) -> None:
        self._lines.warn(f"no RDMA with {self.peer}: {error}; TCP carries all of it", key="no RDMA")

    # ---- bytes ----

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self._enter()
        try:
            if self._rings is None:
                self._stream.send(head, payload)
            else:
                self._rings.send(head, payload, by_ring=not self._paced)
        finally:
            self._leave()

    def recv_into(self, view: memoryview) -> None:
        self._enter()
        try:
            (self._stream if self._rings is None else self._rings).recv_into(view)
        finally:
            self._leave()

    def _pause(self, tries: int) -> None:
        """Wait a moment, the `tries`-th time in a row. LinkError when the wait is over."""
        now = time.monotonic()
        if tries == 0:
            self._waits.began = now
        if self._closed:
            raise LinkError(f"the link to {self.peer} is closed")
        late = self._timeout is not None and now - self._waits.began > self._timeout
        if late or (self._deadline is not None and now > self._deadline):
            raise LinkError(f"the link to {self.peer} broke: its memory could not be written in time")
        time.sleep(0 if tries < _BUSY else min(_NAPS_S[1], _NAPS_S[0] * (tries - _BUSY + 1)))

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise LinkError(f"the link to {self.peer} is closed")
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._give_back()

    def _give_back(self) -> None:
        """No thread uses the agent any more, and none will."""
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._remote:
            agent.forget(self._remote)
        if self._memory is not None:
            agent.release(self._memory, in_use=self._made is not None and self._made.stuck)
        self._agents.given_back()

    # ---- as of TCP ----

    def set_timeout(self, seconds: float | None) -> None:
        self._timeout = seconds
        self._stream.set_timeout(seconds)

    def set_deadline(self, seconds: float | None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._timeout = seconds
        self._stream.set_deadline(seconds)

    def limit_in_flight(self, nbytes: int) -> None:
        self._window = min(nbytes or self._ring, self._ring)
        if self._rings is not None:
            self._rings.limit(self._window)
        self._stream.limit_in_flight(nbytes)

    def pace(self, rate: int) -> None:
        self._paced = bool(rate)  # the kernel paces TCP; nothing paces writes
        self._stream.pace(rate)

    def share_port(self, part: float) -> None:
        """Does nothing: nothing measures or paces writes."""

    def finish(self) -> None:
        self._stream.finish()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            unused = not self._users
        self._stream.close()
        if unused:
            self._give_back()


# ---- TCP whose large payloads go by NIXL between members that both have it, as a transport ----

RING_BYTES = 8 << 20


class NixlListener:
    """A Listener whose connections may go over to NIXL."""

    def __init__(self, listener: TcpListener, agents: Agents, ring: int, lines: Sparingly) -> None:
        self._listener, self._agents, self._ring, self._lines = listener, agents, ring, lines

    @property
    def address(self) -> str:
        return self._listener.address

    def accept(self) -> NixlConnection:
        return NixlConnection(self._listener.accept(), self._agents, self._ring, self._lines)

    def close(self) -> None:
        self._listener.close()


class NixlTransport:
    """TCP between ``host:port`` addresses; large payloads by NIXL's one-sided writes, once the greeting has agreed.

    `ring`: bytes of memory that each side of a connection gives for what the other one writes, a multiple of 4096. A
    connection registers that and 1 MiB more. Connections that were dialed share an agent, and those that were accepted
    another one; an agent ends with its last connection. Without NIXL, or where the other side has none, a connection
    stays with TCP, and one line of the log says so.

    The other member must have proved itself before it gets a place to write to, and its frames have MACs, which are
    checked on a copy. UCX itself asks nobody for a proof: use it on a network for RDMA that only trusted machines can
    reach (`choice.environment_of`).

    Attributes:
        traffic: the bytes of its connections, those that went by NIXL included.
    """

    secure = False

    def __init__(self, ring: int = RING_BYTES) -> None:
        self._tcp, self._ring = TcpTransport(), ring
        self._dialed, self._accepted = (Agents(environment_of()) for _ in range(2))
        self._lines = Sparingly(burst=1)

    @property
    def traffic(self) -> Traffic:
        return self._tcp.traffic

    def listen(self, address: str) -> NixlListener:
        return NixlListener(self._tcp.listen(address), self._accepted, self._ring, self._lines)

    def connect(self, address: str, timeout: float) -> NixlConnection:
        return NixlConnection(self._tcp.connect(address, timeout), self._dialed, self._ring, self._lines)

    def private(self, address: str) -> bool:
        return self._tcp.private(address)
