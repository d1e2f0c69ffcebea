"""The words for what is played: `python -m rallypoint.testing.simulation --policy WORD`."""

from __future__ import annotations

import pytest

from rallypoint.testing.simulation.policies import parse_policy, replay_line, word_for

WORDS = (
    "sync", "async", "all-reduce", "ssp:1", "ssp:3", "quorum:2", "fold:3", "fragments:2", "codec-state",
    "codec-state:quorum:2", "codec-state:ssp:1", "codec-state:async", "codec-state:fragments:2", "inner:3",
    "inner-fresh:2", "inner-fragments:3", "delay:1", "delay:2", "tables", "tables:quorum:2", "tables:ssp:1",
    "tables:async", "poisoned", "poisoned:async", "poisoned:quorum:2", "scaled", "paused",
    "paused:quorum:2", "paused:decided",
)
NO_WORDS = (
    "", "async:2", "codec-state:", "codec-state:all-reduce", "codec-state:codec-state", "codec-state:delay:1",
    "codec-state:inner:2", "delay", "delay:", "delay:0", "fold:0", "fragments:1", "inner", "inner-fragments:1",
    "inner-fresh:", "inner:0", "quorum:0", "ssp", "ssp:", "ssp:-1", "sync:1", "tables:", "tables:all-reduce",
    "tables:fragments:2", "tables:tables", "paused:", "paused:paused", "what",
)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_read_written_again_and_is_in_the_line_that_replays(word: str) -> None:
    policy = parse_policy(word)
    assert word_for(policy) == word
    option = "" if word == "sync" else f"--policy {word} "
    assert replay_line(3, policy) == f"python -m rallypoint.testing.simulation {option}--seed 3"


def test_each_word_is_something_else() -> None:
    assert len({repr(parse_policy(word)) for word in WORDS}) == len(WORDS)


@pytest.mark.parametrize("word", NO_WORDS)
def test_what_is_no_word_is_refused_and_the_words_are_listed(word: str) -> None:
    with pytest.raises(ValueError, match="use sync, quorum:K, ssp:S, async or fold:N"):
        parse_policy(word)
