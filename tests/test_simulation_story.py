"""`--explain`: a seed's plan without the faults that do not matter, and what led to its failure."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rallypoint.core.view import ViewNumber
from rallypoint.server.member import Views
from rallypoint.testing.simulation import __main__ as program
from rallypoint.testing.simulation.operating.story import CAUSES, explain
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.run import SimulationFailed, play


def _of_any_generation(self: Views, number: ViewNumber) -> bool:
    """What was sent before a roll-back is heard after it."""
    return True


def _first_failing(seeds: range) -> Plan:
    for plan in map(make_plan, seeds):
        try:
            play(plan)
        except SimulationFailed:
            return plan
    raise AssertionError("found in none")


@pytest.mark.slow
def test_the_story_of_a_planted_defect_names_the_fault_that_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A roll-back needs a server's or everybody's death; nothing else matters here."""
    monkeypatch.setattr(Views, "counts", _of_any_generation)
    plan = _first_failing(range(200))
    said = explain(plan)
    at = said.index("what led to it:")
    story = said[at + 1 :]
    assert "the generation is" in said[0]
    assert f"of {len(plan.faults)} faults" in said[1]
    assert 0 < at - 3 < len(plan.faults), "some faults do not matter"
    assert len(story) <= CAUSES
    assert any("fault: " in line for line in story)
    assert any("hears of" in line for line in story)
    assert all(int(line.split()[0]) == number for number, line in enumerate(story, 1))


def test_a_seed_that_passes_says_so_and_shows_its_faults() -> None:
    plan = make_plan(17)
    said = explain(plan)
    assert said[0] == "all is well"
    assert len(said) == 2 + len(plan.faults)


def test_the_command_explains_a_seed() -> None:
    import typer

    app = typer.Typer()
    app.command()(program.main)
    result = CliRunner().invoke(app, ["--seed", "17", "--explain"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("all is well")
