"""The leader's watch over the other ranks: it says for whom a group waits, and ends a rank that has stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rallypoint.errors import sentence_of
from rallypoint.observe.waits import FIRST_WORD_S
from rallypoint.parallel import LOST, Board, RankGroup, RankRow, is_of_another_rank

_LOOK_S = 1.0
OTHER_RANK_S = 2.0  # another rank's end may be the cause of an error: within this time, this one is ended too
HANGS_S = 60.0
_STOPPED, _ENDED = "T", ("Z", "X", "")
_MOST_SLOWER = 4.0  # all ranks compute: worth a word when it takes so many times as long as ever before


class RankWatch:
    """A thread on the leader. `say` takes a sentence for the console.

    A rank whose process does not run would be waited for as long as the job lasts, since the leader's heartbeat goes
    on. One that is stopped (SIGSTOP) is killed after `heartbeat` seconds; one that hangs in a call that keeps Python's
    lock, or in the kernel, after HANGS_S, as that may be a slow start or a loaded machine. The group ends as one, its
    replicas go to others, and the launcher starts another group. Time in which the leader itself did not run does not
    count.
    """

    def __init__(self, board: Board, worker: str, heartbeat: float, say: Callable[[str], None]) -> None:
        self._board, self._judge = board, Judge(worker, heartbeat)
        self._say, self._over = say, threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            for sentence, kill in self._judge.look(self._board.rows(), time.monotonic()):
                self._say(sentence)
                if kill:
                    with suppress(ProcessLookupError):
                        os.kill(kill, signal.SIGKILL)


class Judge:
    """Decides what to say of the ranks and which of them to kill, given their rows at one time after the other."""

    def __init__(self, worker: str, heartbeat: float, state: Callable[[int], str] | None = None) -> None:
        """`state` returns the state of a process, as `process_state` does."""
        self._worker, self._heartbeat, self._state = worker, heartbeat, state or process_state
        self._beats: dict[int, int] = {}
        self._silent: dict[int, float] = {}
        self._last: float | None = None
        self._place: tuple[float, str] = 0.0, ""  # of the leader: when it began, where
        self._patience, self._waited, self._longest = FIRST_WORD_S, 0.0, 0.0
        self._killed: set[int] = set()

    def look(self, rows: Sequence[RankRow], now: float) -> list[tuple[str, int]]:
        """Return sentences to say; with each the process to kill, or 0. Times are in seconds."""
        passed = 0.0 if self._last is None else min(now - self._last, 2 * _LOOK_S)  # more: this process was stopped
        self._last = now
        found = [self._stopped(row) for row in rows[1:] if self._is_silent(row, passed)]
        if not found and (sentence := self._waiting(rows, now)):
            found.append((sentence, 0))
        return found

    def _is_silent(self, row: RankRow, passed: float) -> bool:
        lives = row.pid == 0 or row.beat != self._beats.get(row.rank)
        self._beats[row.rank] = row.beat
        self._silent[row.rank] = 0.0 if lives else self._silent.get(row.rank, 0.0) + passed
        if self._silent[row.rank] <= self._heartbeat or row.pid in self._killed or row.words:
            return False
        state = self._state(row.pid)
        return state == _STOPPED or (state not in _ENDED and self._silent[row.rank] > HANGS_S + self._heartbeat)

    def _stopped(self, row: RankRow) -> tuple[str, int]:
        self._killed.add(row.pid)
        return (
            f"rank {row.rank} of {self._worker} (process {row.pid}) has not run for {self._silent[row.rank]:.0f} s: "
            "all ranks of that worker are ended, and others take its replicas"
        ), row.pid

    def _waiting(self, rows: Sequence[RankRow], now: float) -> str:
        place, waited = (rows[0].began, rows[0].where), now - rows[0].began
        if place != self._place:
            self._longest = max(self._longest, self._waited)
            self._place, self._patience = place, FIRST_WORD_S
        self._waited = waited if rows[0].where else 0.0
        if self._waited < self._patience or any(row.words for row in rows):  # the latter: its error is about to come
            return ""
        if len({row.where for row in rows}) == 1 and waited < _MOST_SLOWER * self._longest:
            return ""  # all do the same, and it is no more than slow
        while self._patience <= waited:
            self._patience *= 2
        return f"{self._worker} is waiting for its ranks, {waited:.0f} s so far: {described(rows)}"


def described(rows: Sequence[RankRow]) -> str:
    """What each rank does, ranks that do the same together: ``ranks 0, 2: taking version 3; rank 1: ...``."""
    same: dict[str, list[str]] = {}
    for row in rows:
        what = (row.where or "in the script") + (f" ({row.spot})" if row.spot else "")
        same.setdefault(what, []).append(str(row.rank))
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {what}" for what, ranks in same.items())


def cause_of(error: BaseException, group: RankGroup | None) -> str:
    """Return in one sentence why the script has failed on this rank; if another rank's end is why, that one's words."""
    if group is None or not is_of_another_rank(error):
        return sentence_of(error)
    time.sleep(2 * OTHER_RANK_S)  # longer than another rank waits before it prints its error
    return lost([] if group.board is None else group.board.rows()[1:]) or LOST


def lost(rows: Sequence[RankRow]) -> str:
    """Return which of these ranks have ended, and with what last words; "" if all live."""
    found = []
    for row in rows:
        if row.words:
            found.append(f"rank {row.rank}: {row.words}")
        elif row.pid and process_state(row.pid) in _ENDED:
            found.append(f"rank {row.rank} (process {row.pid}) has ended without a word")
    return "; ".join(found)


def process_state(pid: int) -> str:
    """Return the letter of a process's state (`man 5 proc`): T for one that is stopped; "" if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""
