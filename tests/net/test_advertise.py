"""A process may bind to every address; what it tells others must be one that they can connect to."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rallypoint import cli
from rallypoint.coordinator.service import CoordinatorService
from rallypoint.core.cluster.terms import Terms
from rallypoint.errors import LinkError, UsageError
from rallypoint.launch import lifeline
from rallypoint.launch.commands import by_hand
from rallypoint.launch.observing.health import answering
from rallypoint.net import places
from rallypoint.net.places import advertised, at_interface
from rallypoint.net.tcp import EVERYWHERE, TcpTransport, split_address
from rallypoint.server import service
from rallypoint.server.service import ServerService
from support.netlab import Netlab

TOKEN = "correct horse battery staple and more"


@pytest.mark.parametrize(("bound", "wanted", "told"), [
    ("127.0.0.1:4700", "node7", "node7:4700"), ("127.0.0.1:4700", "node7:80", "node7:80"),
    ("127.0.0.1:4700", "10.0.0.7", "10.0.0.7:4700"), ("127.0.0.1:4700", "", "127.0.0.1:4700"),
    ("[::1]:4700", "[fd00::7]", "[fd00::7]:4700"), ("[::1]:4700", "[fd00::7]:80", "[fd00::7]:80"),
    ("[::1]:4700", "", "[::1]:4700"),
    # an address that can have no port needs no brackets
    ("[::1]:4700", "fd00::7", "[fd00::7]:4700"), ("[::1]:4700", "::7", "[::7]:4700"),
    ("[::1]:4700", "2001:db8:0:0:0:0:0:7", "[2001:db8:0:0:0:0:0:7]:4700"),
    # a manifest is written before anybody knows of which family the pods' addresses are
    ("[::]:4700", "[10.0.0.7]:4701", "10.0.0.7:4701"), ("[::]:4700", "[10.0.0.7]", "10.0.0.7:4700"),
    ("[::]:4700", "[fd00::1:2]:4701", "[fd00::1:2]:4701"),
])  # fmt: skip
def test_what_is_told_is_what_was_asked_for_or_where_it_listens(bound: str, wanted: str, told: str) -> None:
    assert advertised(bound, wanted) == told


@pytest.mark.parametrize(("bound", "wanted", "why"), [
    ("0.0.0.0:4700", "", "--advertise"), ("[::]:4700", "", "--advertise"),
    ("127.0.0.1:4700", "0.0.0.0:4700", "nobody can connect to"), ("127.0.0.1:4700", "[::]:4700", "nobody can connect"),
    # with or without a port?
    ("[::1]:4700", "fd00::7:80", r"--advertise \[fd00::7:80\], or \[fd00::7\]:80$"),
    ("[::1]:4700", "host::80", "'host::80' is no address"),
    # another link on every machine
    ("[fe80::1]:4700", "", "is link-local, and no other machine knows"),
    ("[fe80::1%eth0]:4700", "", "is link-local, and no other machine knows"),
    ("[::]:4700", "[fe80::1]:4700", "is link-local"), ("[::]:4700", "[fe80::1%eth0]:4700", "is link-local"),
])  # fmt: skip
def test_nobody_is_told_an_address_to_which_others_cannot_connect(bound: str, wanted: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        advertised(bound, wanted)


@pytest.mark.parametrize("address", ["fd00::1", "a:b:80", "[fd00:]:80"])
def test_what_is_no_ipv6_address_with_a_port_is_told(address: str) -> None:
    """`fd00::1` is not port 1 of a host `fd00:`."""
    with pytest.raises(UsageError, match=r"an IPv6 address stands in brackets, as \[fd00::1\]:4700"):
        split_address(address)


@pytest.mark.parametrize("address", ["[fd00::1]:80", "fd00::1:80"])
def test_an_ipv6_address_with_a_port_is_split(address: str) -> None:
    assert split_address(address) == ("fd00::1", 80)


@pytest.mark.parametrize(("bound", "towards", "told"), [
    ("0.0.0.0:4700", "127.0.0.1:9", "127.0.0.1:4700"), ("[::]:4700", "[::1]:9", "[::1]:4700"),
    ("[::]:4700", "127.0.0.1:9", "127.0.0.1:4700"), ("0.0.0.0:4700", "localhost:9", "127.0.0.1:4700"),
])  # fmt: skip
def test_a_wildcard_is_told_as_an_address_of_its_own_family(bound: str, towards: str, told: str) -> None:
    if "[" in towards:
        try:
            TcpTransport().listen("[::1]:0").close()
        except LinkError:
            pytest.skip("this machine has no IPv6")
    assert advertised(bound, towards=towards) == told


def test_who_listens_everywhere_is_reached_by_both_families() -> None:
    with contextlib.closing(TcpTransport().listen(f"{EVERYWHERE}:0")) as listener:
        port = listener.address.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            TcpTransport().connect(f"{host}:{port}", 10.0).close()
            listener.accept().close()


def test_who_listens_everywhere_does_so_on_a_system_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with contextlib.closing(TcpTransport().listen(f"{EVERYWHERE}:0")) as listener:
        assert listener.address.startswith("0.0.0.0:")


def test_health_checks_are_answered_everywhere() -> None:
    with answering(f"{EVERYWHERE}:0") as health:
        port = health.address.rpartition(":")[2]
        for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
                connection.request("GET", "/healthz")
                assert connection.getresponse().status in (200, 503)


def test_no_way_to_the_coordinator_is_a_link_error() -> None:
    with pytest.raises(LinkError, match=r"no way to \[::1\]:9: .*; add --advertise HOST:PORT"):
        advertised("0.0.0.0:4700", towards="[::1]:9")


def test_a_server_bound_to_every_address_tells_the_one_on_its_way_to_the_coordinator() -> None:
    assert advertised("0.0.0.0:4700", towards="127.0.0.1:9") == "127.0.0.1:4700"
    coordinator = CoordinatorService(terms=Terms(), token=TOKEN)
    coordinator.start()
    server = ServerService(id="server0", coordinator=coordinator.address, token=TOKEN, bind="0.0.0.0:0")
    server.start()
    known = coordinator._shell.machine.course.members.servers
    while "server0" not in known:
        assert coordinator._owner.is_alive()
    assert known["server0"].address == server._gate.address.replace("0.0.0.0", "127.0.0.1")
    server.close()
    coordinator.close()


def test_a_coordinator_bound_to_every_address_needs_to_be_told_what_to_tell() -> None:
    with pytest.raises(UsageError, match="add --advertise HOST:PORT"):
        CoordinatorService(terms=Terms(), token=TOKEN, bind="0.0.0.0:0").start()
    coordinator = CoordinatorService(terms=Terms(), token=TOKEN, bind="0.0.0.0:0", advertise="127.0.0.1")
    coordinator.start()
    assert coordinator.address.startswith("127.0.0.1:")
    assert not coordinator.address.endswith(":0")
    coordinator.close()


def test_the_server_s_command_passes_its_addresses_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(service, "ServerService", lambda **how: made.append(how))
    monkeypatch.setattr(by_hand, "run_server", lambda *started: 0)
    monkeypatch.setattr(lifeline, "hold_lifeline", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("RALLYPOINT_TOKEN", "long enough for others to see")  # (without one it is refused)
    where = ["--bind", "0.0.0.0:4700", "--advertise", "node7:80"]
    result = CliRunner().invoke(cli.app, ["server", "--coordinator", "node1:4699", "--id", "s", *where])
    assert result.exit_code == 0, result.output
    (how,) = made
    assert (how["bind"], how["advertise"], how["coordinator"]) == ("0.0.0.0:4700", "node7:80", "node1:4699")


# ---- An interface's name stands for its address ----


LOOPBACK_V6 = "00000000000000000000000000000001 01 80 10 80       lo\n"


@pytest.mark.parametrize("bind", ["10.0.0.7:4700", "[::]:0", "node3:4700", "wlan99:0"])
def test_what_is_no_interface_stays_as_it_is(bind: str) -> None:
    assert at_interface(bind) == bind


def test_an_interface_stands_for_its_address_and_the_port_stays() -> None:
    assert at_interface("lo:4700") == "127.0.0.1:4700"


def test_in_brackets_it_is_an_ipv6_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (table := tmp_path / "if_inet6").write_text("fe800000000000000000000000000007 02 40 20 80     lo\n" + LOOPBACK_V6)
    monkeypatch.setattr(places, "_IPV6", table)
    assert at_interface("[lo]:4700") == "[::1]:4700"
    table.write_text("")
    with pytest.raises(UsageError, match="the interface lo has no IPv6 address that others can reach"):
        at_interface("[lo]:4700")


def test_a_machine_without_ipv6_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_IPV6", tmp_path / "none")
    with pytest.raises(UsageError, match="has no IPv6 address"):
        at_interface("[lo]:4700")


@pytest.mark.netns
def test_the_interface_of_another_host_has_that_host_s_address() -> None:
    ask = "from rallypoint.net.places import at_interface as at; print(at('{}:4700'))"
    with Netlab(hosts=1) as lab:
        (host,) = lab.hosts
        assert host.run(["ip", "-6", "addr", "add", "fd00::7/64", "dev", "eth0"]).returncode == 0
        assert host.run([sys.executable, "-c", ask.format("eth0")]).stdout == f"{host.address}:4700\n"
        assert host.run([sys.executable, "-c", ask.format("[eth0]")]).stdout == "[fd00::7]:4700\n"
        assert host.run(["ip", "addr", "del", f"{host.address}/24", "dev", "eth0"]).returncode == 0
        assert host.run([sys.executable, "-c", ask.format("eth0")]).stdout == "[fd00::7]:4700\n"
