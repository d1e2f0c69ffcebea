"""`rallypoint chaos` asks for a backup of every shard where the mode supports one, and lets what it stops go on."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from rallypoint.config import record_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import AllReduce, Mode, Sync
from rallypoint.core.protocol import Applied, Planned
from rallypoint.core.view import ViewNumber
from rallypoint.launch.commands import chaos
from rallypoint.launch.commands.chaos import Event, ledger_of, measure, typical_gap
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


# ---- The report of a chaos run counts steps, however many servers report each ----


STEP_S, LATER_S, STALL_S, KILLED = 0.25, 0.008, 0.44, 10


def log(folder: Path, servers: int) -> None:
    """The event log of 20 steps; in front of step KILLED there is a stall. Each server of a shard reports each step."""
    plan = Planned(20, 2, "samples", 1, 1, ("w0", "w1"), tuple(f"s{n}" for n in range(servers)))
    told: list[msgspec.Struct] = [plan]
    for step in range(20):
        at = 1000.0 + STEP_S * step + (STALL_S if step >= KILLED else 0.0)
        told += [Applied(step, 2, at + LATER_S * server, {}, ViewNumber(1, 1)) for server in range(servers)]
    entries = ({"t": 1.0, "type": type(one).__name__, **msgspec.to_builtins(one)} for one in told)
    (folder / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))


@pytest.mark.parametrize("servers", [1, 2])
def test_a_usual_step_and_a_stall_are_counted_in_steps(servers: int, tmp_path: Path) -> None:
    log(tmp_path, servers)
    ledger = ledger_of(tmp_path, 20, 320)
    assert ledger.exact
    assert len(ledger.times) == 20
    assert typical_gap(ledger.times) == pytest.approx(STEP_S)
    (found,) = measure([Event(1000.0 + STEP_S * KILLED - 0.1, "kill worker", "worker1", KILLED, 0)], ledger)
    assert found.stall - typical_gap(ledger.times) == pytest.approx(STALL_S)


def test_a_step_that_is_made_again_after_a_roll_back_is_another_one(tmp_path: Path) -> None:
    log(tmp_path, 2)
    again = {"t": 1.0, "type": "Applied", **msgspec.to_builtins(Applied(3, 2, 1100.0, {}, ViewNumber(1, 5)))}
    with (tmp_path / "events.jsonl").open("ab") as events:
        events.write(msgspec.json.encode(again) + b"\n")
    assert len(ledger_of(tmp_path, 20, 320).times) == 21
