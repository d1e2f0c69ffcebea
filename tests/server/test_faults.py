"""A fault of a server's own threads ends the job with a sentence: nobody else would know why frames do not come. And
its owner's thread computes as the job says.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from one_server import FIRST, OneServer

from rallypoint.aggregator import AggregatorService
from rallypoint.core.protocol import GiveUp, Hello, Message
from rallypoint.core.view import Member
from rallypoint.data.loader import one_thread
from rallypoint.errors import LinkError, ProtocolError, RallypointError
from rallypoint.net.handshake import Credentials, Identity
from rallypoint.net.transport import InprocTransport
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.server.member import Views
from rallypoint.server.service import Peers, ServerService

FAULT = KeyError("a bug")
BROKEN: Any = SimpleNamespace(fault=FAULT, name="w")


def test_what_could_not_be_sent_to_a_worker_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(channel: Any, worker: str) -> None:
        raise ProtocolError("what was queued for w could not be sent")

    said: list[Message] = []
    server: Any = ServerService(id="s", coordinator="nobody:1", transport=InprocTransport())
    monkeypatch.setattr(server, "_intake", SimpleNamespace(receive_from_worker=receive), raising=False)
    monkeypatch.setattr(server, "_links", SimpleNamespace())
    monkeypatch.setattr(server._views, "wait_for", lambda number: None)
    server._link = SimpleNamespace(send=said.append)
    with pytest.raises(ProtocolError):
        server._serve(BROKEN, Hello("worker", "w", "here", b""))
    server._owner.stop()
    assert said == [GiveUp("server s failed: KeyError: 'a bug'")]
    assert server.wait() == "server s failed: KeyError: 'a bug'"


@pytest.mark.parametrize("role", [ServerService, AggregatorService])
def test_one_that_cannot_listen_leaves_no_thread(role: Any) -> None:
    transport = InprocTransport()
    taken, before = transport.listen("s:1"), set(threading.enumerate())
    with pytest.raises(RallypointError):
        role(id="s", coordinator="nobody:1", bind=taken.address, transport=transport).start()
    assert set(threading.enumerate()) == before
    taken.close()


def test_what_could_not_be_sent_to_another_server_ends_the_job() -> None:
    put: list[inbox.Event | None] = []
    failed: list[Exception] = []
    peers = Peers(
        Views(), put.append, transport=InprocTransport(), tracer=Tracer("s"),
        credentials=Credentials(Identity("server", "s")), failed=failed.append, always=False,
    )  # fmt: skip
    other = Member("s1", "there", "s1:1", 2)
    calls = peers._opened(other)._calls
    calls.up(BROKEN)
    calls.down(LinkError("cut"))
    assert put == [inbox.PeerLinked(other, BROKEN), inbox.PeerLost("s1", BROKEN)]
    assert failed == [FAULT]


def test_a_connection_that_another_one_of_its_worker_replaces_is_closed() -> None:
    """It may be the real worker's: closed, it comes again, follows again and asks again. Left open, it would wait."""
    closed: list[int] = []

    def channel(number: int) -> Any:
        close = lambda: closed.append(number)  # noqa: E731
        return SimpleNamespace(number=number, name="w", connection=SimpleNamespace(close=close))

    server = OneServer()
    server.adopt(FIRST)
    for number in (1, 3, 2):  # 2 is late: what waited for the view is told in either order
        server.reducer.handle(inbox.Linked(channel(number), "w"))
    assert closed == [1]


def test_an_owner_that_begins_while_samples_are_loaded_computes_with_the_job_s_threads() -> None:
    """A thread's first computation in torch takes the number of threads that the process has then, for ever; sums
    depend on it. Embedded, the loop's main thread loads samples with one thread, beside it.
    """
    server, began, loaded, threads, before = (
        OneServer(), threading.Event(), threading.Event(), list[int](), torch.get_num_threads()
    )  # fmt: skip
    server.job.record = msgspec.structs.replace(server.job.record, threads=2)

    def own() -> None:
        server.adopt(FIRST)
        torch.zeros(1 << 17).sum()
        began.set()
        assert loaded.wait(30.0)
        threads.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        owner = threading.Thread(target=own)
        with one_thread():
            owner.start()
            assert began.wait(30.0)
        loaded.set()
        owner.join(30.0)
        assert (threads, torch.get_num_threads()) == ([2], 2)
    finally:
        torch.set_num_threads(before)
