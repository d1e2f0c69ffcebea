"""The simulation plays averages, late gradients, digests, streamed parameters, and what nobody may send."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from rallypoint.coordinator import connections
from rallypoint.core.policy import Async
from rallypoint.core.protocol import Hello, Message
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.net.frames import Header
from rallypoint.net.pool import Buffer
from rallypoint.server.intake import FrameChecks
from rallypoint.server.parts import Fingerprints
from rallypoint.server.shard import OwnedShard, ShardAverage, StreamedShard
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import parse_policy, replay_line, word_for
from rallypoint.testing.simulation.run import simulate
from rallypoint.worker.exchange.arrivals import PulledParameter, WordPulls
from rallypoint.worker.exchange.pushes import Contributions
from support.failing import first_failure

WORDS = (
    "averaged", "averaged:async", "averaged:fragments:2", "late", "averaged:late", "recorded", "streamed", "malformed",
    "malformed:ssp:1", "malformed:tables", "malformed:all-reduce", "malformed:streamed",
)  # fmt: skip
ENOUGH = range(100)  # seeds within which a planted bug has to be found


@pytest.mark.some("late", "recorded", "streamed", "malformed")
@pytest.mark.parametrize("word", WORDS)
def test_whatever_fails_all_of_it_is_right(word: str) -> None:
    for seed in range(6):
        simulate(seed, parse_policy(word))


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_many_of_them(word: str) -> None:
    for seed in range(1000, 1100):
        simulate(seed, parse_policy(word))


@pytest.mark.parametrize("word", [*WORDS, "paused:recorded", "uneven:averaged", "resumed:streamed"])
def test_they_have_words(word: str) -> None:
    played = parse_policy(word)
    assert word_for(played) == word
    assert replay_line(3, played) == f"python -m rallypoint.testing.simulation --policy {word} --seed 3"
    assert make_plan(3, played).played == played


@pytest.mark.parametrize("word", ["malformed:store", "malformed:paused", "recorded:async", "streamed:", "tables:late"])
def test_what_cannot_be_played_is_no_word(word: str) -> None:
    with pytest.raises(ValueError, match="no policy"):
        parse_policy(word)


_load, _update, _take, _words = ShardAverage.load, ShardAverage.update, OwnedShard.take, StreamedShard.words
_applied, _filled, _checked = Fingerprints.applied, Contributions.filled, connections.checked


def _begins_anew(self: ShardAverage, arrays: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
    """A backup, or a server that restores, begins another average."""
    _load(self, {}, {})


def _counts_from_0(self: ShardAverage, version: int) -> None:
    _update(self, version - 1)


def _compares_with_the_version_after(
    self: OwnedShard, payload: Buffer, weight: float, base: int | None = None, at: int = 0
) -> None:
    _take(self, payload, weight, None if base is None else base + 1, at)


def _as_in_other_modes(self: Async, shard: ShardMachine, staleness: int) -> float:
    return 1.0 / shard.expected


def _of_the_next_version(self: Fingerprints, shard: int, version: int, held: Any) -> None:
    _applied(self, shard, version + 1, held)


def _of_another_weight(self: Contributions, shard: int, gradient: torch.Tensor, weight: float) -> None:
    _filled(self, shard, gradient, 2 * weight)


def _newest(self: StreamedShard, version: int, first: int, count: int) -> Any:
    return _words(self, max(self._wire), first, count)


def _asked_once(self: WordPulls, pulled: PulledParameter) -> Any:
    """A request that is lost with its link is not sent again."""
    homes, links = self._locked.shell.view.primary, self._locked.shell.links.connections
    for number, part in pulled.missing.items():
        if number not in pulled.asked and (home := homes[part.shard]) in links:
            yield number, part, (self._locked.shell.number, home, links[home])


def _any_push(self: FrameChecks, header: Header) -> None:
    """A contribution to a step that the job does not have."""


def _from_anybody(message: Message, sender: Hello) -> Message:
    return message


@pytest.mark.parametrize(("word", "owner", "name", "bug", "sentence"), [
    ("averaged", ShardAverage, "load", _begins_anew, "a backup has other bytes|another state"),
    ("averaged", ShardAverage, "update", _counts_from_0, "another state"),
    ("late", OwnedShard, "take", _compares_with_the_version_after, "other floats"),
    ("late", Async, "rate", _as_in_other_modes, "rate .* after"),
    ("recorded", Fingerprints, "applied", _of_the_next_version, "other digests of step"),
    ("recorded", Contributions, "filled", _of_another_weight, "other digests of step"),
    ("streamed", StreamedShard, "words", _newest, "other bytes|other floats"),
    ("streamed", WordPulls, "_unasked", _asked_once, "stuck after"),
    ("malformed", FrameChecks, "_push", _any_push, "takes Header"),
    ("malformed", connections, "checked", _from_anybody, "may say"),
])  # fmt: skip
@pytest.mark.some("late*", "recorded*", "malformed*")
def test_a_bug_planted_on_purpose_is_found(
    word: str, owner: Any, name: str, bug: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert re.search(sentence, first_failure(parse_policy(word), ENOUGH))
