"""A server says which step its state proves to be applied: who has applied it may be gone, and what it said lost."""

from __future__ import annotations

from typing import Any

import numpy as np
from one_server import FIRST, LAYOUT, OneServer

from rallypoint.core.protocol import Applied
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.server import inbox
from rallypoint.store.record import ShardRecord

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
