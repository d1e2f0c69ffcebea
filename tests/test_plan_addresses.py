"""Where the processes of a run listen: at one host on this machine, each at its own on machines of an engine."""

from __future__ import annotations

import pytest

from rallypoint.launch.plan import HERE, Launch, server_arguments


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
