"""What was published, held, stored and seen is logged, and checked against I4, I5 and I10, apart from all bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from rallypoint.core.policy import AllReduce, Async, Sync
from rallypoint.core.shard.effects import Apply
from rallypoint.core.shard.server import Restore, ServerMachine
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.shell import LinkTable
from rallypoint.server.held import HeldShard
from rallypoint.server.member import Views
from rallypoint.server.reducer import ShardEffects
from rallypoint.testing.simulation import __main__ as program
from rallypoint.testing.simulation.operating.story import CAUSES, explain
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import Played, parse_policy
from rallypoint.testing.simulation.run import Simulation, SimulationFailed, play

_apply, _to_end, _new_generation = ShardEffects._apply, LinkTable.to_end, ServerMachine._new_generation


def _published_before_the_ack(self: ShardEffects, index: int, owned: HeldShard, effect: Apply) -> None:
    """I4 broken."""
    _apply(self, index, owned, effect)
    if self._parts.shell.machine.is_primary(index):
        self._parts.followers.publish(index, effect.version)


def _links_that_stay(self: LinkTable, before: View | None, view: View, *, between: bool = False) -> list[str]:
    """I10 broken: what the old primary of a shard that moves still sends counts."""
    return _to_end(self, before, view, between=True)


def _what_it_holds_is_kept(self: ServerMachine, view: View, *, restore: bool) -> Any:
    """I10 broken: after a roll-back a server goes on with what it has, and publishes that."""
    if not self._machines or not restore:
        return _new_generation(self, view, restore=restore)
    self._clip = self.plan.clip(view.generation)
    own = sorted(shard for shard in view.primary if self.me in view.holders_of(shard))
    lost = [self._disown(shard) for shard in sorted(self._machines.keys() - set(own))]
    restore_others = [Restore(tuple(own), view.origin)] if view.origin and own else []  # what it has is not wanted
    return [*lost, *(e for shard in own for e in self._assign(shard, view)), *self._share(view), *restore_others]


@pytest.mark.some("published*")
@pytest.mark.parametrize(("word", "first", "owner", "name", "bug", "said"), [
    ("sync", 0, ShardEffects, "_apply", _published_before_the_ack, r"publishes version .* while its backup"),
    ("uneven:async", 180, LinkTable, "to_end", _links_that_stay, r"accepts version .* in view [\d.]+ it is \w+'s"),
    ("async", 0, ServerMachine, "_new_generation", _what_it_holds_is_kept, "publishes version .* of generation"),
], ids=["published before the ack", "an older view's primary", "a version of an older generation"])  # fmt: skip
def test_a_defect_is_found_that_changes_no_byte(
    monkeypatch: pytest.MonkeyPatch, word: str, first: int, owner: Any, name: str, bug: Callable[..., Any], said: str
) -> None:
    """Of a seed that the log finds wrong the bytes are right: they alone do not show it."""
    monkeypatch.setattr(owner, name, bug)
    plans = [make_plan(seed, parse_policy(word)) for seed in range(first, first + 60)]
    found = (plan for plan in plans if re.search(said, _failure(plan, checked=True)))
    assert any(not _failure(plan, checked=False) for plan in found)


def _failure(plan: Plan, *, checked: bool) -> str:
    try:
        Simulation(plan, checked=checked).run()
    except SimulationFailed as failed:
        return str(failed).split("\n")[1]
    return ""


@pytest.mark.some("Sync*")
@pytest.mark.parametrize("policy", [Sync(), Async(), AllReduce()], ids=repr)
def test_a_run_is_the_same_with_and_without_its_log(policy: Played) -> None:
    checked, unchecked = (Simulation(make_plan(17, policy), checked=checked) for checked in (True, False))
    assert checked.run() == unchecked.run()
    assert {entry.what for entry in checked.world.history or ()} >= {"view", "holds", "sends", "hears", "accepts"}
    assert unchecked.world.history is None


# ---- `--explain`: a seed's plan without the faults that do not matter, and what led to its failure ----


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
