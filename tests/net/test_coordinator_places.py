"""A member whose coordinator has moved finds it: it tries each place in turn, and believes who proves what he is."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Message, Welcome
from rallypoint.errors import AccessDenied, LinkError, RallypointError
from rallypoint.net import member
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection, InprocTransport
from rallypoint.server.service import ServerService
from support.beside import until

TOKEN = "a token of this job alone"
PATIENCE_S = 60.0


class Moving:
    """A coordinator with a folder, which may be ended and started again elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.transport, self.folder = InprocTransport(), folder
        self.opened = contextlib.ExitStack()

    def listen(self, address: str) -> CoordinatorService:
        terms = Terms(heartbeat=1000.0, workers_start=2)
        about = JoinInfo(folder=str(self.folder))
        service = CoordinatorService(terms=terms, token=TOKEN, bind=address, transport=self.transport, join_info=about)
        service.start()
        self.opened.callback(service.close)
        return service

    def squat(self, address: str, role: str = "coordinator") -> None:
        """Somebody else listens there, who does not know the token."""
        me = Identity(role, "", "another token, not of this job")
        gate = Gate(self.transport, address, me, lambda hello: Welcome(folder="/his"), lambda channel, hello: None)
        self.opened.callback(gate.close)

    def join(self, places: str, role: str = "worker", token: str = TOKEN) -> tuple[CoordinatorLink, Lost]:
        lost: Lost = queue.SimpleQueue()
        link = CoordinatorLink(
            transport=self.transport, address=places, me=Identity(role, f"{role}0", token),
            handlers=Handlers(_nothing, lost.put), listening_at="there:1",
        )  # fmt: skip
        link.start()
        self.opened.callback(link.close)
        until(lambda: bool(link.incarnation))
        return link, lost


Lost = queue.SimpleQueue[RallypointError]


def _nothing(message: Message) -> None:
    """These tests look at the link alone."""


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    moving = Moving(tmp_path)
    yield moving
    moving.opened.close()


def test_members_find_a_coordinator_that_has_moved(moving: Moving) -> None:
    """The journal does not bind it to an address: with it, it proves to them that it is theirs."""
    first = moving.listen("a:1")
    joined = [moving.join("a:1,b:1,c:1", role) for role in ("worker", "server")]
    welcomes = [link.welcome for link, _ in joined]
    first.close()
    second = moving.listen("b:1")
    until(lambda: set(second._shell.members) == {"worker0", "server0"}, lambda: f"{second._shell.members}")
    for (link, _), welcome in zip(joined, welcomes, strict=True):  # it knows them before they hear
        until(lambda link=link, welcome=welcome: link.welcome is not welcome)  # type: ignore[misc]
    assert all(lost.empty() for _, lost in joined)


def test_a_place_that_a_file_names_later_is_found(moving: Moving, tmp_path: Path) -> None:
    file = tmp_path / "coordinator"
    file.write_text("a:1")
    first = moving.listen("a:1")
    _, lost = moving.join(f"file:{file}")
    first.close()
    second = moving.listen("b:1")
    file.write_text("b:1")
    until(lambda: set(second._shell.members) == {"worker0"})
    assert lost.empty()


def test_who_listens_at_an_earlier_place_without_the_token_keeps_nobody_from_the_next(moving: Moving) -> None:
    moving.squat("a:1")
    service = moving.listen("b:1")
    link, _ = moving.join("a:1,b:1")
    assert link.welcome.folder == str(moving.folder)
    assert set(service._shell.members) == {"worker0"}


def test_a_newcomer_that_nobody_proves_himself_to_hears_of_every_place(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "NEWCOMER_TIMEOUT_S", 0.1)
    for address in ("a:1", "b:1"):
        moving.squat(address)
    with pytest.raises(AccessDenied, match=r"^a:1 refuses worker .* listens there; b:1 refuses worker .* there$"):
        moving.join("a:1,b:1")


def test_a_newcomer_that_is_refused_does_not_wait_for_a_place_that_is_silent(
    moving: Moving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its token is wrong, and the other place may be that of a coordinator that has moved long ago."""
    monkeypatch.setattr(member, "NEWCOMER_TIMEOUT_S", 0.1)
    moving.squat("a:1")
    with pytest.raises(AccessDenied, match=r"^a:1 refuses worker .* listens there; .*b:1"):
        moving.join("a:1,b:1")
    assert "trying again for 0 s" in caplog.text


def test_a_newcomer_waits_for_a_silent_place_while_somebody_else_listens_at_the_other(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one does not even say that it is a coordinator."""
    monkeypatch.setattr(member, "NEWCOMER_TIMEOUT_S", 0.0)
    moving.squat("a:1", role="server")
    tried, connect = list[str](), moving.transport.connect

    def connects(address: str, timeout: float) -> Connection:
        tried.append(address)
        if tried.count("b:1") == 2:
            moving.listen("b:1")
        return connect(address, timeout)

    monkeypatch.setattr(moving.transport, "connect", connects)
    link, _ = moving.join("a:1,b:1")
    assert link.welcome.folder == str(moving.folder)


def test_a_newcomer_without_a_coordinator_hears_of_every_place(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "JOIN_TIMEOUT_S", 0.1)
    with pytest.raises(LinkError, match=r"a:1.*; .*b:1"):
        moving.join("a:1,b:1")


def test_a_wildcard_is_told_as_the_interface_that_leads_to_who_answers() -> None:
    """There is no way to the first place, and the second answers."""
    service = CoordinatorService(terms=Terms(), token=TOKEN)
    service.start()
    link = CoordinatorLink(
        transport=TcpTransport(), address=f"127.0.0.1:1,{service.address}", me=Identity("server", "s", TOKEN),
        handlers=Handlers(_nothing, lambda error: None), listening_at="0.0.0.0:4711",
    )  # fmt: skip
    link.start()
    until(lambda: "s" in service._shell.machine.course.members.servers)
    assert service._shell.machine.course.members.servers["s"].address == "127.0.0.1:4711"
    link.close()
    service.close()


def test_a_coordinator_and_a_server_over_ipv6_are_told_in_brackets() -> None:
    try:
        TcpTransport().listen("[::1]:0").close()
    except LinkError:
        pytest.skip("this machine has no IPv6")
    service = CoordinatorService(terms=Terms(), token=TOKEN, bind="[::1]:0")
    service.start()
    server = ServerService(id="s", coordinator=f"[::1]:1,{service.address}", token=TOKEN, bind="[::]:0")
    server.start()
    until(lambda: "s" in service._shell.machine.course.members.servers)
    told = service._shell.machine.course.members.servers["s"].address
    assert service.address.startswith("[::1]:")
    assert told == server.address.replace("[::]", "[::1]")
    connection = TcpTransport().connect(told, PATIENCE_S)
    for thing in (connection, server, service):
        thing.close()
