"""The simulation plays tables: a replica's forward pass pulls rows at its step, whatever fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rallypoint.core.policy import Async, BoundedStaleness, Sync
from rallypoint.core.shard.pulls import Request, Requests
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, word_for
from rallypoint.testing.simulation.run import simulate
from rallypoint.worker.exchange.arrivals import RowPull
from support.failing import first_failure

FIXED = range(12)
ENOUGH = range(100)  # seeds within which a planted bug has to be found
OTHERS = (Play("tables", Sync(quorum=2)), Play("tables", BoundedStaleness(1)), Play("tables", Async()))


@pytest.mark.slow
def test_rows_are_those_of_the_step_in_progress_so_that_the_bytes_are_the_same_whatever_fails() -> None:
    assert any(make_plan(seed, Play("tables")).faults for seed in FIXED)
    for seed in FIXED:
        simulate(seed, Play("tables"))


@pytest.mark.parametrize("policy", OTHERS, ids=word_for)
@pytest.mark.some("tables:async")
def test_in_the_other_modes_rows_have_what_the_replica_may_count_on(policy: Play) -> None:
    """All of its own contributions, those within the bound, or exactly a version's."""
    for seed in FIXED[:6]:
        simulate(seed, policy)


def test_nobody_is_told_to_leave_while_the_only_other_worker_sleeps_and_was_told_before() -> None:
    """The simulated launcher counted the sleeper among those that stay, and no worker was left."""
    simulate(359152051, Play("tables", Sync(quorum=2)))


_answered = Requests.answered


def _the_newest_for_everybody(
    self: Requests[Any, Any], shard: int, published: int, keeps: Callable[[int], bool]
) -> list[tuple[Request[Any, Any], int | None]]:
    """A server answers with the newest version, whichever was asked for."""
    return [(request, published) for request, _ in _answered(self, shard, published, keeps)]


def _asked_once(self: RowPull, view: Any, homes: Any, connections: Any) -> Iterator[int]:
    """A request that is lost with its link is not sent again."""
    for shard in self.missing:
        if homes[shard] in connections and shard not in self._asked:
            yield shard


def _nobody_waits(self: RowPull) -> bool:
    """A replica computes with the rows that are here."""
    return True


@pytest.mark.parametrize(("owner", "name", "bug", "sentence"), [
    (Requests, "answered", _the_newest_for_everybody, "other bytes"),
    (RowPull, "unasked", _asked_once, "stuck after"),
    (RowPull, "over", property(_nobody_waits), "other bytes"),
], ids=["the newest", "asked once", "nobody waits"])  # fmt: skip
@pytest.mark.slow
def test_a_bug_planted_on_purpose_is_found(
    owner: Any, name: str, bug: Callable[..., Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert re.search(sentence, first_failure(Play("tables"), ENOUGH))
