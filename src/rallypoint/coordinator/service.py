"""The coordinator as a process: connections, the owner's thread, the journal, the event log, the snapshot keeper.

`core.cluster.machine` decides; `coordinator.shell` turns that into messages; the service only does the shell's acts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import msgspec

from rallypoint.coordinator import acts, inbox
from rallypoint.coordinator.connections import Connections
from rallypoint.coordinator.events import EventLog
from rallypoint.coordinator.fingerprints import FingerprintLog
from rallypoint.coordinator.inbox import Owner, tick_seconds
from rallypoint.coordinator.joining import taken
from rallypoint.coordinator.journal import Journal, Persistence
from rallypoint.coordinator.shell import CoordinatorShell
from rallypoint.coordinator.snapshots import SnapshotKeeper
from rallypoint.core.cluster.effects import FindSnapshot
from rallypoint.core.cluster.state import Origin, Resumed
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Aborted, Hello, Say, Welcome
from rallypoint.errors import AddressInUse
from rallypoint.net.channel import Channel
from rallypoint.net.handshake import Identity, job_secret, role_token
from rallypoint.net.places import advertised
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.lines import Once
from rallypoint.observe.observed import observed
from rallypoint.observe.waits import wait_heeding_signals
from rallypoint.store.files import end_threads
from rallypoint.store.snapshots import Retention

log = logging.getLogger("rallypoint")

_FAREWELL_S = 2.0
_TRY_AGAIN_S = 0.2  # seconds between two looks whether the port is free


class JoinInfo(msgspec.Struct, frozen=True):
    """What every member is told when it joins.

    Attributes:
        overrides: settings that replace those of the members' scripts.
        folder: the job's folder; "" if there is none.
        trace: (first, stop): trace the steps first <= step < stop; (0, 0): none.
        snapshots: URL of the snapshots.
        compression: how snapshot files are compressed.
        retention: which old snapshots are kept.
        threads: the intra-op threads of workers and servers; 0: as many as the job that goes on has had, or 1.
    """

    overrides: dict[str, Any] = {}
    folder: str = ""
    trace: tuple[int, int] = (0, 0)
    snapshots: str = ""
    compression: str = "none"
    retention: Retention = Retention()
    threads: int = 0


class CoordinatorService:
    """The coordinator of one job. Call `start`, then `wait`, then `close`.

    It listens at `bind` ("host:port"; port 0: any free one); members connect to `advertise` (by default the address
    where it listens). If `join_info` has a folder, it keeps its journal there, and goes on where an earlier coordinator
    of that folder ended. `resume`: the snapshot to go on from. `announced` is called with each announcement, on the
    owner's thread. Once it is started, `ended_before` says how the job of this folder had ended before; "" if it had
    not, or is resumed.
    """

    _clock: Callable[[], float] = staticmethod(lambda: time.monotonic())  # looked up late: tests play a pause
    _journal_of, _owner_of = Journal, Owner  # the simulation has others

    def __init__(
        self, *, terms: Terms, token: str = "", bind: str = "127.0.0.1:0", advertise: str = "",
        join_info: JoinInfo | None = None, transport: Transport | None = None,
        resume: Resumed | None = None, announced: Callable[[msgspec.Struct], None] | None = None,
    ) -> None:  # fmt: skip
        self._announced = announced
        self._watching: dict[str, Callable[[msgspec.Struct], None]] = {}  # who is told all that happens
        self._terms, self._token, self._bind, self._resume = terms, token, bind, resume
        self._advertise = advertise
        self._join_info = join_info or JoinInfo()
        self._transport: Transport = transport or TcpTransport()
        self._over = threading.Event()
        self._failure: str | None = None
        self._changed = threading.Condition()  # notified on the owner's thread, after each event

    def start(self) -> None:
        """Begin to listen; return once the address is open.

        Raises AddressInUse when another process listens there (a coordinator that follows an earlier one tries
        first for as long as members wait), DataError when the journal cannot be read, UsageError when the token is not
        the job's own.
        """
        me = Identity("coordinator", "", role_token(self._token, "coordinator"))
        self._journal = self._journal_of(self._join_info.folder)
        me = replace(me, secret=job_secret(self._journal.secret, me.token))
        self._persistence = Persistence(self._journal, lambda text: self._owner.put(Say(text)))
        recovered = self._journal.load()
        self.is_later = self._terms.earlier > 0 or recovered is not None  # it goes on with the job of an earlier one
        word = None if recovered is None or self._resume is not None else recovered.last_word
        how = f"failed: {word.reason}" if isinstance(word, Aborted) else "finished"
        self.ended_before = how if word is not None else ""
        self._shell = CoordinatorShell(
            self._terms, self._clock(), recovered=recovered, resume=self._resume, secret=me.secret
        )
        observed(self._shell.machine, "coordinator")
        self._log = EventLog(self._join_info.folder)
        self._watching = {"the events of the log": lambda message: self._log.write(message)}
        if self._announced is not None:
            self._watching["the job's metrics"] = self._announced
        self._fingerprints = FingerprintLog(self._join_info.folder, self.say)
        self._owner = self._owner_of(self._handle, tick_seconds(self._terms))
        self._keeper = self._open_keeper()
        for act in self._shell.start():
            self._do(act)
        try:
            self._connections = self._listen(me)
        except BaseException:
            self._stop()
            raise
        self._owner.start()  # now: nobody could have come before, and silence counts from its first tick on
        try:
            self._address = advertised(self._connections.address, self._advertise)
        except BaseException:
            self._connections.close()
            self._stop()
            raise

    def _listen(self, me: Identity) -> Connections:
        """Listen. The members of an earlier coordinator come back to this address alone: while another process has the
        port, try again for as long as they do."""
        until = time.monotonic() + (self._terms.living if self.is_later else 0.0)
        said = Once()
        while True:
            try:
                return Connections(
                    self._transport, self._bind, me, put=self._owner.put, refusal=self._refusal,
                    welcome=self._welcome(),
                )  # fmt: skip
            except AddressInUse as error:
                if time.monotonic() >= until:
                    raise
                if said.is_new("in use"):
                    log.warning("%s. The members come back to it: trying again for %.0f s", error, self._terms.living)
                self._over.wait(_TRY_AGAIN_S)

    @property
    def address(self) -> str:
        """The address where members connect, "host:port"."""
        return self._address

    def wait(self) -> str | None:
        """Block until the job is over and all members were told. Returns None, or why the job failed."""
        wait_heeding_signals(self._over)
        return self._failure

    @property
    def busy_s(self) -> float:
        return self._owner.busy_s

    def wait_for_scripts(self, longest_s: float) -> None:
        """After `wait`: block until the workers' scripts have left the job too, for at most `longest_s` seconds. They
        may be saving the model."""
        workers = set(self._shell.machine.course.members.workers)
        with self._changed:
            self._changed.wait_for(lambda: all(worker not in self._shell.members for worker in workers), longest_s)

    def wait_for_step(self, step: int, longest_s: float) -> None:
        """Block until `step` is counted and known to be applied, for at most `longest_s` seconds."""
        course, tally = self._shell.machine.course, self._shell.announcer.tally
        with self._changed:
            self._changed.wait_for(lambda: tally is not None and tally.done >= step < course.known, longest_s)

    def abort(self, reason: str) -> None:
        """End the job from outside (a child process died, Ctrl-C); all members are told why. Any thread may call it."""
        self._owner.put(Aborted(reason))

    def say(self, text: str) -> None:
        """Tell the observers a sentence, and write it into the event log. Any thread may call it."""
        self._owner.put(Say(text))

    def close(self) -> None:
        """End every connection and thread; wait up to 2 s for members to receive the last word."""
        deadline = time.monotonic() + _FAREWELL_S  # for all members together: many may be paused
        for channel in (*self._shell.members.values(), *self._shell.announcer.observers):
            _channel(channel).flush(max(0.0, deadline - time.monotonic()))
        self._hear_servers_out(deadline)
        self._connections.close()
        self._stop()

    def _hear_servers_out(self, deadline: float) -> None:
        """After the last word, wait until the servers have closed their connections: the account of all contributions
        may still be on its way. Workers are not waited for: their scripts may go on for long."""
        servers = set(self._shell.machine.course.members.servers) if self._shell.last_word is not None else set()
        with self._changed:
            left = lambda: all(server not in self._shell.members for server in servers)  # noqa: E731
            self._changed.wait_for(left, deadline - time.monotonic())

    def _stop(self) -> None:
        self._owner.stop()
        keeper = [] if self._keeper is None else [self._keeper.stop()]
        end_threads(*keeper, self._log.stop(), *self._fingerprints.stop(), self._persistence.stop())

    # ---- what it is made of ----

    def _open_keeper(self) -> SnapshotKeeper | None:
        if not self._terms.snapshots:
            return None
        about = self._join_info
        return SnapshotKeeper(about.snapshots, about.compression, about.retention, put=self._owner.put)

    def _welcome(self) -> Welcome:
        about, record = self._join_info, self._shell.machine.record
        return Welcome(
            about.overrides, about.folder, about.trace,
            about.snapshots if self._terms.snapshots or self._resume is not None else "",
            about.compression, self._terms.heartbeat, self._terms.workers_start, self._terms.servers,
            min((host.link_mbit for host in self._terms.topology.hosts.values() if host.link_mbit), default=0.0),
            self._transport.private(self._bind),
            -1 if record is None else int(record.config.get("network", {}).get("shard_bytes", -1)),
            about.threads or (0 if record is None else record.threads) or 1, living=self._terms.living,
        )  # fmt: skip

    def _refusal(self, hello: Hello) -> str:
        """Why `hello` is refused, or "". Runs on a connection's thread and changes nothing; the shell checks again."""
        if hello.incarnation or self._shell.last_word is not None:  # after the end everybody is told of it
            return ""
        return taken(hello.id) if self._shell.refuses(hello) else ""

    # ---- on the owner's thread ----

    def _handle(self, event: inbox.Event) -> None:
        for act in self._shell.handle(event, self._clock()):
            self._do(act)
        if isinstance(event, inbox.Ticked):
            self._persistence.tick(self._clock())
        with self._changed:
            self._changed.notify_all()

    def _do(self, act: acts.Act) -> None:
        match act:
            case acts.SendMessage(connection=connection, message=message):
                _channel(connection).send_message(message)
            case acts.RefuseConnection(connection=connection, reason=reason, final=final):
                _channel(connection).refuse(reason, final=final)
            case acts.Close(connection=connection):
                _channel(connection).connection.close()
            case acts.AppendLog(message=message):
                self._note(message)
            case acts.Record(member=member, claim=claim):
                self._fingerprints.add(member, claim)
            case acts.Save(state=state, needed=needed):
                self._persistence.save(state, self._clock(), needed=needed)
            case acts.Over(failure=failure):
                self._failure = failure
                self._over.set()
            case FindSnapshot() if self._keeper is None:
                self._owner.put(Origin(""))
            case _:
                if self._keeper is not None:
                    self._keeper.do(act)

    def _note(self, message: msgspec.Struct) -> None:
        """Tell those who only look on: the event log, the metrics. An error of theirs ends no job: it is logged once,
        and they are told nothing more."""
        for what, tell in list(self._watching.items()):
            try:
                tell(message)
            except Exception as error:
                del self._watching[what]
                log.error("%s have failed and stop here, the job goes on", what, exc_info=error)


def _channel(connection: inbox.Connection) -> Channel:
    return cast(Channel, connection)
