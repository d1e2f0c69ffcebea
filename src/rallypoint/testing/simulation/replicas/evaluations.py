"""Evaluations of a simulated worker, of the versions that are leased to it; and what must be true of all at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rallypoint.core.decisions import is_due
from rallypoint.core.protocol import Evaluated, Evaluates, Message
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.slots import Evaluate
from rallypoint.testing.simulation.coordinator import Outcome, SimulatedCoordinator
from rallypoint.testing.simulation.exchange import SimulatedExchange
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.replicas.contents import Content
from rallypoint.testing.simulation.replicas.script import figure_of


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
            self._shell.leased.periods = (self._job.every,)
            told = Evaluates((self._job.every,), self._job.rules.stops)
            for message in (told, *(() if new else self._told[-64:])):
                self._send(message)

    def evaluates(self, version: int) -> bool:
        """Is this worker to evaluate that version before it computes that step?"""
        return self._shell.number.count > 0 and self._shell.leased.evaluates(self._shell.view, version)

    def begin(self, version: int, model: Sequence[Content]) -> None:
        """Evaluate the version that is leased to this worker: what the `model` holds, or what servers keep."""
        self.runs, self._generation = True, self._shell.view.generation
        if version == self._exchange.machine.step:
            self._evaluate(version, list(model), held=True)
            return
        self._pulling = version
        self._exchange.pulls.begin_whole(version)
        self.go_on()

    def go_on(self) -> None:
        """Something has changed: the version may be here, or be another worker's to evaluate."""
        rows, version = self._exchange.pulls, self._pulling
        if version is None:
            return
        if not self._is_duty(version) or self._shell.next_action() != Evaluate(version):
            self._stop_pulling()
            self._over()
        elif rows.ready():
            outdated, model = rows.outdated, rows.whole_model()
            self._stop_pulling()
            if outdated:
                self._tell(version, None)
                self._over()
            else:
                self._evaluate(version, model, held=False)

    def _stop_pulling(self) -> None:
        self._exchange.pulls.end()
        self._pulling, self.runs = None, False

    def _is_duty(self, version: int) -> bool:
        return self._shell.view.generation == self._generation and self.evaluates(version)

    def _evaluate(self, version: int, model: list[Content], *, held: bool) -> None:
        """What the model holds is evaluated to the end, whatever views say meanwhile."""
        self.runs = True

        def ended() -> None:
            self.runs = False
            if held or self._is_duty(version):
                self._tell(version, {"figure": figure_of(model)})
            self._over()

        world = self._exchange.node.world
        self._exchange.node.later(self._seconds * world.random.random(), ended)

    def _tell(self, version: int, figures: dict[str, float] | None) -> None:
        self._shell.leased.over(self._generation, version)
        self._told.append(Evaluated(version, self._generation, figures))
        self._send(self._told[-1])


def due(job: SimulatedJob, version: int) -> bool:
    """Is an evaluation due with that version?"""
    return job.every > 0 and is_due(job.every, version, version - 1, ends=version == job.end)


def check_evaluations(
    job: SimulatedJob, outcome: Outcome, coordinator: SimulatedCoordinator | None, events: Iterable[str]
) -> None:
    """AssertionError unless each version that is due has its result, and no other.

    It may have none if the servers that kept the version are lost, and the job goes on from a later snapshot. And what
    the lead has evaluated without a lease is lost if it dies before the coordinator hears of it.
    """
    right = {v: figure_of(job.trajectory[v]) for v in range(1, job.end + 1) if due(job, v)}
    wrong = [(step, figure) for step, figure in outcome.evaluated if right.get(step) != figure]
    assert not wrong, f"evaluated to something else: {wrong}"
    missing = right.keys() - {step for step, _ in outcome.evaluated}
    if coordinator is not None:
        ledger, view = coordinator.machine.course.evaluations, coordinator.machine.view
        if job.rules.steers:
            wanted = job.undisturbed_decisions.decided
            assert ledger.decided == wanted, f"{ledger.decided} is decided, and not {wanted}"
            goes_on = view is None or view.orders.stop is None
            assert goes_on == (job.end == job.steps), f"the job ends with {job.end}: {view}"
        unheard = any("coordinator" in event or "drop" in event or "partition" in event for event in events)
        if any("snapshot" in said for said in outcome.said) or (unheard and not job.rules.steers):
            missing -= {version for version, figures in ledger.results.items() if figures is None}
    assert not missing, f"versions {sorted(missing)} have no result"
