"""What a process answers to ``GET /metrics``, and to whom."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from rallypoint.errors import UsageError, to_install
from rallypoint.launch import environment
from rallypoint.launch.access import read_token
from rallypoint.net.rdma.transport import NixlTransport
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.tls.transport import TlsTransport
from rallypoint.net.transport import Transport
from rallypoint.watch.metrics.measures import Reading

PATH = "/metrics"
_LEAST_TOKEN = 16
_TEXT = "text/plain; charset=utf-8"

Read = Callable[[], Iterable[Reading]]


class Answer(NamedTuple):
    """The answer to one request."""

    status: HTTPStatus
    body: bytes
    kind: str = _TEXT


class Metrics:
    """The metrics of one process, which listens at `address` (``host:port``).

    Who asks shows `token` as a bearer token. If it is "", only this machine can ask, and no page in a browser, which
    would ask under a name.

    Attributes:
        read: the readings; none before the process knows its role.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self._token = token
        self._private = TcpTransport().private(address)
        self.read: Read = lambda: ()

    def answer(self, header: Callable[[str], str]) -> Answer:
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
            from rallypoint.watch.metrics.exposition import Exposition
        except ModuleNotFoundError as error:
            return _sentence(HTTPStatus.NOT_IMPLEMENTED, f"metrics need {error.name}: {to_install('watch')}")
        return Answer(HTTPStatus.OK, *Exposition(self.read).text(header("Accept")))


def check_installed() -> None:
    """UsageError if what makes metrics is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"metrics need {error.name}: {to_install('watch')}") from None


def of_process(role: str, member: str, ready: Callable[[], bool], transport: Transport, own: Read) -> Read:
    """The readings of a process: those that each has, and its `own`. `ready`: does it take part in its job?"""

    def read() -> Iterator[Reading]:
        yield Reading("rallypoint_process_info", 1, {"role": role, "member": member})
        yield Reading("rallypoint_ready", float(ready()))
        if isinstance(transport, TcpTransport | TlsTransport | NixlTransport):
            sent, received = transport.traffic.totals()
            yield Reading("rallypoint_network_sent_bytes", sent)
            yield Reading("rallypoint_network_received_bytes", received)
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


def _sentence(status: HTTPStatus, text: str) -> Answer:
    return Answer(status, f"{text}\n".encode())
