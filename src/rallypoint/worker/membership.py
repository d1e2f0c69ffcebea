"""What a worker's process hears from the coordinator, and what it says again: the base of `worker.loop.session.Job`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Protocol

from rallypoint.core.job import JobRecord
from rallypoint.core.protocol import (
    Aborted,
    Assist,
    Beat,
    Capture,
    Finished,
    Leaving,
    Message,
    NewView,
    NotStored,
    Propose,
    Refused,
    Say,
    ScriptAt,
    StopWanted,
)
from rallypoint.core.view import View
from rallypoint.core.worker.slots import Store
from rallypoint.errors import JobAborted, ProtocolError, RallypointError
from rallypoint.net.member import CoordinatorLink
from rallypoint.observe.waits import wait_until
from rallypoint.worker.evaluations import EvaluationReports
from rallypoint.worker.sharing import Sharing
from rallypoint.worker.stopping import Stopping

TOO_LATE = "the job was over before this worker took part in it"


class DataPlane(Protocol):
    """What gets the coordinator's messages on: the exchange of a training run, or that of a store."""

    @property
    def view(self) -> View: ...

    @property
    def step(self) -> int: ...

    def adopt(self, view: View) -> None: ...

    def assist(self, step: int, replica: int) -> None: ...

    def capture(self, snapshot: Store) -> int: ...

    def finish(self) -> None: ...

    def leave(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def beat(self) -> Beat: ...

    def close(self) -> None: ...


class Member:
    """The messages of one membership. `Job.__init__` makes the fields."""

    id: str
    _changed: threading.Condition
    _view: View | None
    _record: JobRecord | None
    _kernels: bytes
    _first: bytes
    _finished: bool
    _leaving: bool
    _lead: str
    _captured: str
    _wanted: Capture | None
    _failure: BaseException | None
    _plane: DataPlane | None
    _link: CoordinatorLink
    _stopping: Stopping
    _reports: EvaluationReports
    _sharing: Sharing
    _script: ScriptAt | None = None  # what this worker has said of the end of its script, in a job of sums
    script_ended: Callable[[int, int, str], None] = staticmethod(lambda rank, sums, worker: None)

    # ---- waiting ----

    def _wait_for_view(self) -> None:
        with self._changed:
            wait_until(
                self._changed, lambda: self._failure is not None or self._finished or self._view is not None,
                lambda: "the other members of the job", self._report_wait,
            )  # fmt: skip
            if self._failure is not None:
                raise self._failure
            if self._view is None:
                raise JobAborted(TOO_LATE)

    def _say(self, text: str) -> None:
        self._link.send(Say(text))

    def say_script(self, script: ScriptAt) -> None:
        """Tell the coordinator how far the script is, in a job of sums; its end also the next coordinator."""
        with self._changed:
            self._script = script if script.ended else self._script
        self._link.send(script)

    def _report_wait(self, sentence: str) -> None:
        self._link.send(Say(f"{self.id} on {socket.gethostname()} is {sentence}"))

    def _beat(self) -> Beat:
        return Beat() if self._plane is None else self._plane.beat()

    # ---- messages from the coordinator, on the link's thread ----

    def _on_admitted(self, new: bool) -> None:
        """The coordinator has admitted this worker (again): repeat what the coordinator may not know.

        Repeat it even when the coordinator seems to know this worker. A coordinator that died before anything was
        agreed left nothing in its journal, so the next one counts incarnations from 1 again.
        """
        with self._changed:
            record, script = self._record, self._script
        if record is not None:
            self._link.send(Propose(record, self._kernels, self._first))
        if script is not None:
            self._link.send(script)
        self._sharing.repeat()
        self._reports.repeat(new=new)
        self._stopping.repeat(self._view)
        if self._leaving:
            self._link.send(Leaving())

    def _on_message(self, message: Message) -> None:
        match message:
            case NewView(view=view):
                self._adopt(view)
            case Assist(step=step, replica=replica):
                if self._plane is not None:
                    self._plane.assist(step, replica)
            case Capture():
                with self._changed:
                    self._wanted = message
                self._capture()
            case Finished(lead=lead):
                with self._changed:
                    self._finished, self._lead = True, lead
                    self._changed.notify_all()
                if self._plane is not None:
                    self._plane.finish()
            case StopWanted(reason=reason):
                self._stopping.wish(reason or "the operator")
            case ScriptAt(rank=rank, sums=sums, worker=worker):
                self.script_ended(rank, sums, worker)
            case Aborted(reason=reason) | Refused(reason=reason):
                self._fail(JobAborted(reason))
            case _ if not self._sharing.takes(message):
                raise ProtocolError(f"a worker has no use for a {type(message).__name__} message")

    def _capture(self) -> None:
        """Pass the coordinator's last request for a snapshot to the exchange, once. (Each view repeats the request.)"""
        with self._changed:
            wanted, exchange = self._wanted, self._plane
            if exchange is None or wanted is None or wanted.snapshot == self._captured:
                return
            self._captured = wanted.snapshot
        if (passed := exchange.capture(Store(wanted.snapshot, wanted.version, wanted.writers))) >= 0:
            self._link.send(NotStored(wanted.snapshot, "the step was over before the request came", passed))

    def _adopt(self, view: View) -> None:
        with self._changed:
            self._view = view
            exchange = self._plane
            self._changed.notify_all()
        if exchange is not None:
            exchange.adopt(view)
        self._stopping.adopted(view)

    def _on_lost(self, error: RallypointError) -> None:
        if not self._finished:
            self._fail(JobAborted(f"the coordinator is gone: {error}"))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        if self._plane is not None:
            self._plane.fail(error)
