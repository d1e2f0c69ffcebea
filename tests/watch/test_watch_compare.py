"""The page that compares runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient
from test_watch_state import PLAN, line, members, steps
from typer.testing import CliRunner

from rallypoint import cli
from rallypoint.core.protocol import Finished, Metrics
from rallypoint.errors import UsageError
from rallypoint.watch.app import HEADER, ComparisonPage, compared
from rallypoint.watch.follow import EVENTS, Follower


def run(folder: Path, last: int) -> Path:
    folder.mkdir()
    messages = [PLAN, members(), *steps(0, last), Metrics(last, {"val_loss": 0.5}), Finished("worker0")]
    (folder / EVENTS).write_bytes(b"".join(line(float(t), message) for t, message in enumerate(messages)))
    return folder


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    followers = {name: Follower(run(tmp_path / name, last)) for name, last in (("a", 3), ("b", 5))}
    for follower in followers.values():
        follower.look()
    settings = {"a": {"engine": "local", "optimizer.lr": "0.1"}, "b": {"engine": "local", "clip": "1.0"}}
    page = ComparisonPage(followers, settings, "secret")
    return TestClient(page.app, base_url="http://127.0.0.1:1234", follow_redirects=False)


def test_it_tells_the_curves_of_each_run_and_the_settings_that_differ(client: TestClient) -> None:
    assert client.get("/runs").status_code == 403
    client.headers[HEADER] = "secret"
    told = client.get("/runs").json()
    first, second = told["runs"]
    assert (first["name"], first["step"], second["step"], second["ended"]) == ("a", 3, 5, "finished")
    assert first["curves"]["loss"] == {"step": [0, 1, 2], "mean": [5.0, 4.0, 3.0]}
    assert second["curves"]["val_loss (evaluation)"] == {"step": [5], "mean": [0.5]}
    assert first["settings"] == {"clip": "", "optimizer.lr": "0.1"}
    assert second["settings"] == {"clip": "1.0", "optimizer.lr": ""}
    assert client.get("/runs", params={"seen": told["state"]}).status_code == 204
    assert client.get("/runs", params={"seen": "another"}).status_code == 200


@pytest.mark.parametrize("path", ["", "ask.js", "compare.js", "page.css", "uplot.js", "uplot.css"])
def test_its_files_ask_nothing_of_the_internet(client: TestClient, path: str) -> None:
    answer = client.get(f"/{path}")
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    if path != "uplot.js":
        assert "http" not in answer.text.replace("http-equiv", "")


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name the folder of a run"), compared({"a": tmp_path}, {}):
        pass
    one = run(tmp_path / "a", 3)
    assert "named twice" in str(CliRunner().invoke(cli.app, ["watch", str(one), str(one)]).exception)


def test_two_runs_are_compared_in_the_terminal_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ssh there is no browser. The learning rate is in the scripts, and the members have agreed on it."""
    monkeypatch.setattr("rallypoint.cli.watching.resolved_of", lambda run: {"optimizer.lr": f"0.{ord(run.name)}"})
    runs = [str(run(tmp_path / name, last)) for name, last in (("a", 3), ("b", 5))]
    (tmp_path / "c").mkdir()  # runs/* names it too
    closed = tmp_path / ("d" * 300)  # cannot be looked into, as another user's (root could)
    result = CliRunner().invoke(cli.app, ["watch", *runs, str(tmp_path / "c"), str(closed), "--terminal"])
    assert result.exit_code == 0, result.output
    for said in ("optimizer.lr  0.97  0.98", "a  finished  step 3", "b  finished  step 5", "loss of a", "loss of b"):
        assert said in result.output
    assert f"left out, without events.jsonl: {tmp_path / 'c'}, {closed}" in result.output
