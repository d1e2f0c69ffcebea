"""A page that answers while a test looks at it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.watch.app import PageServer


@contextmanager
def in_thread(server: PageServer) -> Iterator[None]:
    """In the body a thread answers."""
    (thread := threading.Thread(target=server.answer, name="page", daemon=True)).start()
    try:
        yield
    finally:
        server.end()
        thread.join()
