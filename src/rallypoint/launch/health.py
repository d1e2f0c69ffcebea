"""`/healthz`, `/readyz` and `/metrics`: what a process says to whoever probes it, as Kubernetes and Prometheus do.

``GET /healthz`` answers 200 while the process gets on, and ``GET /readyz`` while it takes part in its job. Otherwise
the answer is 503, and its body one sentence. ``GET /metrics`` is Prometheus' text format. There is nothing else to ask,
and nothing to change.

The first two need no token: a probe has none. Where others can connect, metrics need one of their own: see
`launch.observing.metrics`. The job's would go over the network as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from rallypoint.errors import AddressInUse, LinkError
from rallypoint.launch.environment import ANSWERS_AT, HEALTH
from rallypoint.launch.observing.metrics import PATH, Answer, Metrics, metrics_token
from rallypoint.net.tcp import both_families, family_of, split_address
from rallypoint.observe.lenient import say

MOST_ASKED_AT_ONCE = 8  # connections; for the next one the oldest is cut off
_MOST_ENDING = 8  # connections that were cut off for others, and whose threads have not ended; then none is taken
LONGEST_S = 3.0  # for one request and its answer
STUCK_S = 60.0  # a thread that handles one event for so long does not get on
_POLL_S = 0.25
_NOT_JOINED = "it has not joined its job yet"


@dataclass(slots=True)
class Health:
    """What a process says of itself. Each function returns "", or a sentence that says what is wrong.

    Attributes:
        stuck: why it does not get on. It should be started again then.
        unready: why it takes no part in its job.
        address: where it answers, ``host:port``; "" if nobody can ask it.
        metrics: its figures for Prometheus.
    """

    stuck: Callable[[], str] = lambda: ""
    unready: Callable[[], str] = lambda: _NOT_JOINED
    address: str = ""
    metrics: Metrics = field(default_factory=lambda: Metrics("127.0.0.1:0"))

    def joined(self, unready: Callable[[], str] = lambda: "", stuck: Callable[[], str] = lambda: "") -> None:
        """From now on it takes part in its job, but for what these functions say."""
        self.unready, self.stuck = unready, stuck

    def ready(self) -> bool:
        """Does it take part in its job?"""
        return not self.unready()

    def says(self, path: str, header: Callable[[str], str]) -> Answer:
        """Return the answer to ``GET path``. `header` returns a header of the request, or ""."""
        path = path.partition("?")[0]
        if path == PATH:
            return self.metrics.answer(header)
        ask = {"/healthz": self.stuck, "/readyz": self.unready}.get(path)
        if ask is None:
            return Answer(HTTPStatus.NOT_FOUND, b"ask for /healthz, /readyz or /metrics\n")
        why = ask()
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, f"{why or 'ok'}\n".encode())


def stuck_for(what: str, busy_s: float) -> str:
    """Return the sentence about `what`, which has handled one event for `busy_s` seconds; "" if it gets on."""
    return f"{what} has not got on for {busy_s:.0f} s" if busy_s > STUCK_S else ""


def health_at() -> str:
    """Return where this process is to answer, as whoever started it has said in RALLYPOINT_HEALTH, or "".

    The variable goes: what this process starts cannot listen at the same place.
    """
    return os.environ.pop(HEALTH, "")


@contextlib.contextmanager
def answering(at: str) -> Iterator[Health]:
    """In the body, answer at ``host:port`` (port 0: any free one), and print where. Yields what is answered.

    "": nobody can ask.

    Raises AddressInUse when another process listens there, LinkError when it is no address of this machine, UsageError
    when the metrics' token is too short or cannot be read.
    """
    if not at:
        yield Health()
        return
    health = Health(metrics=Metrics(at, metrics_token()))
    server = _Server(at, health)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="health", daemon=True)
    thread.start()
    say(f"{ANSWERS_AT}{health.address}")
    try:
        yield health
    finally:
        server.shutdown()
        thread.join()
        server.end()


class _Server(ThreadingMixIn, HTTPServer):
    """Answers each connection on a thread of its own, in bounded number and time: who sends slowly is cut off."""

    daemon_threads = False  # they are waited for when it ends

    def __init__(self, at: str, health: Health) -> None:
        host, port = split_address(at)
        self.health = health
        self.address_family, host = family_of(host)
        self._open: dict[socket.socket, float] = {}  # until when each connection may last; the oldest first
        self._ending: set[socket.socket] = set()  # those that were cut off for others
        self._lock = threading.Lock()
        try:
            super().__init__((host, port), _Request)
        except OSError as error:
            kind = AddressInUse if "in use" in str(error) else LinkError
            raise kind(f"the health checks cannot be answered at {at}: {error.strerror or error}") from None
        name, port = self.server_address[:2]
        health.address = f"[{name!s}]:{port}" if ":" in str(name) else f"{name!s}:{port}"

    def server_bind(self) -> None:
        """Bind. (The base class looks up this host's name in DNS, which may take long.)"""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        both_families(self.socket, str(self.server_address[0]))
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "", self.server_address[1]

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Without free file descriptors it waits a little: else `serve_forever`, which is told at
        once again that somebody waits, would do nothing else."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_POLL_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take the connection, and cut off the oldest if there are too many.

        Who holds connections and asks nothing must not keep probes out: Kubernetes would end a process that is well.
        """
        with self._lock:
            if len(self._ending) >= _MOST_ENDING:
                return False
            if len(self._open) >= MOST_ASKED_AT_ONCE:
                oldest = next(iter(self._open))
                del self._open[oldest]
                self._ending.add(oldest)
                _end(oldest)
            self._open[request] = time.monotonic() + LONGEST_S
            return True

    def service_actions(self) -> None:
        """Cut off who takes too long. Called by `serve_forever` each time that it looks around."""
        self._cut_off(time.monotonic())

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered, or not taken."""
        with self._lock:
            self._open.pop(request, None)
            self._ending.discard(request)
        super().shutdown_request(request)

    def end(self) -> None:
        """Cut off who is being answered, and wait for the threads."""
        self._cut_off(float("inf"))
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the other side has gone, or was cut off."""

    def _cut_off(self, now: float) -> None:
        with self._lock:
            for request, until in self._open.items():
                if now >= until:
                    _end(request)


def _end(request: socket.socket) -> None:
    """End a connection; its thread, which closes it, notices that."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = LONGEST_S
    server_version, sys_version = "rallypoint", ""

    def do_GET(self) -> None:
        answer = self.server.health.says(self.path, lambda name: str(self.headers.get(name, "")))
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        if answer.status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: probes come all the time."""
