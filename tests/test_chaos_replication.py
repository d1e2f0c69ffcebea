"""`rallypoint chaos` asks for a backup of every shard where the mode supports one, and lets what it stops go on."""

from __future__ import annotations

import io
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from rallypoint.config import record_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import AllReduce, Mode, Sync
from rallypoint.launch.commands import chaos
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import ClusterRun

LAYOUT = build_layout([TensorSpec("w", (64,), "float32", 0)], 64)
STOPPED = 9


@pytest.mark.parametrize(("sync", "replication", "said"), [
    (Sync(), 2, False),
    (AllReduce(), 1, True),
], ids=["sync", "all-reduce"])  # fmt: skip
def test_chaos_uses_the_highest_replication_that_the_mode_supports_and_says_so(
    sync: Mode, replication: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Launch] = []

    def under(plan: Launch, *_: object, **__: object) -> int:
        plans.append(plan)
        return STOPPED

    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(chaos, "_undisturbed", lambda plan, *_, **__: plan)
    monkeypatch.setattr(chaos, "_last_of", lambda plan: (record_of(resolve({"sync": sync}), LAYOUT), ""))
    monkeypatch.setattr(chaos, "_under", under)
    assert chaos.chaos(Launch(worker=("train",), replication=2), [], 0, console) == STOPPED
    assert [plan.replication for plan in plans] == [replication]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("every shard is on one server (--replication 2 is not supported under rp.AllReduce()" in text) == said


def test_a_stopped_worker_goes_on_although_the_job_is_over_and_nobody_else_is_hit() -> None:
    """The launcher waits for its script."""
    signals: list[int] = []
    worker: Any = SimpleNamespace(command=SimpleNamespace(name="worker0", role="worker"), signal=signals.append)
    state = SimpleNamespace(step=9, again=0, view=None)
    shown = SimpleNamespace(state=state, finished=True, failure="", console=Console(file=io.StringIO()))
    plan = Launch(worker=("train",))
    run = cast(ClusterRun, SimpleNamespace(console=shown, failure="", plan=plan, of_role=lambda role: [worker]))
    driver = chaos.Chaos(["stop worker", "kill worker"], steps=10, seed=0)
    driver._strike(driver._faults.pop(0), run)
    (stopped,) = driver._stopped
    driver._stopped = [(0.0, stopped[1])]  # its time is over
    driver.intervene(run)
    assert signals == [signal.SIGSTOP, signal.SIGCONT]
    assert driver.left == 1
