"""What a process is given to get into a job: from a file, or from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.launch.access import access_of, read_token


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


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b" \n", "is empty"), (b"\xff\xfe", "not text")])
def test_a_file_without_a_token_is_a_usage_error(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        read_token(path)
