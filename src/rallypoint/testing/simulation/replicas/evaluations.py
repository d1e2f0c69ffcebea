"""Evaluations of a simulated worker: the lead's, between two steps, and those whose lease it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint.core.evaluation import is_due
from rallypoint.core.view import Lease, ViewNumber
from rallypoint.core.worker.slots import Evaluate
from rallypoint.net.messages import Evaluated, Evaluates, Message, Metrics, NotKept
from rallypoint.testing.simulation.exchange import SimulatedExchange
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.replicas.contents import Content
from rallypoint.testing.simulation.replicas.decided import figure_of


class SimulatedEvaluations:
    """One worker's evaluations. `send` is to the coordinator; `over` is called after each.

    Attributes:
        runs: it pulls a version, or evaluates it.
    """

    def __init__(
        self, exchange: SimulatedExchange, seconds: float, send: Callable[[Message], None], over: Callable[[], None]
    ) -> None:
        """An evaluation takes at most so many seconds."""
        self.runs = False
        self._exchange, self._shell, self._seconds = exchange, exchange.shell, seconds
        self._send, self._over, self._job = send, over, exchange.job
        self._pulling: int | None = None
        self._generation = ViewNumber()
        self._told: list[Message] = []

    def register(self, *, new: bool) -> None:
        """Tell the coordinator which evaluations there are; and the last results, unless the worker is `new`."""
        if self._job.every:
            self._shell.leased.decides = self._job.rules.steers
            told = Evaluates((self._job.every,), stops=self._job.rules.stops)
            for message in (told, *(() if new else self._told[-128:])):
                self._send(message)

    def leads(self, version: int) -> bool:
        """Is this worker to evaluate that version before it computes that step?"""
        view = self._shell.view
        return due(self._job, version) and view.lead(version) == self._exchange.machine.me and not view.leases(version)

    def lead(self, version: int, model: Sequence[Content], generation: ViewNumber) -> None:
        """Evaluate what the model holds."""
        self._evaluate(version, list(model), generation, leased=False)

    def begin(self, version: int) -> None:
        """Pull and evaluate the version whose lease this worker holds."""
        self.runs, self._pulling, self._generation = True, version, self._shell.view.generation
        self._exchange.rows.whole(version)
        self.go_on()

    def go_on(self) -> None:
        """Something has changed: the version may be here, or be another worker's to evaluate."""
        rows, version = self._exchange.rows, self._pulling
        if version is None:
            return
        if not self._is_duty(version) or self._shell.next_action() != Evaluate(version):
            self._stop_pulling()
            self._over()
        elif rows.ready():
            outdated, model = rows.outdated, rows.whole_model()
            self._stop_pulling()
            if outdated:
                self._shell.leased.over(self._generation, version)
                self._say(NotKept(version, self._generation))
                self._over()
            else:
                self._evaluate(version, model, self._generation, leased=True)

    def _stop_pulling(self) -> None:
        self._exchange.rows.end()
        self._pulling, self.runs = None, False

    def _is_duty(self, version: int) -> bool:
        view, me = self._shell.view, self._exchange.machine.me
        return view.generation == self._generation and view.leases(version) and view.lease == Lease(version, me)

    def _evaluate(self, version: int, model: list[Content], generation: ViewNumber, *, leased: bool) -> None:
        self.runs = True

        def ended() -> None:
            self.runs = False
            if not leased or self._is_duty(version):
                if leased:
                    self._shell.leased.over(generation, version)
                self._tell(version, {"figure": figure_of(model)}, generation)
            self._over()

        world = self._exchange.node.world
        self._exchange.node.later(self._seconds * world.random.random(), ended)

    def _tell(self, version: int, figures: dict[str, float], generation: ViewNumber) -> None:
        for message in (Metrics(version, figures, generation), Evaluated(version, generation, figures)):
            self._say(message)

    def _say(self, message: Message) -> None:
        self._told.append(message)
        self._send(message)


def due(job: SimulatedJob, version: int) -> bool:
    """Is an evaluation due with that version?"""
    return job.every > 0 and is_due(job.every, version, version - 1, ends=version == job.end)
