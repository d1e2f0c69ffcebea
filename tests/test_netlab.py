"""Labs do what they say about rates, and leave nothing behind, however they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import netlab
from support.netlab import Host, Netlab

pytestmark = pytest.mark.netns

MEGABYTE = 10**6
DETACHED = """
import os, signal
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
signal.pause()
"""
RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
got = len(connection.recv(1 << 20))
start, rest = time.perf_counter(), 0
while chunk := connection.recv(1 << 20):
    rest += len(chunk)
print(rest, time.perf_counter() - start)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
"""


@pytest.fixture
def labs_suffix(monkeypatch: pytest.MonkeyPatch) -> str:
    """Every lab of this test carries a suffix we know, so that others on this machine do not disturb it."""
    suffix = netlab.secrets.token_hex(4)
    monkeypatch.setattr(netlab.secrets, "token_hex", lambda size: suffix)
    return suffix


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _first_line(process: subprocess.Popen[str]) -> str:
    return str(process.stdout.readline())


def _python(host: Host, script: str, *args: str) -> subprocess.Popen[str]:
    return host.popen([sys.executable, "-c", script, *args], stdout=subprocess.PIPE, text=True)


def _mbit(sender: Host, receiver: Host, size: int) -> float:
    """Payload Mbit/s from one host to another over TCP, seen by the receiver after its first bytes."""
    with _python(receiver, RECEIVE, receiver.address) as receiving:
        port = _first_line(receiving).strip()
        sent = sender.run([sys.executable, "-c", SEND, receiver.address, port, str(size)], timeout=120)
        assert sent.returncode == 0, sent.stderr
        count, seconds = _first_line(receiving).split()
    return int(count) * 8 / 1e6 / float(seconds)


def test_a_link_carries_its_rate_both_ways() -> None:
    with Netlab(hosts=2, rate_mbit=50.0) as lab:  # a rate that also a busy machine can keep up with
        one, two = lab.hosts
        for sender, receiver in ((one, two), (two, one)):
            assert 0.80 <= _mbit(sender, receiver, 5 * MEGABYTE) / 50 <= 1.02


@pytest.mark.slow
def test_the_hosts_of_a_rack_share_its_uplink_and_not_each_other_s_links() -> None:
    with Netlab(hosts=3, rate_mbit=200.0, racks=(2,), uplink_mbit=50.0) as lab:
        one, two, outside = lab.hosts
        assert _mbit(one, two, 20 * MEGABYTE) > 100
        for sender, receiver in ((one, outside), (outside, two)):
            assert 0.80 <= _mbit(sender, receiver, 5 * MEGABYTE) / 50 <= 1.02


ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    while data := connection.recv(100):
        connection.sendall(data)
"""
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
began = time.perf_counter()
connection.sendall(b"x")
connection.recv(1)
print(time.perf_counter() - began)
"""


def test_what_takes_a_long_uplink_arrives_later_and_nothing_is_left_of_it(labs_suffix: str) -> None:
    with Netlab(hosts=3, racks=(2, 1), uplink_mbit=100.0, uplink_delay=0.1) as lab:
        near, one, other = lab.hosts
        assert (lab.rack(0), lab.rack(1)) == ((near, one), (other,))
        with _python(other, ECHO, other.address) as far, _python(one, ECHO, one.address) as here:
            ports = [_first_line(process).strip() for process in (far, here)]
            there = near.run([sys.executable, "-c", ASK, other.address, ports[0]], timeout=30)
            assert float(there.stdout) >= 0.4, "two uplinks there, two back"
            assert near.run([sys.executable, "-c", ASK, one.address, ports[1]], timeout=30).returncode == 0
            assert min(lab.uplink_bytes(0)) > 0
            far.kill()
            here.kill()
        delays = lab._delays
        assert delays.process.poll() is None
    assert delays.process.poll() is not None
    assert not any(labs_suffix in name for name in _namespaces())


def test_a_process_that_left_its_session_is_killed_too() -> None:
    with Netlab(hosts=1) as lab:
        process = _python(lab.hosts[0], DETACHED)
        detached = int(_first_line(process))
        assert os.getsid(detached) == detached
        assert _running(detached)
    process.stdout.close()
    assert not _running(process.pid)
    assert not _running(detached)


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_left_after_an_interrupt_at_any_command_of_the_set_up(
    labs_suffix: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    call, calls_left, setting_up = netlab._call, 0, True

    def interrupted(argv: Sequence[str], lines: Sequence[str] = ()) -> None:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0 and when == "before":
            raise KeyboardInterrupt
        call(argv, lines)
        if calls_left == 0 and when == "after":
            raise KeyboardInterrupt

    monkeypatch.setattr(netlab, "_call", interrupted)
    interrupts = 0
    while setting_up:
        calls_left = interrupts + 1
        try:
            with Netlab(hosts=2, rate_mbit=100.0):
                setting_up, calls_left = False, 0  # the set-up is over: the teardown is not to be interrupted
        except KeyboardInterrupt:
            interrupts += 1
        assert not any(labs_suffix in name for name in _namespaces())
    assert interrupts >= 5
