"""What a process is given to get into a job: from a file, or from the environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from rallypoint import cli
from rallypoint.errors import LinkError, UsageError
from rallypoint.launch import environment
from rallypoint.launch.access import access_of, keep_private, read_token, token_for
from rallypoint.launch.console import RunConsole
from rallypoint.launch.engines.cluster import Cluster, Command, Handle
from rallypoint.launch.options import RunOptions
from rallypoint.launch.run import ClusterRun
from rallypoint.net.handshake import role_of, role_token

JOB = "the job's own token"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (environment.TOKEN, environment.TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)


def test_without_a_token_there_is_none() -> None:
    assert access_of().token == ""


def test_a_file_counts_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named").write_text("  of-the-option\n")
    (tmp_path / "other").write_text("of-the-environment's-file")
    monkeypatch.setenv(environment.TOKEN_FILE, str(tmp_path / "other"))
    assert access_of().token == "of-the-environment's-file"
    monkeypatch.setenv(environment.TOKEN, "of-the-environment")
    assert access_of().token == "of-the-environment"
    assert access_of(str(tmp_path / "named")).token == "of-the-option"


def test_of_the_job_s_token_a_process_keeps_what_its_role_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.TOKEN, JOB)
    assert access_of(role="worker").token == role_token(JOB, "worker")
    assert access_of(role="coordinator").token == JOB
    monkeypatch.setenv(environment.TOKEN, role_token(JOB, "worker"))
    assert access_of(role="worker").token == role_token(JOB, "worker")
    for other, needed in (("server", "a token for the role server"), ("coordinator", "the job's own token")):
        with pytest.raises(UsageError, match=f"^this token is for the role worker, and {needed} is needed"):
            access_of(role=other)


@pytest.mark.parametrize("role", ["server", "aggregator", "observer"])
def test_a_short_token_of_the_job_makes_no_long_one_of_a_role(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who guesses the job's token has the role's."""
    monkeypatch.setenv(environment.TOKEN, "short")
    with pytest.raises(UsageError, match="at least 16 characters"):
        access_of(role=role, bind="0.0.0.0:0")
    assert access_of(role=role, bind="127.0.0.1:0").token == role_token("short", role)
    monkeypatch.setenv(environment.TOKEN, role_token(JOB, role))
    assert access_of(role=role, bind="0.0.0.0:0").token == role_token(JOB, role)


@pytest.mark.parametrize("arguments", [
    ["doctor", "--listen", "0.0.0.0:0"], ["server", "--bind", "0.0.0.0:0"], ["aggregator", "--bind", "0.0.0.0:0"],
])  # fmt: skip
def test_a_role_that_others_can_reach_refuses_a_short_token(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.TOKEN, "short")
    monkeypatch.delenv(environment.COORDINATOR, raising=False)
    error = CliRunner().invoke(cli.app, arguments).exception
    assert isinstance(error, UsageError)
    assert "at least 16 characters" in str(error)


def test_without_a_token_no_role_has_one() -> None:
    assert access_of(role="worker").token == ""


def test_the_command_prints_a_job_s_token_and_then_a_role_s(tmp_path: Path) -> None:
    file = tmp_path / "job.token"
    file.write_text(token_for("", ""))
    assert len(read_token(file)) >= 32
    assert token_for("server", str(file)) == role_token(read_token(file), "server")
    assert token_for("", "") != read_token(file)


@pytest.mark.parametrize(
    ("role", "why"),
    [("coordinator", "no --role coordinator.*job's own"), ("worker", "follows from the job's"), ("", "which --role")],
)
def test_a_role_s_token_needs_a_role_and_the_job_s(role: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        token_for(role, "" if role else "job.token")


def test_a_new_file_with_a_token_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content, mode in (("", 0o600), ("a log that others read", 0o644)):
        path.write_text(content)
        path.chmod(0o644)
        with path.open("a") as file:
            keep_private(file.fileno())
        assert path.stat().st_mode & 0o777 == mode


def test_a_launcher_gives_each_process_its_role_s_token_alone(tmp_path: Path) -> None:
    started: dict[str, str] = {}

    class Noted:
        def start(self, command: Command, relay: Callable[[str], None]) -> Handle:
            started[command.role] = command.env[environment.TOKEN]
            raise LinkError("it is not started")

    plan = RunOptions().plan(["train.py"], folder=str(tmp_path))
    run = ClusterRun(plan, RunConsole(), cast(Cluster, Noted()))
    for role in ("coordinator", "server", "aggregator", "worker"):
        with pytest.raises(LinkError):
            run._start(f"{role}0", role)
    assert role_of(started["coordinator"]) == ""
    assert [role_of(started[role]) for role in ("server", "aggregator", "worker")] == ["server", "aggregator", "worker"]


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b" \n", "is empty"), (b"\xff\xfe", "not text")])
def test_a_file_without_a_token_is_a_usage_error(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        read_token(path)
