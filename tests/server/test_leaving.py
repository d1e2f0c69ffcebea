"""A server that is told to go says so to its coordinator until it may."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from rallypoint.core.protocol import Leaving, Message, Welcome
from rallypoint.server import member
from rallypoint.server.service import ServerService

PATIENCE_S = 60.0


def test_a_notice_that_comes_before_the_server_has_joined_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.SimpleQueue[Message] = queue.SimpleQueue()

    class _Link:
        """A link to a coordinator that hears what is said."""

        welcome = Welcome()

        def __init__(self, **_: Any) -> None:
            self.send = said.put

        def start(self) -> None:
            """Nothing comes."""

        def close(self) -> None:
            """There is nothing to close."""

    monkeypatch.setattr(member, "CoordinatorLink", _Link)
    server = ServerService(id="s", coordinator="127.0.0.1:1")
    server.leave()  # SIGTERM, while it looks for its coordinator
    server.start()
    try:
        assert said.get(timeout=PATIENCE_S) == Leaving()
    finally:
        server.close()
