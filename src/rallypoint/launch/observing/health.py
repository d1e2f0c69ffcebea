"""`/healthz`, `/readyz` and `/metrics`: what a process says to whoever probes it, as Kubernetes and Prometheus do.

``GET /healthz`` answers 200 while the process gets on, and ``GET /readyz`` while it takes part in its job. Otherwise
the answer is 503, and its body one sentence. ``GET /metrics`` is Prometheus' text format. There is nothing else to ask,
and nothing to change.

The first two need no token: a probe has none. Where others can connect, metrics need one of their own. The
job's would go over the network as it is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import shlex
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple

import msgspec

from rallypoint.errors import AddressInUse, Explained, LinkError, UsageError, to_install
from rallypoint.launch import environment
from rallypoint.launch.access import read_token
from rallypoint.launch.environment import ANSWERS_AT, HEALTH
from rallypoint.net.tcp import TcpTransport, both_families, family_of, split_address
from rallypoint.net.tls import TlsTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.lenient import say
from rallypoint.own_files import opened
from rallypoint.watch.metrics import Figure

PATH = "/metrics"
_LEAST_TOKEN = 16
_TEXT = "text/plain; charset=utf-8"

Read = Callable[[], Iterable[Figure]]


class HttpAnswer(NamedTuple):
    """The answer to one request."""

    status: HTTPStatus
    body: bytes
    kind: str = _TEXT


class MetricsPage:
    """The metrics of one process, which listens at `address` (``host:port``).

    Who asks shows `token` as a bearer token. If it is "", only this machine can ask, and no page in a browser, which
    would ask under a name.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self._token = token
        self._private = TcpTransport().private(address)
        self.read: Read = lambda: ()  # the readings; none before the process knows its role

    def answer(self, header: Callable[[str], str]) -> HttpAnswer:
        """Answer one request. `header` returns a header of it, or "": they decide whether, and in which text format."""
        if self._token:
            given = header("Authorization").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return _sentence(HTTPStatus.UNAUTHORIZED, f"metrics need the token in {environment.METRICS_TOKEN}")
        elif not self._private:
            return _sentence(
                HTTPStatus.FORBIDDEN, f"others can connect here: metrics are given after {environment.METRICS_TOKEN} "
                f"(or {environment.METRICS_TOKEN_FILE}) has been set, to who shows it",
            )  # fmt: skip
        elif not _by_address(header("Host")):
            return _sentence(HTTPStatus.FORBIDDEN, "ask by address, as 127.0.0.1, and not by a name")
        try:
            from rallypoint.watch.exposition import Exposition
        except ModuleNotFoundError as error:
            return _sentence(HTTPStatus.NOT_IMPLEMENTED, f"metrics need {error.name}: {to_install('watch')}")
        return HttpAnswer(HTTPStatus.OK, *Exposition(self.read).text(header("Accept")))


def check_installed() -> None:
    """UsageError if what makes metrics is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"metrics need {error.name}: {to_install('watch')}") from None


def of_process(role: str, member: str, ready: Callable[[], bool], transport: Transport, own: Read) -> Read:
    """The readings of a process: those that each has, and its `own`. `ready`: does it take part in its job?"""

    def read() -> Iterator[Figure]:
        yield Figure("rallypoint_process_info", 1, {"role": role, "member": member})
        yield Figure("rallypoint_ready", float(ready()))
        if isinstance(transport, TcpTransport | TlsTransport):
            sent, received = transport.traffic.totals()
            yield Figure("rallypoint_network_sent_bytes", sent)
            yield Figure("rallypoint_network_received_bytes", received)
        yield from own()

    return read


def metrics_token() -> str:
    """Return RALLYPOINT_METRICS_TOKEN, or the text of the file that RALLYPOINT_METRICS_TOKEN_FILE names; "": none.

    UsageError if it is too short, or its file cannot be read.
    """
    token, path = os.environ.get(environment.METRICS_TOKEN, ""), os.environ.get(environment.METRICS_TOKEN_FILE, "")
    if not token and path:
        token = read_token(Path(path))
    if token and len(token) < _LEAST_TOKEN:
        raise UsageError(f"{environment.METRICS_TOKEN} is too short: it needs at least {_LEAST_TOKEN} characters")
    return token


def _by_address(host: str) -> bool:
    """True if a request's ``Host`` is an address or localhost: a page elsewhere can make a browser ask us, but only
    under that page's own name."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost"
    return True


def _sentence(status: HTTPStatus, text: str) -> HttpAnswer:
    return HttpAnswer(status, f"{text}\n".encode())


_AT = "127.0.0.1:0"  # any free port, for this machine alone


class Targets:
    """The targets of the run in `run`, as a file in the folder `into` ("": none) that has the run's name.

    It is there while some process tells its metrics, and always complete. A folder for the files of several runs can be
    named once in Prometheus' configuration: ``files: ["targets/*.json"]``. UsageError if the folder cannot be made, or
    if everybody may replace files in it: they would choose what Prometheus reads.
    """

    def __init__(self, run: Path, into: str) -> None:
        whole = run.resolve()
        self._run, self._wanted = whole.name, bool(into)
        digest = hashlib.sha256(str(whole).encode()).hexdigest()[:8]  # runs of one name in different places
        self._path = Path(into) / f"{whole.name}-{digest}.json"
        self._known: dict[str, tuple[str, str]] = {}  # process -> its role, and where it answers
        if self._wanted:
            with Explained(UsageError, f"{into} cannot hold --metrics' files"):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                mode = self._path.parent.stat().st_mode
                if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                    raise UsageError(
                        f"everybody may write {self._path.parent}, and so replace --metrics' files: "
                        f"chmod o-w {shlex.quote(str(self._path.parent))}, or name another folder"
                    )
                self._path.unlink(missing_ok=True)  # of a launcher that was killed

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to tell its metrics."""
        return {environment.HEALTH: _AT} if self._wanted else {}

    def takes(self, name: str, role: str, line: str) -> bool:
        """True if with this line the process has said where it answers: nobody else needs to see it."""
        if not self._wanted or not line.startswith(environment.ANSWERS_AT) or name in self._known:
            return False
        address = line.removeprefix(environment.ANSWERS_AT)
        try:
            split_address(address)
        except UsageError:
            return False  # the script's own words
        self._known[name] = role, address
        self._write()
        return True

    def gone(self, name: str) -> None:
        if self._known.pop(name, None) is not None:
            self._write()

    def close(self) -> None:
        """The run is over: delete the file."""
        self._known.clear()
        if self._wanted:
            self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(f".{secrets.token_hex(8)}").name  # others may write into the folder
        targets = [
            {"targets": [address], "labels": {"run": self._run, "role": role, "member": name}}
            for name, (role, address) in self._known.items()
        ]  # fmt: skip
        text = msgspec.json.format(msgspec.json.encode(targets), indent=2)
        # OSError: a full disk: the run goes on, and is scraped as far as the file says
        with contextlib.suppress(OSError), opened(self._path.parent) as folder:
            if targets:  # at once: Prometheus, which may be another user, may read it at any moment
                folder.write(self._path.name, text, mode=0o666, beside=fresh)
            else:
                folder.unlink(self._path.name)


MOST_ASKED_AT_ONCE = 8  # connections; for the next one the oldest is cut off
_MOST_ENDING = 8  # connections that were cut off for others, and whose threads have not ended; then none is taken
LONGEST_S = 3.0  # for one request and its answer
STUCK_S = 60.0  # a thread that handles one event for so long does not get on
_POLL_S = 0.25
_NOT_JOINED = "it has not joined its job yet"


@dataclass(slots=True)
class Health:
    """What a process says of itself. Each function returns "", or a sentence that says what is wrong."""

    stuck: Callable[[], str] = lambda: ""  # why it does not get on. It should be started again then.
    unready: Callable[[], str] = lambda: _NOT_JOINED  # why it takes no part in its job
    address: str = ""  # where it answers, ``host:port``; "" if nobody can ask it
    metrics: MetricsPage = field(default_factory=lambda: MetricsPage("127.0.0.1:0"))  # its figures for Prometheus

    def joined(self, unready: Callable[[], str] = lambda: "", stuck: Callable[[], str] = lambda: "") -> None:
        """From now on it takes part in its job, but for what these functions say."""
        self.unready, self.stuck = unready, stuck

    def ready(self) -> bool:
        """Does it take part in its job?"""
        return not self.unready()

    def says(self, path: str, header: Callable[[str], str]) -> HttpAnswer:
        """Return the answer to ``GET path``. `header` returns a header of the request, or ""."""
        path = path.partition("?")[0]
        if path == PATH:
            return self.metrics.answer(header)
        ask = {"/healthz": self.stuck, "/readyz": self.unready}.get(path)
        if ask is None:
            return HttpAnswer(HTTPStatus.NOT_FOUND, b"ask for /healthz, /readyz or /metrics\n")
        why = ask()
        return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, f"{why or 'ok'}\n".encode())


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
    health = Health(metrics=MetricsPage(at, metrics_token()))
    server = _HealthServer(at, health)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="health", daemon=True)
    thread.start()
    say(f"{ANSWERS_AT}{health.address}")
    try:
        yield health
    finally:
        server.shutdown()
        thread.join()
        server.end()


class _HealthServer(ThreadingMixIn, HTTPServer):
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
        """Take the connection, and cut off the oldest if there are too many. Who holds connections and asks nothing
        must not keep probes out: Kubernetes would end a process that is well."""
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
    server: _HealthServer
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
