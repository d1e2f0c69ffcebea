"""A file tells of hosts, where a mistake is one sentence; and where the processes of a run listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.core.plan.topology import HostFacts, Topology
from rallypoint.core.view import Member
from rallypoint.errors import ConfigError
from rallypoint.launch.options import RunOptions, read_topology
from rallypoint.launch.plan import HERE, Launch, server_arguments, terms_of

TOLD = Topology({"node1": HostFacts("a", 1000.0), "10.0.0.7": HostFacts(link_mbit=500.0)})


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml, json = tmp_path / "hosts.toml", tmp_path / "hosts.json"
    toml.write_text('[hosts.node1]\nrack = "a"\nlink_mbit = 1000\n[hosts."10.0.0.7"]\nlink_mbit = 500\n')
    json.write_text('{"hosts": {"node1": {"rack": "a", "link_mbit": 1000}, "10.0.0.7": {"link_mbit": 500}}}')
    assert read_topology(toml) == read_topology(json) == TOLD


@pytest.mark.parametrize(
    "text",
    [
        "[hosts.a]\nlink = 5", "[hosts.a]\nlink_mbit = -1", "[hosts.a]\nlink_mbit = 'fast'", "[hosts",
        "[racks.a]\nuplink_mbit = -1", "[racks.a]\nlink_mbit = 1",
        "\xff", "[hosts.a]\nlink_mbit = inf",
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"hosts\.toml.*Write \[hosts\.NAME\]"):
        read_topology(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        read_topology(tmp_path / "none.toml")


def test_the_coordinator_gets_what_the_options_say(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text('[hosts.node1]\nrack = "a"\n')
    plan = RunOptions(topology=path, measure_links=True).plan(["train.py"], folder=str(tmp_path))
    assert terms_of(plan).topology == Topology({"node1": HostFacts("a")})
    assert terms_of(plan).measure_links is True


# ---- a host that nobody is on ----


MEMBERS = Member("worker0", "node1"), Member("server0", "node2", "10.0.0.7:4711")


def test_a_misspelt_host_is_said_with_the_name_that_is_meant() -> None:
    topology = Topology({"node1": HostFacts("a"), "10.0.0.7": HostFacts("b"), "noed2": HostFacts("b")})
    assert topology.nowhere(MEMBERS) == [
        "the topology tells of noed2, and no worker or server is on it: did you mean node2?"
    ]


def test_nothing_is_said_of_hosts_by_name_or_address_that_somebody_is_on() -> None:
    assert Topology({"node1": HostFacts("a"), "10.0.0.7": HostFacts("b")}).nowhere(MEMBERS) == []
    assert Topology().nowhere(MEMBERS) == []


# ---- Where the processes of a run listen ----


def arguments(bind: str, engine: str, advertise: str = "") -> tuple[str, ...]:
    return server_arguments(Launch(worker=(), bind=bind, engine=engine, advertise=advertise))


@pytest.mark.parametrize(
    ("bind", "server"),
    [("127.0.0.1:0", "127.0.0.1:0"), ("10.0.0.7:4700", "10.0.0.7:0"), ("[fd00::7]:4700", "[fd00::7]:0")],
)
def test_on_this_machine_servers_listen_at_the_coordinators_host(bind: str, server: str) -> None:
    assert arguments(bind, "local") == ("--bind", server)
    assert arguments(bind, "local", "10.0.0.9:4701") == ("--bind", server, "--advertise", "10.0.0.9")


@pytest.mark.parametrize(
    ("bind", "server"),
    [
        ("10.0.0.7:4700", "0.0.0.0:0"), ("0.0.0.0:4700", "0.0.0.0:0"), ("node7:0", "0.0.0.0:0"),
        ("[fd00::7]:4700", "[::]:0"), ("[::]:0", "[::]:0"), (f"{HERE}:4700", f"{HERE}:0"),
    ],
)  # fmt: skip
def test_on_other_machines_each_server_listens_at_its_own_and_advertises_nobody_elses(bind: str, server: str) -> None:
    assert arguments(bind, "ssh") == ("--bind", server)
    assert arguments(bind, "ssh", "10.0.0.9:4701") == ("--bind", server)


@pytest.mark.parametrize("bind", ["127.0.0.1:4700", "[::1]:0", "localhost:0"])
def test_where_the_coordinator_is_reached_from_its_machine_only_servers_are_too(bind: str) -> None:
    assert arguments(bind, "ssh")[1] == f"{bind.rpartition(':')[0]}:0"
