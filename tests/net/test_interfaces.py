"""An interface's name stands for its address."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.net import places
from rallypoint.net.places import at_interface
from support.netlab import Netlab

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
