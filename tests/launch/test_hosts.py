"""What stands in a hosts file, and on which host a process is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch.engines.remote import SSH_OPTIONS, ssh_command
from rallypoint.launch.options import RunOptions
from rallypoint.launch.plan import Host, coordinators_host, hosts_in, hosts_of, place

A, B, C = Host("a"), Host("b"), Host("c")


def test_a_file_has_one_host_a_line_with_words_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# two machines\n10.0.0.7   # the first\n\nme@node2:2222 slots=4 roles=server,worker\n"
        "gpu python=/opt/bin/python folder=/scratch/me\n"
    )
    assert hosts_of(str(file)) == (
        Host("10.0.0.7"), Host("me@node2", port=2222, roles=("server", "worker"), slots=4),
        Host("gpu", python="/opt/bin/python", folder="/scratch/me"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", A), ("a:22", Host("a", 22)), ("me@a", Host("me@a")), ("fd00::7", Host("fd00::7")),
        ("me@[fd00::7]:2222", Host("me@fd00::7", 2222)), ("[fd00::7]", Host("fd00::7")),
    ],
)  # fmt: skip
def test_a_host_is_named_as_ssh_names_it(text: str, host: Host) -> None:
    assert hosts_in(text, "it") == (host,)


def test_a_list_needs_no_file() -> None:
    assert hosts_of("a,me@b:2222") == (A, Host("me@b", 2222))
    assert hosts_of("a") == (A,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a\nb slot=2", "it, line 2: 'slot=2' is not understood: did you mean slots?"),
        ("a big", "it, line 1: 'big' is not understood: the words after a host are roles=, slots=, python=, folder="),
        ("a roles=server,woker", "it, line 1: there is no role woker: did you mean worker?"),
        ("a slots=none", "it, line 1: slots=none: write a number from 1 to 100000"),
        ("a:99999", "it, line 1: port 99999: write a number from 1 to 65535"),
        ("me@", "it, line 1: 'me@' is not a host: write name, user@name or user@name:port"),
        ("-oProxyCommand=x", "it, line 1: '-oProxyCommand=x' is not a host: write name, user@name or user@name:port"),
        ("-x@a", "it, line 1: '-x@a' is not a host: write name, user@name or user@name:port"),
        ("a\na slots=2", "it, line 2: a stands there twice: write it once, with slots=2"),
        ("# nobody\n", "it names no host"),
    ],
)
def test_a_mistake_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        hosts_in(text, "it")
    assert str(error.value) == sentence


def test_a_file_that_is_not_there_is_no_host() -> None:
    with pytest.raises(UsageError, match=r"there is no file hosts\.txt: --hosts takes a file"):
        hosts_of("hosts.txt")


def test_the_coordinator_runs_on_the_first_host_or_the_one_that_says_so() -> None:
    chosen = Host("c", roles=("coordinator", "server"))
    assert coordinators_host((A, B)) == A
    assert coordinators_host((A, chosen)) == chosen
    assert place("coordinator", (A, B), [B], {}) == A  # also while it is away: members look for it there


def placed(hosts: tuple[Host, ...], roles: str, up: tuple[Host, ...] | None = None) -> str:
    """Where each process of these roles goes, by first letters: ``placed((A, B), "cssww")``."""
    names = {"c": "coordinator", "s": "server", "w": "worker"}
    running: dict[Host, list[str]] = {host: [] for host in hosts}
    where = ""
    for letter in roles:
        host = place(names[letter], hosts, up or hosts, running)
        assert host is not None
        running[host].append(names[letter])
        where += host.name
    return where


def test_each_role_is_spread_evenly() -> None:
    assert placed((A, B), "csswwww") == "aababab"
    assert placed((A, B, C), "csswww") == "aabcab"
    assert placed((A, B), "csw") == "aab"


def test_slots_are_shares() -> None:
    where = placed((A, Host("b", slots=3)), "wwwwwwww")
    assert (where.count("a"), where.count("b")) == (2, 6)


def test_a_host_takes_only_its_roles() -> None:
    hosts = (A, Host("b", roles=("server",)), Host("c", roles=("worker",)))
    assert placed(hosts, "cssww") == "aabca"
    assert place("worker", (Host("b", roles=("server",)),), [], {}) is None


def test_a_host_that_is_gone_gets_nothing_while_others_are_there() -> None:
    assert placed((A, B), "www", up=(B,)) == "bbb"
    assert place("worker", (A,), [], {}) == A  # it may come back


def test_the_command_of_the_client_has_no_secret_and_asks_nobody() -> None:
    argv = ssh_command(Host("me@b", 2222, python="/opt/my python"))
    options = [word for option in SSH_OPTIONS for word in ("-o", option)]
    assert argv == [
        "ssh", "-T", *options, *("-p", "2222", "--", "me@b"),
        "exec '/opt/my python' -P -m rallypoint.launch.engines.far_end",
    ]  # fmt: skip
    assert "BatchMode=yes" in SSH_OPTIONS


def test_hosts_mean_ssh_and_a_coordinator_at_its_hosts_address() -> None:
    plan = RunOptions(hosts="a,b", snapshots="none").run(["true"])
    assert (plan.engine, plan.bind, plan.hosts) == ("ssh", "{host}:0", (A, B))
    assert RunOptions(hosts="a", bind="10.0.0.7:4700", snapshots="none").run(["true"]).bind == "10.0.0.7:4700"


def test_ssh_without_hosts_is_refused() -> None:
    with pytest.raises(UsageError, match="--engine ssh on which machines"):
        RunOptions(engine="ssh").run(["true"])
