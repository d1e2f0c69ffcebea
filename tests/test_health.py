"""What a process says to whoever probes it, and the exit status with which it makes room for another."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from rallypoint.coordinator.inbox import Owner
from rallypoint.errors import AddressInUse, UsageError
from rallypoint.launch.environment import LEFT_STATUS, left_status
from rallypoint.launch.observing import health as module
from rallypoint.launch.observing.health import MOST_ASKED_AT_ONCE, STUCK_S, Health, answering, stuck_for
from rallypoint.server.member import OwnerThread
from support.beside import until
from support.members import Members, members_in, script

LOCAL = "127.0.0.1:0"
ENV = {**os.environ, "RALLYPOINT_TOKEN": "a token for this test", "COLUMNS": "200"}


def get(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection(address, timeout=20.0)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode().strip()
    finally:
        connection.close()


@pytest.fixture
def health() -> Iterator[Health]:
    with answering(LOCAL) as made:
        yield made


def test_it_is_alive_from_the_start_and_ready_once_it_has_joined(health: Health) -> None:
    assert get(health.address, "/healthz") == (200, "ok")
    assert get(health.address, "/readyz") == (503, "it has not joined its job yet")
    health.joined()
    assert get(health.address, "/readyz?verbose") == (200, "ok")
    health.joined(lambda: "its job is over", lambda: "s0 has not got on for 61 s")
    assert get(health.address, "/readyz") == (503, "its job is over")
    assert get(health.address, "/healthz") == (503, "s0 has not got on for 61 s")


def test_nothing_else_can_be_asked_and_nothing_be_changed(health: Health) -> None:
    assert get(health.address, "/")[0] == 404
    assert get(health.address, "/healthz/../metrics")[0] == 404
    assert get(health.address, "/healthz", "POST")[0] == 501


def test_without_an_address_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with answering("") as made:
        assert made.address == ""
    assert capsys.readouterr().out == ""


def test_a_wrong_address_or_one_in_use_is_one_sentence(health: Health) -> None:
    with pytest.raises(UsageError, match="'8080' is not an address"), answering("8080"):
        pass
    with pytest.raises(AddressInUse, match=r"cannot be answered at 127\.0"), answering(health.address):
        pass


def test_who_says_nothing_or_trickles_is_cut_off_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_S", 0.5)
    with answering(LOCAL) as made:
        host, _, port = made.address.rpartition(":")
        silent = socket.create_connection((host, int(port)), timeout=20.0)
        trickling = socket.create_connection((host, int(port)), timeout=20.0)
        with silent, trickling:
            stop = threading.Event()

            def trickle() -> None:
                while not stop.wait(0.01):
                    try:
                        trickling.send(b"G")
                    except OSError:
                        return

            (thread := threading.Thread(target=trickle)).start()
            try:
                assert get(made.address, "/healthz") == (200, "ok")
                assert silent.recv(1) == b""  # the end, within the socket's own 20 s
                thread.join(20.0)
                assert not thread.is_alive()
            finally:
                stop.set()
                thread.join()


def test_without_descriptors_it_waits_a_little_between_attempts(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says at once again that somebody waits: it would do nothing but ask."""
    waits, accept = list[float](), socket.socket.accept

    def accepts(listening: socket.socket) -> tuple[socket.socket, object]:
        if len(waits) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(module.time, "sleep", waits.append)
    monkeypatch.setattr(socket.socket, "accept", accepts)
    assert get(health.address, "/healthz") == (200, "ok"), "it answers as soon as there is one"
    assert waits == [module._POLL_S] * 3


def test_who_holds_connections_and_asks_nothing_keeps_no_probe_out(health: Health) -> None:
    """Kubernetes would end a process that is well."""
    host, _, port = health.address.rpartition(":")
    held = [socket.create_connection((host, int(port)), timeout=20.0) for _ in range(MOST_ASKED_AT_ONCE)]
    try:
        assert get(health.address, "/healthz") == (200, "ok")
        assert held[0].recv(1) == b"", "the oldest was cut off"
    finally:
        for sock in held:
            sock.close()


def test_it_takes_no_more_while_those_that_were_cut_off_have_not_ended(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that does not come must not cost a thread for each question."""
    monkeypatch.setattr(module, "MOST_ASKED_AT_ONCE", 1)
    monkeypatch.setattr(module, "_MOST_ENDING", 1)
    go_on = threading.Semaphore(0)
    host, _, port = health.address.rpartition(":")

    def ask() -> str:
        go_on.acquire(timeout=20.0)
        return ""

    health.joined(stuck=ask)
    asked = list[socket.socket]()
    try:
        for _ in range(3):
            asked.append(socket.create_connection((host, int(port)), timeout=20.0))
            asked[-1].sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert ended(asked[2]), "the third one is not taken"
        assert len([thread for thread in threading.enumerate() if "process_request" in thread.name]) == 2
    finally:
        go_on.release(3)
        for sock in asked:
            sock.close()


def ended(sock: socket.socket) -> bool:
    """Wait until the other side ends the connection. Returns whether it said nothing."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_thread_that_handles_one_event_for_long_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    handling, go_on = threading.Event(), threading.Event()

    class _Handler:
        def handle(self, event: str) -> None:
            handling.set()
            go_on.wait(20.0)

        def idle_work(self) -> None:
            """There is none."""

        def close(self) -> None:
            """There is nothing to close."""

    owner = OwnerThread(lambda error: None)
    owner.handler = _Handler()
    try:
        assert owner.busy_s == 0.0
        owner.put("an event")
        assert handling.wait(20.0)
        later = time.monotonic() + STUCK_S + 1.0
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert stuck_for("s0", owner.busy_s).startswith("s0 has not got on for 6")
    finally:
        monkeypatch.undo()
        go_on.set()
        owner.stop()
    assert stuck_for("s0", owner.busy_s) == ""


def test_a_coordinator_that_looks_into_its_inbox_is_not_stuck() -> None:
    owner = Owner(lambda event: None, tick_s=0.01)
    owner.start()
    try:
        until(lambda: owner.busy_s < 0.5, lambda: f"{owner.busy_s} s")
    finally:
        owner.stop()


@pytest.mark.parametrize(("text", "status"), [("", 0), ("143", 143), ("256", 0), ("-1", 0), ("x", 0)])
def test_the_status_of_who_was_told_to_go(text: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEFT_STATUS, text)
    assert left_status() == status


# ---- real processes ----

AFTER = """print("the loop is over", flush=True)
    while not pathlib.Path("gate").exists():
        time.sleep(0.01)
    print("saved", flush=True)"""
CHECKED = ("--health", LOCAL)
TOLD = {"RALLYPOINT_LEFT_STATUS": "143"}


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    (tmp_path / "train.py").write_text(script("int(sys.argv[1])", after=AFTER))
    with members_in(tmp_path, ENV) as made:
        yield made


def asks(members: Members, name: str, path: str) -> tuple[int, str]:
    return get(members.until(name, r"health checks are answered at (\S+)\n"), path)


def coordinator_of(members: Members, *arguments: str) -> str:
    members.start("coordinator", "coordinator", *CHECKED, *arguments)
    return members.until("coordinator", r"the coordinator listens at (\S+)\n")


@pytest.mark.slow
@pytest.mark.programs
def test_each_role_is_ready_when_it_has_joined_and_leaves_with_the_status_it_was_given(members: Members) -> None:
    at = coordinator_of(members, "--workers", "2", "--servers", "2")
    members.start("s0", "server", *CHECKED, "--coordinator", at)
    members.start("s1", "server", *CHECKED, "--coordinator", at, env=TOLD)
    members.start("w0", "worker", *CHECKED, "--coordinator", at, "train.py", str(10**9))
    members.until("w0", r"(has joined the job)")
    for name in ("coordinator", "s0", "w0"):
        until(lambda: asks(members, name, "/readyz") == (200, "ok"), f"{name} is not ready")  # noqa: B023
        assert asks(members, name, "/healthz") == (200, "ok")
    members.start("w1", "worker", *CHECKED, "--coordinator", at, "train.py", str(10**9), env=TOLD)
    members.until("coordinator", r"(step \d+/)")
    for name in ("w1", "s1"):
        members.started[name].send_signal(signal.SIGTERM)
        assert members.started[name].wait(60.0) == 143, members.said(name)
    assert members.started["w0"].poll() is members.started["s0"].poll() is None


@pytest.mark.slow
@pytest.mark.programs
def test_a_coordinator_that_lingers_waits_for_scripts_and_sigterm_does_not_end_one_that_saves(members: Members) -> None:
    at = coordinator_of(members, "--workers", "1", "--servers", "1", "--linger", "100")
    members.start("s0", "server", *CHECKED, "--coordinator", at)
    members.start("w0", "worker", *CHECKED, "--coordinator", at, "train.py", "3")
    members.until("w0", r"(the loop is over)")
    assert members.started["s0"].wait(60.0) == 0
    members.started["w0"].send_signal(signal.SIGTERM)  # as an engine does that takes the job for over
    assert members.started["coordinator"].poll() is None
    (members.folder / "gate").touch()
    assert members.started["w0"].wait(60.0) == 0
    members.until("w0", r"(saved)")
    assert members.started["coordinator"].wait(60.0) == 0
