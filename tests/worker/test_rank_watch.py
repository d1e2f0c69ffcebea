"""The leader's watch over the ranks of its worker: for whom they wait, and a rank that does not run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rallypoint.parallel import Board, RankRow
from rallypoint.worker.ranks.watch import HANGS_S, Judge, lost, process_state

COMPUTING, GRADIENTS = "computing step 3, replica 0", "moving the replica's gradients to rank 0"


class Ranks:
    """Two ranks and a clock; `look` lets a second pass."""

    def __init__(self, *, state: str = "S") -> None:
        self.rows = [RankRow(rank, 100 + rank, 0, 0.0, "", "", "") for rank in range(2)]
        self.now, self.frozen = 0.0, {-1}
        self.judge = Judge("worker0", 3.0, lambda pid: state)

    def at(self, rank: int, where: str, spot: str = "", words: str = "") -> None:
        self.rows[rank] = replace(self.rows[rank], began=self.now, where=where, spot=spot, words=words)

    def look(self, seconds: int = 1, passed: float = 1.0) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for _ in range(seconds):
            self.now += passed
            for row in self.rows:
                if row.rank not in self.frozen:
                    self.rows[row.rank] = replace(self.rows[row.rank], beat=row.beat + 1)
            found += self.judge.look(self.rows, self.now)
        return found


def test_it_says_which_rank_does_what_while_they_wait_for_each_other() -> None:
    ranks = Ranks()
    ranks.at(0, GRADIENTS)
    ranks.at(1, COMPUTING, "train.py:68")
    said = [sentence for sentence, _ in ranks.look(12)]
    assert said == [
        f"worker0 is waiting for its ranks, {seconds} s so far: rank 0: {GRADIENTS}; rank 1: {COMPUTING} (train.py:68)"
        for seconds in (5, 10)
    ]


def test_ranks_that_all_compute_are_named_only_when_it_takes_far_longer_than_before() -> None:
    ranks = Ranks()
    said = []
    for _ in range(3):
        ranks.at(0, COMPUTING)
        ranks.at(1, COMPUTING)
        said.append(len(ranks.look(7)))
    assert said == [1, 0, 0]  # the first is the longest so far
    ranks.at(0, COMPUTING)
    ranks.at(1, COMPUTING)
    assert [sentence[-26:] for sentence, _ in ranks.look(35)] == [f"s 0, 1: {COMPUTING}"[-26:]]


def test_a_leader_that_waits_for_servers_says_nothing_of_ranks() -> None:
    ranks = Ranks()
    ranks.at(1, "waiting for what rank 0 does next")
    assert ranks.look(100) == []


def test_a_rank_that_is_about_to_report_its_error_is_left_to_it() -> None:
    ranks = Ranks(state="Z")
    ranks.at(0, GRADIENTS)
    ranks.at(1, COMPUTING, words="ValueError: no")
    ranks.frozen = {1}
    assert ranks.look(100) == []


def test_a_stopped_rank_is_killed_after_a_heartbeat_and_once() -> None:
    ranks = Ranks(state="T")
    assert ranks.look(10) == []
    ranks.frozen = {1}
    assert ranks.look(3) == []
    ((sentence, pid),) = ranks.look(10)
    assert pid == 101
    assert sentence.startswith("rank 1 of worker0 (process 101) has not run for 4 s")


def test_a_rank_that_is_slow_to_run_gets_more_time() -> None:
    ranks = Ranks(state="R")
    ranks.frozen = {1}
    assert ranks.look(int(HANGS_S)) == []
    assert [pid for _, pid in ranks.look(10)] == [101]


def test_time_in_which_the_leader_itself_was_stopped_does_not_count() -> None:
    ranks = Ranks(state="T")
    ranks.look(3)
    ranks.frozen = {1}
    assert ranks.look(1, passed=3600.0) == []
    ranks.frozen = set()
    assert ranks.look(10) == []


def test_who_has_ended_is_named_with_its_last_words() -> None:
    ended = RankRow(2, 2**22 + 1, 7, 0.0, COMPUTING, "", "")  # above the largest pid
    lives = RankRow(0, os.getpid(), 7, 0.0, COMPUTING, "", "")
    spoke = RankRow(1, os.getpid(), 7, 0.0, "", "", "ValueError: no")
    assert lost([lives, spoke, ended]) == (
        f"rank 1: ValueError: no; rank 2 (process {2**22 + 1}) has ended without a word"
    )
    assert lost([lives]) == ""


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    memory = os.memfd_create("board")
    made = [Board(memory, rank, 2) for rank in range(2)]
    os.close(memory)
    yield made
    for board in made:
        board.close()


def test_every_rank_sees_what_the_others_write(boards: list[Board]) -> None:
    boards[1].at(COMPUTING)
    boards[1].beat()
    boards[1].last_words("x" * 1000)
    boards[1].last_words("a second error")
    row = boards[0].rows()[1]
    assert (row.rank, row.pid, row.beat, row.where, row.words) == (1, os.getpid(), 1, COMPUTING, "x" * 249)
    assert boards[0].rows()[0].where == ""


def test_the_state_of_a_process_is_the_system_s() -> None:
    assert process_state(os.getpid()) in ("R", "S")
    assert process_state(2**22 + 1) == ""
