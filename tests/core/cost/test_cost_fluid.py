"""Transfers that share links fairly."""

from __future__ import annotations

import math

import pytest

from rallypoint.core.plan.pipeline import Flows


def test_two_transfers_share_a_link_and_the_second_gets_all_of_it_when_the_first_ends() -> None:
    network = Flows({"a": 100.0})
    network.start("short", 50.0, {"a": 1.0})
    network.start("long", 150.0, {"a": 1.0})
    assert network.first_end() == pytest.approx(1.0)
    assert network.advance(1.0) == ["short"]
    assert network.rate("long") == 100.0
    assert network.first_end() == pytest.approx(1.0)
    assert network.advance(1.0) == ["long"]
    assert len(network) == 0
    assert network.first_end() == math.inf


def test_what_one_cannot_use_the_others_get() -> None:
    network = Flows({"a": 100.0, "slow": 10.0})
    network.start("held up", 1000.0, {"a": 1.0, "slow": 1.0})
    network.start("free", 1000.0, {"a": 1.0})
    assert (network.rate("held up"), network.rate("free")) == (10.0, 90.0)


def test_a_transfer_that_stands_for_four_takes_four_parts() -> None:
    network = Flows({"worker": 100.0, "server": 100.0})
    network.start("four workers", 100.0, {"worker": 1.0, "server": 4.0})
    assert network.rate("four workers") == 25.0


def test_a_link_that_nobody_limits_takes_no_time() -> None:
    network = Flows({"a": 100.0})
    network.start("beside", 1e9, {"elsewhere": 1.0})
    assert network.rate("beside") == math.inf
    assert network.first_end() == 0.0
    assert network.advance(0.0) == ["beside"]


def test_no_link_is_ever_overfull() -> None:
    network = Flows({"a": 10.0, "b": 20.0, "c": 5.0})
    uses = {"1": {"a": 1.0, "b": 2.0}, "2": {"b": 1.0, "c": 1.0}, "3": {"a": 3.0}, "4": {"c": 0.5, "a": 1.0}}
    for name, links in uses.items():
        network.start(name, 100.0, links)
    for link, capacity in {"a": 10.0, "b": 20.0, "c": 5.0}.items():
        taken = sum(network.rate(name) * links.get(link, 0.0) for name, links in uses.items())
        assert taken <= capacity * (1 + 1e-9)


def test_impossible_links_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="without capacity"):
        Flows({"a": 0.0})
    network = Flows({"a": 1.0})
    network.start("one", 1.0, {"a": 1.0})
    with pytest.raises(ValueError, match="under way"):
        network.start("one", 1.0, {"a": 1.0})
