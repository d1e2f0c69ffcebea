"""Results of evaluations that were lost on their way: the worker says them again, or evaluates once more."""

from __future__ import annotations

from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Evaluated, Evaluates, Message
from rallypoint.core.view import Assignment, Lease, Member, StandingOrders, View, ViewNumber
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.handover import NoCodecStates
from rallypoint.core.worker.shell import WorkerShell, WorkerSnapshots
from rallypoint.core.worker.slots import Evaluate
from rallypoint.worker.evaluations import EvaluationReports

FIRST = ViewNumber(1, 1)


def _view(count: int, incarnation: int) -> View:
    """The worker "me" stands by, and holds the lease of version 4."""
    return View(
        number=ViewNumber(1, count), generation=FIRST,
        workers=(Member("me", "h", incarnation=incarnation), Member("other", "h", incarnation=8)), servers=(),
        assignments=(Assignment(0, {"other": (0,)}),), primary={0: "s0"}, uploader="other",
        orders=StandingOrders(lease=Lease(4, "me", 8)),
    )  # fmt: skip


def test_a_worker_that_was_given_up_evaluates_again_because_its_result_may_be_lost() -> None:
    layout = build_layout([TensorSpec("weight", (4,), "float32", 0)], 64)
    shell = WorkerShell(WorkerMachine("me", len(layout.shards), frozenset(), 10), NoCodecStates(), WorkerSnapshots())
    shell.adopt(_view(1, 9), ())
    assert shell.next_action() == Evaluate(4)
    shell.leased.over(FIRST, 4)
    shell.adopt(_view(2, 9), ())
    assert shell.next_action() is None, "its result is on its way, and is said again if its connection broke"
    shell.adopt(_view(3, 11), ())
    assert shell.next_action() == Evaluate(4), "nothing that it said before counts"


def test_that_no_server_keeps_a_version_is_said_again() -> None:
    sent: list[Message] = []
    reports = EvaluationReports(sent.append)
    reports.registered([4], [])
    reports.evaluated(4, FIRST, {"loss": 1.0})
    reports.evaluated(8, FIRST, None)
    sent.clear()
    reports.repeat(new=False)
    assert sent == [Evaluates((4,)), Evaluated(4, FIRST, {"loss": 1.0}), Evaluated(8, FIRST, None)]
    sent.clear()
    reports.repeat(new=True)
    assert sent == [Evaluates((4,))]
