"""A job that ends with other bytes is told by where its frames first differ from the undisturbed job's."""

from __future__ import annotations

from types import SimpleNamespace

import fuzz_jobs
import pytest
import torch
from fuzz_campaign import Campaign
from fuzz_frames import Frame
from fuzz_jobs import Net
from fuzz_witness import Witness

from rallypoint.core.protocol import NewView, encode
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.frames import Header, Kind

TO_SOMEBODY = SimpleNamespace(name="worker0")


def saw(*frames: Frame) -> Witness:
    witness = Witness()
    for frame in frames:
        assert witness.sent(TO_SOMEBODY, frame) == []  # type: ignore[arg-type]
    return witness


def version(step: int, shard: int, payload: bytes) -> Frame:
    return Frame(Header(Kind.VERSION, step=step, shard=shard), payload)


def push(step: int, shard: int, replica: int, payload: bytes, base: int = 0) -> Frame:
    return Frame(Header(Kind.PUSH, step=step, shard=shard, replica=replica, base=base), payload)


def view(count: int, *workers: Member) -> Frame:
    number = ViewNumber(1, count)
    return Frame(Header(Kind.CONTROL), encode(NewView(View(number, number, workers, (), (), {}))))


def test_the_first_difference_is_named_and_those_that_follow_from_it_are_counted() -> None:
    before = [version(1, 0, b"a"), version(1, 1, b"b"), push(1, 1, 2, b"c"), push(1, 0, 0, b"x", base=1)]
    undisturbed = saw(*before, version(2, 0, b"d"), version(2, 1, b"e"))
    now = [version(1, 0, b"a"), version(1, 1, b"b"), push(1, 1, 2, b"C"), push(1, 0, 0, b"X", base=1)]
    sentence = saw(*now, version(2, 0, b"d"), version(2, 1, b"E")).differs_from(undisturbed)
    assert sentence.startswith("3 of 6 frames differ; first a contribution to step 1: shard 0, replicas 0 to 1 is ")
    assert ", shard 1, replica 2 is " in sentence
    assert "; version 2, the last: shard 1 is " in sentence


def test_what_only_one_of_the_runs_has_sent_is_no_difference() -> None:
    """A version may be overtaken by the next one, a contribution be sent again, or added up with others."""
    undisturbed = saw(version(1, 0, b"a"), version(2, 0, b"b"), push(0, 0, 0, b"c"))
    sentence = saw(version(2, 0, b"b"), push(0, 0, 0, b"c"), push(0, 0, 0, b"c")).differs_from(undisturbed)
    assert sentence.startswith("0 of 2 frames differ; so no worker was sent anything else; version 2 was the last; ")


def test_a_contribution_that_was_sent_with_two_values_is_shown_with_both() -> None:
    sentence = saw(push(0, 0, 0, b"c"), push(0, 0, 0, b"d")).differs_from(saw(push(0, 0, 0, b"c")))
    assert " and " in sentence.partition("shard 0, replica 0 is ")[2].partition(", not ")[0]


def test_members_of_the_job_that_came_back_are_counted_and_strangers_are_not() -> None:
    first, again = (Member("worker0", "here", incarnation=number) for number in (3, 7))
    strangers = (Member("stranger1", "there", incarnation=5), Member("stranger1", "there", incarnation=6))
    witness = saw(view(1, first), view(2, first, strangers[0]), view(3, again, strangers[1]))
    assert witness.differs_from(saw()).endswith("; 3 views, 1 members came back as new ones")


@pytest.mark.slow
def test_a_job_that_begins_with_other_weights_is_a_fault_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = Campaign("int8", seed=1)
    campaign.record()
    other = Net(table=False)
    with torch.no_grad():
        other.last.bias.add_(1.0)
    monkeypatch.setitem(fuzz_jobs._NETS, False, other)
    campaign.attack({"server before": 1})
    assert len(campaign.faults) == 1
    assert "int8, server before: the job has other bytes on worker0 and worker1: " in campaign.faults[0]
    assert "; first the uploaded weights: shard " in campaign.faults[0]
    assert "; version 16, the last: shard 0 is " in campaign.faults[0]
    assert campaign.faults[0].endswith(" views, 0 members came back as new ones")
