"""What makes a run's bytes comparable with another's is said when it begins: its first weights, its threads."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_shell import Play

from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.state import Resumed
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Propose, Say
from rallypoint.net.transport import InprocTransport

ONE, OTHER = b"1" * 16, b"2" * 16


def propose(play: Play, worker: str, first: bytes = ONE, threads: int = 1) -> None:
    play.join(worker)
    play.say(worker, Propose(msgspec.structs.replace(play.record, threads=threads), b"", first))


def said(play: Play) -> list[str]:
    return [say.text for say in play.logged(Say)]


def test_the_hash_of_the_first_weights_is_in_the_event_log() -> None:
    play = Play()
    play.join("s0")
    propose(play, "w0")
    assert said(play) == [f"version 0, the first weights, has the hash {ONE.hex()}"]


def test_a_worker_with_other_first_weights_is_named_once() -> None:
    play = Play(workers_start=2, workers_max=3)
    play.join("s0")
    propose(play, "w0")
    propose(play, "w1", OTHER)
    assert play.view.uploader == "w0"
    assert [text.partition(" made other first weights")[0] for text in said(play)[1:]] == ["w1"]
    assert "torch.manual_seed(0)" in said(play)[1]
    propose(play, "w2", OTHER)  # it comes later
    assert [text.partition(" made other first weights")[0] for text in said(play)[2:] if " made " in text] == ["w2"]


def test_workers_with_the_same_first_weights_and_ranks_that_have_none_are_not_named() -> None:
    play = Play(workers_start=2)
    play.join("s0")
    propose(play, "w0")
    propose(play, "w1")
    assert len(said(play)) == 1
    play = Play(workers_start=2)
    play.join("s0")
    propose(play, "w0", b"")
    propose(play, "w1", b"")
    assert said(play) == []


def test_another_coordinator_says_nothing_of_them_again() -> None:
    play = Play(workers_start=2)
    play.join("s0")
    propose(play, "w0")
    propose(play, "w1", OTHER)
    again = Play(play.shell.machine.state(), workers_start=2)
    again.incarnations, again.known = play.incarnations, play.known
    again.join("s0")
    propose(again, "w0")
    propose(again, "w1", OTHER)
    assert not [text for text in said(again) if "weights" in text]


def test_a_number_of_threads_that_is_not_the_usual_one_is_said_and_a_worker_with_another_is_named() -> None:
    play = Play(workers_start=2)
    play.join("s0")
    propose(play, "w0", threads=4)
    propose(play, "w1", threads=2)
    threads, _, other = said(play)
    assert threads.startswith("4 intra-op threads: the weights differ in the last digits")
    assert other.startswith("w1 computes with 2 intra-op threads, the job with 4")


@pytest.mark.parametrize(("wanted", "had", "threads"), [(0, None, 1), (3, None, 3), (0, 4, 4), (3, 4, 3), (0, 0, 1)])
def test_the_coordinator_decides_with_how_many_threads_all_compute(wanted: int, had: int | None, threads: int) -> None:
    """What the command says counts, else what the job that goes on has had, else 1."""
    record = msgspec.structs.replace(Play().record, threads=had or 0)
    going_on: dict[str, Any] = {} if had is None else {"resume": Resumed(record, "step-4", 4)}
    service = CoordinatorService(
        terms=Terms(), bind="coordinator:0", transport=InprocTransport(), join_info=JoinInfo(threads=wanted), **going_on
    )
    service.start()
    try:
        assert service._welcome().threads == threads
    finally:
        service.close()
