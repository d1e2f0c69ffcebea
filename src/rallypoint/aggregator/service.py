"""The life of an aggregator: it joins the coordinator, serves workers near it, and ends with the job."""

from __future__ import annotations

import threading
import time

from rallypoint.aggregator.relay import Relay
from rallypoint.aggregator.upstream import Ticked, Upstream
from rallypoint.core.aggregator.machine import AggregatorMachine
from rallypoint.core.aggregator.shell import AggregatorShell
from rallypoint.core.protocol import Hello, Say
from rallypoint.errors import ProtocolError
from rallypoint.net.channel import Channel
from rallypoint.observe.observed import observed
from rallypoint.server.intake import Intake
from rallypoint.server.job import ServerJob
from rallypoint.server.member import ListeningMember, Receive

_TICK_S = 0.25


class AggregatorService(ListeningMember):
    """One aggregator of one job, from joining to the end.

    It holds nothing that could be lost: it may be closed, or killed, at any time. One more thread tells the owner the
    time.
    """

    role, waits_for = "aggregator", "workers near it"
    serves = ("worker",)

    _relay: Relay | None = None  # the job's, once it is known

    def start(self) -> None:
        """See `ListeningMember.start`."""
        super().start()
        self._clock = threading.Thread(target=self._tell_time, name="time", daemon=True)
        self._clock.start()

    @property
    def counts(self) -> tuple[int, int]:
        """How many contributions came from workers, and how many went upstream."""
        return (0, 0) if self._relay is None else (self._relay.taken, self._relay.sent)

    def close(self) -> None:
        """See `ListeningMember.close`."""
        super().close()
        self._clock.join()

    def failed(self, error: BaseException) -> None:
        """It cannot go on. The job can, without it."""
        reason = f"aggregator {self.id} failed: {type(error).__name__}: {error}"
        self._link.send(Say(reason))
        self._views.end(reason)

    def _begin(self, job: ServerJob) -> Upstream:
        upstream = Upstream(
            self._link.credentials, job, self._views, self._owner.put,
            transport=self._transport, tracer=self._tracer, failed=self.failed,
        )  # fmt: skip
        machine = AggregatorMachine(self.id, job.plan.expected, job.plan.cadence, job.plan.carried)
        shell: AggregatorShell[Channel] = AggregatorShell(observed(machine, self.id))
        self._relay = self._owner.handler = Relay(job, shell, upstream, self._tracer)
        self._intake = Intake(job, self._views, self._owner.put, self._tracer, self._link.welcome.trace)
        return upstream

    def _tell_time(self) -> None:
        while not self._views.over.wait(_TICK_S):
            self._owner.put(Ticked(time.monotonic()))

    def _receiver(self, hello: Hello) -> Receive:
        """See `ListeningMember`. The current view must give this worker to this aggregator."""
        view = self._views.view
        workers = {(member.id, member.incarnation) for member in view.workers} if view is not None else set()
        if view is None or (hello.id, hello.incarnation) not in workers or view.aggregator_of.get(hello.id) != self.id:
            raise ProtocolError(f"worker {hello.id} is not near aggregator {self.id} in this view")
        return self._intake.receive_from_worker
