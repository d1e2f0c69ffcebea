"""The simulation plays fp16: the loss scale is the servers' state, and every worker has it with the version."""

from __future__ import annotations

import itertools
import re

import pytest

from rallypoint.server.shard import ScaleWords
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.replicas.contents import SCALING, scale_of
from rallypoint.testing.simulation.run import simulate
from support.failing import first_failure

FIXED = range(6, 13)
ENOUGH = range(60)  # seeds within which a planted bug has to be found


@pytest.mark.slow
def test_whatever_fails_the_scale_and_the_bytes_are_those_of_an_undisturbed_run() -> None:
    plans = [make_plan(seed, Play("scaled")) for seed in FIXED]
    assert any(plan.faults for plan in plans)
    last = [scale_of(plan.job.undisturbed()[-1]) for plan in plans]
    assert min(last) < SCALING.init_scale < max(last), "steps are skipped, and scales grow"
    for seed in FIXED:
        simulate(seed, Play("scaled"))


def test_a_server_that_forgets_some_skipped_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a server's scale does not always back off."""
    calls, advance = itertools.count(), ScaleWords.advance

    def forgets(self: ScaleWords, before: list[float], *, skipped: bool) -> None:
        advance(self, before, skipped=skipped and next(calls) % 3 != 2)

    monkeypatch.setattr(ScaleWords, "advance", forgets)
    said = first_failure(Play("scaled"), ENOUGH)
    assert re.search("another loss scale|other floats|another state|other bytes", said)


def test_its_word_is_understood() -> None:
    assert parse_policy("scaled") == Play("scaled") == make_plan(3, Play("scaled")).played
    assert word_for(Play("scaled")) == "scaled"
