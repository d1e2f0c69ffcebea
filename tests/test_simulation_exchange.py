"""Defects planted in a worker's exchange. The simulation, which runs the product's own, finds each of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rallypoint.core.view import View
from rallypoint.core.worker.slots import Landed, Send
from rallypoint.net.frames import Header
from rallypoint.testing.simulation.policies import parse_policy
from rallypoint.worker.exchange.arrivals import RowPull
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.locked import LockedShell
from rallypoint.worker.exchange.pushes import Partials, Pushes
from support.failing import first_failure

_push_slot, _adopt, _answered = Pushes._push_slot, Exchange.adopt, RowPull.answered


def _free_while_it_is_sent(self: Pushes, send: Send, header: Header) -> None:
    _push_slot(self, send, header)
    self._sent(send.shard, send.serial)


def _what_is_kept_stays(self: Partials) -> None:
    """Also of a step in which the worker was given up: others have contributed it since."""


def _the_first_is_kept(self: Partials, key: Any, kept: Any) -> None:
    self._kept.setdefault(key, kept)


def _drops_landed_states_again(self: Exchange, view: View) -> None:
    _adopt(self, view)
    self._locked.set(self._optimizer.rolled_back)


def _drops_codec_states_again(self: Exchange, view: View) -> None:
    _adopt(self, view)
    self._locked.set(self._encoder.reset)


def _whichever_pull_it_answers(self: RowPull, shard: int, number: int, data: bytearray, *, outdated: bool) -> bool:
    return _answered(self, shard, self.number, data, outdated=outdated)


def _wakes_nobody_who_waits_for_one(self: LockedShell, shard: int) -> None:
    """A forward pass that began early waits for some shards only."""
    with self.changed:
        effects = self.machine.handle(Landed(shard))
        if self.machine.complete:
            self.changed.notify_all()
    self.effects.run(effects)


@pytest.mark.parametrize(("policy", "planted", "said"), [
    ("sync", [(Pushes, "_push_slot", _free_while_it_is_sent)], "other bytes"),
    ("sync", [(Partials, "clear", _what_is_kept_stays), (Partials, "_keep", _the_first_is_kept)], "other bytes"),
    ("all-reduce", [(Exchange, "adopt", _drops_landed_states_again)], "other bytes"),
    ("codec-state", [(Exchange, "adopt", _drops_codec_states_again)], "made from no codec state"),
    ("evaluating", [(RowPull, "answered", _whichever_pull_it_answers)], "evaluated to something else"),
    ("sync", [(LockedShell, "landed", _wakes_nobody_who_waits_for_one)], "stuck"),
], ids=[
    "a slot written while it is sent", "a given-up contribution twice", "a view's roll-back twice",
    "the same with codecs", "the answer of a void pull", "a lost wake-up",
])  # fmt: skip
@pytest.mark.some("a lost wake-up")
def test_a_defect_planted_in_the_exchange_is_found(
    monkeypatch: pytest.MonkeyPatch, policy: str, planted: list[tuple[Any, str, Any]], said: str
) -> None:
    for owner, name, bug in planted:
        monkeypatch.setattr(owner, name, bug)
    assert re.search(said, first_failure(parse_policy(policy), range(100)))
