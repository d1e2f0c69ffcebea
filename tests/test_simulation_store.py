"""The simulation plays a store: keys go on by themselves, and each push counts once, whatever fails."""

from __future__ import annotations

import pytest

from rallypoint.core.keys import Line
from rallypoint.core.policy import Async, BoundedStaleness, Sync
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.run import simulate
from support.failing import first_failure

FIXED = range(12)
ENOUGH = range(100)  # seeds within which a planted bug has to be found
WORDS = {
    "store": Play("store"), "store:async": Play("store", Async()), "store:ssp:1": Play("store", BoundedStaleness(1)),
}  # fmt: skip


def test_the_values_are_those_of_an_undisturbed_run_whatever_fails() -> None:
    plans = [make_plan(seed, Play("store")) for seed in FIXED]
    assert any(plan.faults for plan in plans)
    assert any(plan.job.tables for plan in plans)
    for seed in FIXED:
        simulate(seed, Play("store"))


@pytest.mark.slow
@pytest.mark.parametrize("sync", [Async(), BoundedStaleness(1)], ids=["async", "ssp"])
def test_each_push_counts_once_and_is_read_by_who_has_made_it(sync: Async | BoundedStaleness) -> None:
    for seed in FIXED[:6]:
        simulate(seed, Play("store", sync))


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_many_seeds(word: str) -> None:
    for seed in range(100, 125):
        simulate(seed, WORDS[word])


def _nothing_is_lost(self: Line) -> None:
    """What was sent on a link that has ended counts as sent."""


def test_a_bug_planted_on_purpose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "forget", _nothing_is_lost)
    assert first_failure(Play("store"), ENOUGH)


def test_its_words_are_understood() -> None:
    for word, played in WORDS.items():
        assert parse_policy(word) == played == make_plan(3, played).played
        assert word_for(played) == word
    for word in ("store:quorum:2", "store:all-reduce", "paused:store"):
        with pytest.raises(ValueError, match="no policy"):
            parse_policy(word)
    assert Play("store") == Play("store", Sync())
