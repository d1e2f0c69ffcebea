"""The simulation plays frames of stale generations, and finds a server that takes one (I10)."""

from __future__ import annotations

import re

import pytest

from rallypoint.core.policy import AllReduce, BoundedStaleness, Sync
from rallypoint.core.shard.shell import Fence
from rallypoint.testing.simulation.policies import Played, word_for
from support.failing import first_failure

ENOUGH = range(100)  # seeds within which a planted bug has to be found


@pytest.mark.parametrize("policy", [Sync(), Sync(quorum=2), BoundedStaleness(1), AllReduce()], ids=word_for)
@pytest.mark.some("all-reduce")
def test_a_server_that_takes_a_frame_of_a_stale_generation_is_found(
    policy: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fence, "is_stale", lambda self, number: False)
    sentence = r"server\d+ takes a \w+ of \w+ that is of view [\d.]+; the generation is"
    assert re.search(sentence, first_failure(policy, ENOUGH))
