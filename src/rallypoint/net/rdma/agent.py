"""What we use of NIXL: an agent with UCX, memory that others may write, and writes into theirs.

An agent has two threads of its own (outside Python), and file descriptors. It starts with the first connection that
needs it and ends with the last (`Agents`).

Memory that was written by others is never given back to the system while the agent lives. UCX's emulated writes (over
TCP, say) go to an address that the sender names, also when we have taken the registration back: a write that comes too
late must not meet memory that is something else by now. So the memory of a connection that has ended waits to become
that of another connection, whose frames have MACs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import mmap
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rallypoint.errors import LinkError

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")  # wheels of the same API; the first two need no CUDA on the machine
_BACKEND = "UCX"
_PROGRESS_US = 1000  # NIXL's thread looks so often for what UCX has to do in software; with 0 it never sleeps
_STARTING = threading.Lock()  # of the environment, which all agents of the process share


class Remote(NamedTuple):
    """Memory of another agent that we may write: its agent's name there, and where it begins."""

    agent: str
    address: int


class Memory:
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
        self._spare: list[Memory] = []
        self._kept: list[Memory] = []  # registered and mapped until the agent ends
        self._peers: dict[str, int] = {}  # how many connections use each

    def memory(self, nbytes: int) -> Memory:
        """Registered memory of this size. LinkError if it cannot be registered."""
        with self._lock:
            found = next((memory for memory in self._spare if memory.nbytes == nbytes), None)
            if found is not None:
                self._spare.remove(found)
        memory = found or Memory(nbytes)
        try:
            memory.registered = _asked(lambda: self._nixl.register_memory([(memory.address, nbytes, 0, "")], "DRAM"))
        except LinkError:
            with self._lock:
                self._spare.append(memory)  # others may have written it, so it stays mapped
            raise
        return memory

    def release(self, memory: Memory, *, in_use: bool) -> None:
        """Nobody may write this memory any more. `in_use`: a write of our own may still read it, so it stays."""
        if in_use:
            with self._lock:
                self._kept.append(memory)
            return
        with contextlib.suppress(Exception):  # the agent takes back what is left
            self._nixl.deregister_memory(memory.registered)
        with self._lock:
            self._spare.append(memory)

    def described(self, memory: Memory) -> bytes:
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

    def write(self, memory: Memory, offset: int, count: int, to: Remote, at: int) -> Write:
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
