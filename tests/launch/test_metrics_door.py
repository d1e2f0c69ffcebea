"""Who may read a process's metrics, and where a run says that they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch.environment import ANSWERS_AT, HEALTH, METRICS_TOKEN, METRICS_TOKEN_FILE
from rallypoint.launch.observing.health import Health, Targets, answering, health_at, of_process
from rallypoint.launch.options import RunOptions
from rallypoint.net.tcp import TcpTransport
from rallypoint.watch.metrics import Figure

TOKEN = "a token for metrics"


def get(health: Health, **headers: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", int(health.address.rpartition(":")[2]), timeout=20.0)
    try:
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def health() -> Iterator[Health]:
    with answering("127.0.0.1:0") as made:
        own = lambda: [Figure("rallypoint_worker_step", 7)]  # noqa: E731
        made.metrics.read = of_process("worker", "w0", made.ready, TcpTransport(), own)
        yield made


def test_metrics_are_those_of_every_process_and_its_own(health: Health) -> None:
    status, text = get(health)
    assert status == 200
    assert 'rallypoint_process_info{member="w0",role="worker"} 1.0' in text
    assert "rallypoint_worker_step 7.0" in text
    assert "rallypoint_network_sent_bytes_total 0.0" in text
    assert "process_resident_memory_bytes" in text
    assert "rallypoint_ready 0.0" in text
    health.joined()
    assert "rallypoint_ready 1.0" in get(health)[1]


def test_before_a_process_knows_its_role_it_tells_what_each_has() -> None:
    with answering("127.0.0.1:0") as made:
        status, text = get(made)
    assert status == 200
    assert "process_cpu_seconds_total" in text
    assert "rallypoint_" not in text


@pytest.mark.parametrize(("host", "status"), [
    ("evil.example", 403), ("evil.example:80", 403), ("127.0.0.1.evil.example", 403), ("", 403), ("[::1", 403),
    ("localhost:1", 200), ("[::1]:1", 200), ("10.0.0.7", 200),
])  # fmt: skip
def test_a_page_of_another_name_reads_nothing(health: Health, host: str, status: int) -> None:
    assert get(health, Host=host)[0] == status


def test_where_there_is_a_token_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    for variable, value in ((METRICS_TOKEN, TOKEN), (METRICS_TOKEN_FILE, str(tmp_path / "token"))):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with answering("0.0.0.0:0") as made:
                assert get(made)[0] == 401
                assert get(made, Authorization="Bearer wrong")[0] == 401
                assert get(made, Authorization=f"Bearer {TOKEN}", Host="rack2.lab")[0] == 200


def test_where_others_can_connect_nothing_is_told_without_a_token() -> None:
    with answering("0.0.0.0:0") as made:
        status, text = get(made)
        assert status == 403
        assert METRICS_TOKEN in text
        assert "process_" not in text


def test_a_token_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METRICS_TOKEN, "short")
    with pytest.raises(UsageError, match="at least 16 characters"), answering("127.0.0.1:0"):
        pass
    with answering(""):  # who does not answer needs none
        pass


def test_only_one_process_takes_the_place_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEALTH, "127.0.0.1:0")
    assert (health_at(), health_at()) == ("127.0.0.1:0", "")


# ---- the file for Prometheus ----


def test_the_file_has_who_tells_metrics_and_goes_with_the_run(tmp_path: Path) -> None:
    into = tmp_path / "made" / "targets"
    targets = Targets(tmp_path / "run7", str(into))
    assert targets.environment == {HEALTH: "127.0.0.1:0"}
    assert not targets.takes("worker0", "worker", "another line")
    assert targets.takes("worker0", "worker", f"{ANSWERS_AT}127.0.0.1:1")
    assert targets.takes("server0", "server", f"{ANSWERS_AT}127.0.0.1:2")
    (file,) = into.glob("run7-*.json")
    assert json.loads(file.read_text()) == [
        {"targets": ["127.0.0.1:1"], "labels": {"run": "run7", "role": "worker", "member": "worker0"}},
        {"targets": ["127.0.0.1:2"], "labels": {"run": "run7", "role": "server", "member": "server0"}},
    ]
    targets.gone("worker0")
    targets.gone("nobody")
    assert [one["labels"]["member"] for one in json.loads(file.read_text())] == ["server0"]
    targets.close()
    assert list(into.iterdir()) == []


@pytest.mark.parametrize("said", ["127.0.0.1:x", "elsewhere", "", '127.0.0.1:1"}'])
def test_what_is_no_address_is_an_ordinary_line(tmp_path: Path, said: str) -> None:
    assert not Targets(tmp_path / "r", str(tmp_path)).takes("worker0", "worker", f"{ANSWERS_AT}{said}")
    assert list(tmp_path.iterdir()) == []


def test_runs_of_one_name_in_different_places_have_a_file_each_and_what_a_killed_one_left_goes(tmp_path: Path) -> None:
    line = f"{ANSWERS_AT}127.0.0.1:1"
    for place in ("a", "b", "a"):
        assert Targets(tmp_path / place / "run", str(tmp_path)).takes("worker0", "worker", line)
    assert len(list(tmp_path.glob("run-*.json"))) == 2
    Targets(tmp_path / "a" / "run", str(tmp_path))
    assert len(list(tmp_path.glob("run-*.json"))) == 1


def test_a_script_that_prints_the_line_again_changes_nothing(tmp_path: Path) -> None:
    targets = Targets(tmp_path / "r", str(tmp_path))
    assert targets.takes("worker0", "worker", f"{ANSWERS_AT}127.0.0.1:1")
    assert not targets.takes("worker0", "worker", f"{ANSWERS_AT}127.0.0.1:2")


def test_a_run_without_metrics_has_none_of_it(tmp_path: Path) -> None:
    targets = Targets(tmp_path / "r", "")
    assert targets.environment == {}
    assert not targets.takes("worker0", "worker", f"{ANSWERS_AT}127.0.0.1:1")
    targets.close()


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    into = tmp_path / "into"
    targets = Targets(tmp_path / "r", str(into))
    into.rmdir()
    assert targets.takes("worker0", "worker", f"{ANSWERS_AT}127.0.0.1:1")
    targets.close()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot hold --metrics' files"):
        Targets(tmp_path / "r", str(tmp_path / "file"))


def test_what_others_have_planted_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    into, mine = tmp_path / "into", tmp_path / "mine"
    mine.write_text("precious")
    targets = Targets(tmp_path / "run7", str(into))
    stem = targets._path.stem
    for planted in (f"{stem}.new", f"{stem}.json"):
        (into / planted).symlink_to(mine)
    assert targets.takes("worker0", "worker", f"{ANSWERS_AT}127.0.0.1:1")
    assert mine.read_text() == "precious"
    assert not (into / f"{stem}.json").is_symlink()
    assert json.loads((into / f"{stem}.json").read_text())[0]["targets"] == ["127.0.0.1:1"]
    assert sorted(path.name for path in into.iterdir()) == [f"{stem}.json", f"{stem}.new"]


def test_a_folder_in_which_everybody_may_replace_files_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match=r"everybody may write .*chmod o-w"):
        Targets(tmp_path / "r", str(tmp_path))
    tmp_path.chmod(0o1777)
    Targets(tmp_path / "r", str(tmp_path))


def test_on_other_machines_metrics_are_refused_with_what_to_do() -> None:
    assert RunOptions(metrics="targets").run(["train.py"]).metrics == str(Path("targets").resolve())
    with pytest.raises(UsageError, match="--health HOST:PORT"):
        RunOptions(metrics="targets", hosts="a,b").run(["train.py"])
