"""Who connects to a page and says nothing keeps nobody out, and takes few files."""

from __future__ import annotations

import http.client
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from test_watch_state import PLAN, line, members, steps

from rallypoint.watch import app
from rallypoint.watch.app import HEADER, Visitors, served
from rallypoint.watch.follow import EVENTS
from support.page import in_thread

PATIENCE_S = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    messages = [PLAN, members(), *steps(0, 3)]
    (tmp_path / EVENTS).write_bytes(b"".join(line(float(t), message) for t, message in enumerate(messages)))
    return tmp_path


@contextmanager
def page(folder: Path) -> Iterator[tuple[str, int]]:
    with served(folder, {}) as (address, server), in_thread(server):
        host, port = address.removeprefix("http://").partition("/")[0].split(":")
        yield host, int(port)


def asked(where: tuple[str, int], path: str = "/healthz") -> int:
    connection = http.client.HTTPConnection(*where, timeout=PATIENCE_S)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def ends(sock: socket.socket) -> bool:
    """Wait until the other side has ended the connection."""
    sock.settimeout(PATIENCE_S)
    try:
        while sock.recv(1 << 16):
            continue
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: 127.0", b"POST /order HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: 9\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET"])  # fmt: skip
def test_who_asks_nothing_whole_is_cut_off_after_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(app, "ASK_S", 0.2)
    with page(folder) as where, socket.create_connection(where) as silent:
        silent.sendall(said)
        assert ends(silent)
        assert asked(where) == 200


def test_who_does_not_read_the_answers_is_cut_off_after_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "READ_S", 0.2)
    with served(folder, {}) as (address, server), in_thread(server):
        where, token = address.removeprefix("http://").split("/?token=")
        with socket.create_connection(("127.0.0.1", int(where.partition(":")[2])), PATIENCE_S) as deaf:
            ask = f"GET /uplot.js HTTP/1.1\r\nHost: localhost\r\n{HEADER}: {token}\r\n\r\n"
            deaf.sendall(ask.encode() * 500)
            poll = select.poll()
            poll.register(deaf, select.POLLRDHUP)  # not POLLIN: it reads nothing
            assert poll.poll(1000 * PATIENCE_S)


def test_of_many_who_ask_nothing_the_oldest_go(folder: Path) -> None:
    with page(folder) as where, ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(where)) for _ in range(2 * Visitors().most)]
        assert asked(where) == 200
        assert all(ends(silent) for silent in crowd[: Visitors().most])


@pytest.mark.slow
def test_a_page_in_a_process_with_few_files_outlives_a_crowd_and_says_little_of_it(folder: Path) -> None:
    few = 200

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    command = [sys.executable, "-m", "rallypoint.cli", "watch", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=limited
    ) as process:
        assert process.stdout is not None
        host, port = process.stdout.readline().split()[-1].removeprefix("http://").partition("/")[0].split(":")
        with ExitStack() as stack:
            for _ in range(few + 50):
                stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            assert asked((host, int(port))) == 200
            assert psutil.Process(process.pid).num_fds() < few / 2
        process.terminate()
        assert len(process.stdout.readlines()) < 10
