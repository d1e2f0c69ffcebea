"""Evaluations of a simulated worker, of the versions that are leased to it; and what must be true of all at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rallypoint.core.decisions import is_due
from rallypoint.core.protocol import Evaluated, Evaluates, Message
from rallypoint.core.view import ViewNumber
from rallypoint.net.pool import bytes_of
from rallypoint.testing.simulation.coordinator import Outcome, SimulatedCoordinator
from rallypoint.testing.simulation.exchange import SimulatedExchange
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.names import NBYTES, TOKEN
from rallypoint.testing.simulation.network import PlayedThread
from rallypoint.testing.simulation.replicas.contents import Content
from rallypoint.testing.simulation.replicas.script import figure_of
from rallypoint.worker.exchange.locked import Rewound


class SimulatedEvaluations:
    """One worker's evaluations. `send` is to the coordinator."""

    def __init__(
        self, exchange: SimulatedExchange, thread: PlayedThread, seconds: float, send: Callable[[Message], None]
    ) -> None:
        """An evaluation takes at most so many seconds."""
        self._exchange, self._thread, self._seconds, self._send = exchange, thread, seconds, send
        self._job, self._told = exchange.job, list[Message]()

    def register(self, *, new: bool) -> None:
        """Tell the coordinator which evaluations there are; and the last results, unless the worker is `new`."""
        if self._job.every:
            self._exchange.leased.expect((self._job.every,))
            told = Evaluates((self._job.every,), self._job.rules.stops)
            for message in (told, *(() if new else self._told[-64:])):
                self._send(message)

    def evaluates(self, version: int) -> bool:
        """Is this worker to evaluate that version before it computes that step?"""
        return self._job.every > 0 and self._exchange.shell.number.count > 0 and self._exchange.leased.is_due(version)

    def evaluate(self, version: int, model: Sequence[Content]) -> None:
        """Evaluate the version that is leased to this worker: what the `model` holds, or what servers keep."""
        leased = self._exchange.leased
        if (held := leased.held(version)) is not None:
            self._measure()  # to the end, whatever views say meanwhile
            leased.end()
            self._tell(version, held, {"figure": figure_of(model)})
        elif (pulled := leased.begin(version)) is not None:
            generation, vector = pulled
            if vector is None:
                self._tell(version, generation, None)
                return
            data, tokens = bytes_of(vector), self._exchange.node.world.tokens
            figure = figure_of([tokens.of(data[at : at + TOKEN]) for at in range(0, len(data), NBYTES)])
            self._measure()
            with suppress(Rewound):
                leased.check()
                leased.end()
                self._tell(version, generation, {"figure": figure})

    def _measure(self) -> None:
        with self._exchange.evaluating():
            self._thread.sleep(self._seconds * self._exchange.node.world.random.random())

    def _tell(self, version: int, generation: ViewNumber, figures: dict[str, float] | None) -> None:
        self._told.append(Evaluated(version, generation, figures))
        self._send(self._told[-1])


def check_evaluations(
    job: SimulatedJob, outcome: Outcome, coordinator: SimulatedCoordinator | None, events: Iterable[str]
) -> None:
    """AssertionError unless each version that is due has its result, and no other.

    It may have none if the servers that kept the version are lost, and the job goes on from a later snapshot. And what
    the lead has evaluated without a lease is lost if it dies before the coordinator hears of it.
    """
    ends = range(1, job.end + 1) if job.every else ()
    right = {v: figure_of(job.trajectory[v]) for v in ends if is_due(job.every, v, v - 1, ends=v == job.end)}
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
