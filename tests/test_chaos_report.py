"""The report of a chaos run counts steps, however many servers report each."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rallypoint.core.protocol import Applied, Planned
from rallypoint.core.view import ViewNumber
from rallypoint.launch.commands.chaos import Event, ledger_of, measure, typical_gap

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
