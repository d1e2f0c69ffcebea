"""Requests for rows of tables wait at a server until it has the version."""

from __future__ import annotations

from rallypoint.core.shard.pulls import Request, Requests


def test_a_worker_s_newer_request_replaces_its_older_one() -> None:
    """So a worker cannot make a server keep more than one request a shard; after a new view it asks once more."""
    requests: Requests[str, int] = Requests()
    for number in range(1000):
        requests.add(3, Request("to w0", 10**6, False, number))
    requests.add(3, Request("to w1", 8, False, 77))
    requests.add(3, Request("to w0", 8, False, 1000))
    requests.add(4, Request("to w0", 8, False, 1001))
    answered = requests.answered(3, 8, lambda version: True)
    assert [(request.link, request.what) for request, _ in answered] == [("to w1", 77), ("to w0", 1000)]
    assert requests.shards == [4]
