"""Jobs of sums: all workers hear of a script that has ended, also those that were away; and nobody else is believed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rallypoint.coordinator.acts import AppendLog, SendMessage
from rallypoint.coordinator.announcer import Announcer
from rallypoint.core.modes import Feature
from rallypoint.core.protocol import ScriptAt
from rallypoint.core.view import Assignment, Member, View, ViewNumber

ONE = ViewNumber(1, 1)
WORKERS = tuple(Member(f"w{n}", f"h{n}") for n in range(3))
VIEW = View(
    number=ONE, generation=ONE, workers=WORKERS, servers=(), assignments=(Assignment(0, {"w0": (0,), "w1": (1,)}),),
    primary={},
)  # fmt: skip


def announcer(connected: dict[str, Any]) -> Announcer:
    members = SimpleNamespace(role_of=lambda id: "server" if id.startswith("s") else "worker")
    made = Announcer(SimpleNamespace(view=VIEW, course=SimpleNamespace(members=members)), 0.0, connected)  # type: ignore[arg-type]
    made.config = SimpleNamespace(features={Feature.SUMS})  # type: ignore[assignment]
    return made


def test_who_was_away_hears_of_it_when_it_is_back() -> None:
    connected: dict[str, Any] = {"w0": "to w0", "s0": "to s0"}
    made = announcer(connected)
    told = ScriptAt(0, 5, 100, True, "w0")
    assert made.told_by("w0", ScriptAt(0, 5, 100, True), 1.0) == [AppendLog(told), SendMessage("to w0", told)]  # type: ignore[arg-type]
    connected["w1"] = "to w1"
    assert made.ended_scripts("w1") == [SendMessage("to w1", told)]  # type: ignore[arg-type]
    assert made.ended_scripts("s0") == []


def test_an_end_is_told_once_however_often_it_is_said() -> None:
    made = announcer({})
    assert len(made.told_by("w0", ScriptAt(0, 5, ended=True), 1.0)) == 1
    for sums in range(100):
        assert made.told_by("w0", ScriptAt(1, sums, ended=True), 1.0) == []


def test_a_worker_without_a_part_and_a_rank_that_does_not_exist_are_not_believed() -> None:
    made = announcer({"w0": "to w0"})
    assert made.told_by("w2", ScriptAt(0, 0, ended=True), 1.0) == []
    assert made.told_by("w1", ScriptAt(2**32 - 1, 0, ended=True), 1.0) == []
    assert made.ended_scripts("w0") == []
