"""What a process answers to ``GET /metrics``, to whom, and the file in which Prometheus finds a run's processes."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import msgspec

from rallypoint.errors import UsageError, to_install
from rallypoint.launch import environment
from rallypoint.launch.access import read_token
from rallypoint.net.rdma import NixlTransport
from rallypoint.net.tcp import TcpTransport, split_address
from rallypoint.net.tls import TlsTransport
from rallypoint.net.transport import Transport
from rallypoint.own_files import opened
from rallypoint.watch.metrics import Reading

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
            from rallypoint.watch.exposition import Exposition
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
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _refuse_everybodys(self._path.parent)
                self._path.unlink(missing_ok=True)  # of a launcher that was killed
            except OSError as error:
                raise UsageError(f"{into} cannot hold --metrics' files: {error.strerror}") from None

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
        """That process has ended."""
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


def _refuse_everybodys(folder: Path) -> None:
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UsageError(
            f"everybody may write {folder}, and so replace --metrics' files: "
            f"chmod o-w {shlex.quote(str(folder))}, or name another folder"
        )
