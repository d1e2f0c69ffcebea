"""What was said in an older generation is dropped, also when the roll-back came after the intake had checked it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_server import FIRST, LAYOUT, SECOND, OneServer

from rallypoint.config import resolve
from rallypoint.core.policy import Sync
from rallypoint.core.protocol import Applied
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.net.frames import Kind
from rallypoint.server import inbox
from rallypoint.store.record import ShardRecord
from support.beside import until
from support.gathering import Gathering, Once, gathering, reference_hash


@pytest.fixture
def server() -> OneServer:
    return OneServer()


def test_a_contribution_and_first_weights_of_a_stale_generation_count_for_nothing(server: OneServer) -> None:
    server.adopt(FIRST)
    server.adopt(SECOND)  # all begin again, and what follows was taken from the network before
    server.send(Kind.INITIAL, FIRST, 1.0)
    assert server.version == -1
    server.send(Kind.INITIAL, SECOND, 2.0)
    assert server.version == 0
    server.send(Kind.PUSH, FIRST, 3.0)
    server.send(Kind.PUSH, SECOND, 0.0, replica=1)
    assert server.version == 0, "the sum has only one of two"
    server.send(Kind.PUSH, SECOND, 0.0)
    assert server.version == 1
    credits = [frame for frame in server.channel.frames if frame.kind is Kind.CREDIT]
    assert sum(frame.replica for frame in credits) == 5, "whoever sent may send again"
    assert len(server.job.pool.free) == server.job.pool.made - 2, "and only the two versions' buffers are held"


def test_a_verdict_that_was_queued_before_a_roll_back_decides_nothing_after_it() -> None:
    """With a quorum the sum of the same step may be another one: only the new verdict is all servers' own."""
    server = OneServer(resolve({"replicas": 2, "steps": 5, "clip": 1.0, "sync": Sync(quorum=1)}))
    verdicts = []
    for number, value in ((FIRST, 1.0), (SECOND, 8.0)):
        server.adopt(number)
        server.send(Kind.INITIAL, number, 0.0)
        server.send(Kind.PUSH, number, value)
        verdicts.append(server.queued.pop())
    old, new = verdicts
    server.reducer.handle(old)
    assert server.version == 0
    server.reducer.handle(new)
    assert server.version == 1


# ---- A promoted backup takes a quorum's contributions in the order that was chosen, whatever it may hold ----


def test_a_worker_may_send_on_while_its_contributions_wait_for_the_one_that_was_chosen_first() -> None:
    """With one credit and nothing held beyond the limit it could never send replica 2's."""
    config = resolve({"replicas": 3, "steps": 5, "clip": 1.0, "sync": Sync(quorum=2), "network.hold_bytes": 0})
    server = OneServer(config)
    server.adopt(FIRST)
    server.send(Kind.INITIAL, FIRST, 0.0)
    machine = server.reducer.machine.machine(0)
    assert machine is not None
    machine.chosen = (2, 0)  # as if promoted in the middle of the step
    server.channel.frames.clear()
    server.send(Kind.PUSH, FIRST, 1.0, replica=0)
    assert [frame.kind for frame in server.channel.frames] == [Kind.CREDIT]
    server.send(Kind.PUSH, FIRST, 1.0, replica=1)  # was not chosen: dropped
    server.send(Kind.PUSH, FIRST, 1.0, replica=2)
    assert [frame.kind for frame in server.channel.frames] == [Kind.CREDIT] * 3
    assert machine.awaiting, "the sum is finished"


@pytest.mark.some("0")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_lost_in_the_middle_of_a_quorum_s_step_costs_no_roll_back_and_leaves_one_model(
    victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")
    with gathering(2, replication=2, workers_start=2, workers_max=2) as cluster:
        lose = Once(4, 1, lambda: cluster.safely_lose(victim))
        for _ in range(2):  # a quorum of 4 of 4: in the order in which they come
            cluster.add_worker(lose, sync=Sync(quorum=4), **{"network.hold_bytes": 0})
        first, second = [worker.result() for worker in cluster.workers]
        assert lose.done
        assert first == second
        assert not [said for said in cluster.sentences() if "going back" in said]


# ---- A worker that gets lower replicas in mid-step does not wait for credits that only these replicas would free ----


sys.path.insert(0, str(Path(__file__).parent))



def _credits_are_kept_back(cluster: Gathering) -> bool:
    reducer = cluster.servers[0]._reducer
    assert reducer is not None
    return any(early.owed is not None for early in list(reducer._tickets._early.values()))


@pytest.mark.some("1073741824-4")
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("presum_bytes", [0, 1 << 30])
def test_a_worker_whose_credits_are_kept_back_takes_over_what_was_to_free_them(window: int, presum_bytes: int) -> None:
    """One worker dies before it has sent replicas 0 and 1; the other one has sent what waits for them."""
    settings = {"network.hold_bytes": 0, "network.window": window, "network.presum_bytes": presum_bytes}
    with gathering(1, workers_start=2, workers_max=2) as cluster:

        def die(step: int, replica: int) -> None:
            if (step, replica) == (4, 0):
                until(lambda: _credits_are_kept_back(cluster))
                cluster.workers[0].job._link.close()  # as if the process were killed
                raise SystemExit

        doomed = {"worker0": die}
        workers = [cluster.add_worker(at=doomed.get(f"worker{n}", _nothing), **settings) for n in range(2)]
        assert workers[1].result() == reference_hash(**settings)
        assert {(4, 0), (4, 1)} <= set(workers[1].computed)


def _nothing(step: int, replica: int) -> None:
    """The other worker goes on."""


# ---- A server says which step its state proves to be applied: who has applied it, and said so, may be gone ----


WORDS = LAYOUT.shards[0].words


def said(server: OneServer) -> list[Applied]:
    """What it has said of applied steps since the last call."""
    found = [message for message in server.context.said if isinstance(message, Applied)]
    server.context.said.clear()
    return found


def view(number: ViewNumber, primary: str, backup: str) -> View:
    """Another view of the first generation, in which server "p" takes part too."""
    servers = tuple(Member(name, "here", f"{name}:1", 2) for name in ("s", "p"))
    return View(
        number, FIRST, (Member("w", "here", incarnation=1),), servers, (Assignment(0, {"w": (0, 1)}),), {0: primary},
        {0: backup}, uploader="w", contributors={"w": (0, 1)}, paired={0: FIRST},
    )  # fmt: skip


def test_who_has_got_a_shard_from_another_server_says_what_it_proves_at_once_and_at_each_admission() -> None:
    server, channel = OneServer(), None
    server.reducer.handle(inbox.ViewCame(view(FIRST, "p", "s")))
    record = ShardRecord(0, 3, {"master": np.zeros(WORDS, np.float32)}, {"step": 3.0})
    channel: Any = server.channel
    server.reducer.handle(inbox.StateCame(channel, "p", record, FIRST))
    proven = [Applied(2, 0, 0.0, generation=FIRST)]  # without a time: the ledger gets no entry
    assert said(server) == proven
    server.reducer.handle(inbox.ViewCame(view(ViewNumber(1, 2), "s", "p")))
    assert said(server) == []  # it was said
    for _ in range(2):
        server.reducer.handle(inbox.AdmissionCame(False))
        assert said(server) == proven
    server.reducer.handle(inbox.AdmissionCame(True))  # as a new member: what it held before does not count
    assert said(server) == []
