"""What one worker may cost another that answers for a cache: things done for it at once, and connections."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.errors import LinkError
from rallypoint.net.transport import Connection


class BoundedPeers:
    """Lets each peer have `most` things done for it at once; whoever asks for more waits. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._changed = most, threading.Condition()
        self._busy: Counter[str] = Counter()  # of peers that have something done now, and of no others
        self._closed = False

    @contextmanager
    def of(self, peer: str) -> Iterator[None]:
        """Wait until one more may be done for this peer, and do it in the body. LinkError after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._busy[peer] < self._most)
            if self._closed:
                raise LinkError("it answers no longer")
            self._busy[peer] += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy[peer] -= 1
                self._busy += Counter()  # without those that are 0
                self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class BoundedConnections:
    """Lets each peer have `most` connections. For one more, its idle one ends that was asked longest ago.

    Each connection costs a thread. Who asks opens one anew when one that it has kept has ended. Thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        # by peer (only those that have some): each connection, and is it busy? The last to be asked is the last
        self._of: dict[str, dict[Connection, bool]] = {}

    @contextmanager
    def one(self, peer: str, connection: Connection) -> Iterator[None]:
        """This peer has a connection more, in the body. LinkError if none of its own is idle that could end for it."""
        with self._lock:
            own = self._of.setdefault(peer, {})
            idle = next((one for one, busy in own.items() if not busy), None) if len(own) >= self._most else None
            if len(own) >= self._most and idle is None:
                raise LinkError(f"{peer} has {len(own)} connections, and waits for answers on all of them")
            if idle is not None:
                del own[idle]
            own[connection] = False
        if idle is not None:
            idle.close()
        try:
            yield
        finally:
            with self._lock:
                own.pop(connection, None)
                if not own and self._of.get(peer) is own:
                    del self._of[peer]

    @contextmanager
    def busy(self, peer: str, connection: Connection) -> Iterator[None]:
        """Something is done for this connection, in the body. LinkError if it has ended for another one."""
        self._set(peer, connection, busy=True)
        yield
        self._set(peer, connection, busy=False)

    def _set(self, peer: str, connection: Connection, *, busy: bool) -> None:
        with self._lock:
            own = self._of.get(peer, {})
            if connection not in own:
                raise LinkError(f"this connection of {peer} has ended for another one")
            if busy:
                del own[connection]
            own[connection] = busy
