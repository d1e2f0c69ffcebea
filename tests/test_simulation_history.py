"""What was published, held, stored and seen is logged, and checked against I4, I5 and I10, apart from all bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core.policy import AllReduce, Async, Sync
from rallypoint.core.shard.effects import Apply
from rallypoint.core.shard.server import Restore, ServerMachine
from rallypoint.core.view import View
from rallypoint.core.worker.shell import LinkTable
from rallypoint.server.held import HeldShard
from rallypoint.server.reducer import ShardEffects
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import Played, parse_policy
from rallypoint.testing.simulation.run import Simulation, SimulationFailed

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
