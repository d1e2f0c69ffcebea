"""Nothing leaks over a run with kills: every buffer is held by a shard or free, and every credit is given back once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rallypoint.net.frames import Header, Kind
from rallypoint.server.intake import Intake
from rallypoint.server.parts import PayloadTickets
from support.beside import until
from support.gathering import Gathering, Once, gathering, reference_hash


class Credits:
    """By connection: payloads that came from workers, and credits that were given back for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: dict[Any, int] = {}
        self.given: dict[Any, int] = {}
        self.channels: dict[Any, set[Any]] = {}
        payload, credit, give_back = Intake._payload, PayloadTickets.credit, Intake._give_back

        def receive(intake: Intake, channel: Any, header: Header) -> Any:
            received = payload(intake, channel, header)
            if header.kind in (Kind.PUSH, Kind.INITIAL):
                self.came[channel] = self.came.get(channel, 0) + 1
                self.channels.setdefault(intake, set()).add(channel)
            return received

        def count(channel: Any) -> None:
            self.given[channel] = self.given.get(channel, 0) + 1
            assert self.given[channel] <= self.came.get(channel, 0) + 1, "more credits than payloads"

        monkeypatch.setattr(Intake, "_payload", receive)
        monkeypatch.setattr(
            PayloadTickets, "credit", lambda tickets, channel: (count(channel), credit(tickets, channel))
        )
        monkeypatch.setattr(Intake, "_give_back", lambda intake, channel: (count(channel), give_back(intake, channel)))


@pytest.mark.some("2")
@pytest.mark.parametrize("replication", [1, 2])
def test_buffers_and_credits_balance_after_a_run_with_kills(
    replication: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")
    credits = Credits(monkeypatch)
    with gathering(3, tmp_path, replication=replication, workers_start=2, workers_max=2) as cluster:
        lose = Once(4, 1, lambda: cluster.servers[2].close())
        for _ in range(2):
            cluster.add_worker(lose)
        assert [worker.result() for worker in cluster.workers] == [reference_hash()] * 2
        assert lose.done
    for server in cluster.servers[:2]:  # with every thread ended
        nothing_is_held(cluster, server)
        channels = credits.channels[server._intake]
        assert len(channels) >= 2, "both workers have pushed to it"
        assert {c: credits.given.get(c, 0) for c in channels} == {c: credits.came[c] for c in channels}


def nothing_is_held(cluster: Gathering, server: Any) -> None:
    """Once its shards let go of theirs, every buffer is free."""
    reducer = server._reducer
    assert reducer._tickets._arrived == {}, "payloads that nobody will use"
    for owned in reducer._owned.values():
        owned.release()
    pool = reducer.job.pool
    until(lambda: len(pool.free) == pool.made, f"{pool.made - len(pool.free)} of {pool.made} buffers were never freed")
    assert len({id(buffer) for buffer in pool.free}) == pool.made, "a buffer is free twice"
