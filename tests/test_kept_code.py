"""A run keeps the code it began with: edits meanwhile reach no worker, and the script cannot tell the difference."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.core.typed import named
from rallypoint.errors import DataError, UsageError
from rallypoint.launch import kept_code

SCRIPT = """
import inspect, os, sys
from pathlib import Path
import net, pack.inner
print(net.NAME, pack.inner.NAME, __name__, sys.argv[1:])
print(Path(__file__).name, (Path(__file__).parent / "data.txt").read_text(), Path(sys.path[0]) == Path(__file__).parent)
print(Path(net.__file__).parent == Path(__file__).parent, "NAME" in inspect.getsource(net))
print((Path(pack.__file__).parent / "table.txt").read_text(), sys.modules["__main__"].__dict__["os"] is os)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    (home / "pack").mkdir(parents=True)
    (home / "train.py").write_text(SCRIPT)
    (home / "net.py").write_text("NAME = 'net'\n")
    (home / "pack" / "__init__.py").write_text("")
    (home / "pack" / "inner.py").write_text("from net import NAME as _; NAME = 'inner'\n")
    (home / "pack" / "table.txt").write_text("table")
    (home / "data.txt").write_text("data")
    return home


def run(home: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(home / "train.py")
    argv = kept_code.worker_argv([sys.executable, script, *arguments], script, folder)
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=home.parent)


EXPECTED = ["net inner __main__ ['--a', '1']", "train.py data True", "True True", "table True"]


def test_a_script_cannot_tell_that_its_text_comes_from_a_copy(home: Path, tmp_path: Path) -> None:
    assert kept_code.keep(str(home / "train.py"), tmp_path) == ""
    done = run(home, tmp_path, "--a", "1")
    assert done.stdout.splitlines() == EXPECTED, done.stderr


def test_edits_and_deletions_do_not_reach_it(home: Path, tmp_path: Path) -> None:
    kept_code.keep(str(home / "train.py"), tmp_path)
    assert kept_code.changed(str(home / "train.py"), tmp_path) == []
    (home / "train.py").write_text("this is no Python")
    (home / "net.py").write_text("NAME = 'edited'\n")
    (home / "pack" / "inner.py").unlink()
    assert run(home, tmp_path, "--a", "1").stdout.splitlines() == EXPECTED
    assert kept_code.changed(str(home / "train.py"), tmp_path) == ["net.py", "pack/inner.py", "train.py"]


def test_a_traceback_names_the_users_files_and_shows_the_text_that_ran(home: Path, tmp_path: Path) -> None:
    (home / "net.py").write_text("def fail():\n    raise ValueError('old')\n")
    (home / "train.py").write_text("import net\nnet.fail()\n")
    kept_code.keep(str(home / "train.py"), tmp_path)
    (home / "net.py").write_text("\n\n")
    done = run(home, tmp_path)
    assert done.returncode == 1
    assert "code/" not in done.stderr
    assert "launch/runner.py" not in done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{home / "train.py"}", line 2, in <module>'
    assert "    raise ValueError('old')" in lines


def test_an_interrupted_script_says_nothing(home: Path, tmp_path: Path) -> None:
    (home / "train.py").write_text("raise KeyboardInterrupt\n")
    kept_code.keep(str(home / "train.py"), tmp_path)
    done = run(home, tmp_path)
    assert (done.returncode, done.stderr) == (130, "")


def test_other_runs_environments_and_caches_are_no_code(home: Path, tmp_path: Path) -> None:
    for folder, mark in (("runs/1", "run.json"), ("env", "pyvenv.cfg"), ("__pycache__", "x"), (".git", "x")):
        (home / folder).mkdir(parents=True)
        (home / folder / mark).write_text("")
        (home / folder / "module.py").write_text("")
    kept_code.keep(str(home / "train.py"), tmp_path)
    found = sorted(str(path.relative_to(tmp_path / "code")) for path in (tmp_path / "code").rglob("*.py"))
    assert found == ["net.py", "pack/__init__.py", "pack/inner.py", "train.py"]


def test_folders_of_other_users_beside_a_script_are_left_out(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "private").mkdir()
    stat = os.stat

    def as_somebody_else(path: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        if Path(os.fsdecode(path)).parent == home / "private":  # no permission to look into it
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **keywords)

    monkeypatch.setattr(os, "stat", as_somebody_else)
    assert kept_code.keep(str(home / "train.py"), tmp_path) == ""
    assert (tmp_path / "code" / "net.py").exists()


def test_too_much_code_is_said_and_the_script_is_kept_all_the_same(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_code, "_FILES", 2)
    assert "more than 2 Python files" in kept_code.keep(str(home / "train.py"), tmp_path)
    assert run(home, tmp_path, "--a", "1").stdout.splitlines() == EXPECTED


def test_a_script_that_cannot_be_read_is_a_sentence(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.py cannot be read: No such file"):
        kept_code.keep(str(home / "gone.py"), tmp_path)


def test_copies_are_for_their_user_only(home: Path, tmp_path: Path) -> None:
    kept_code.keep(str(home / "train.py"), tmp_path)
    assert (tmp_path / kept_code.CODE).stat().st_mode & 0o777 == 0o700


def test_a_disk_that_is_full_leaves_the_copies_of_before(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_code.keep(str(home / "train.py"), tmp_path)
    write = kept_code._write

    def full(path: Path, data: bytes) -> None:
        if path.name == "inner.py":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(kept_code, "_write", full)
    with pytest.raises(UsageError, match=r"cannot be kept in .*: No space left"):
        kept_code.keep(str(home / "train.py"), tmp_path)
    assert run(home, tmp_path, "--a", "1").stdout.splitlines() == EXPECTED


def test_the_folder_of_a_run_beside_its_script_does_not_keep_its_own_copies(home: Path) -> None:
    for _ in range(2):
        kept_code.keep(str(home / "train.py"), home)
    assert not (home / kept_code.CODE / kept_code.CODE).exists()


def test_a_run_that_has_kept_nothing_is_a_sentence(home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="kept no code"):
        kept_code.changed(str(home / "train.py"), tmp_path / "other")


def test_many_files_are_named_by_the_first() -> None:
    assert named(["a", "b", "c"], most=2) == "a, b and 1 more"
    assert named(["a", "b"], most=2) == "a, b"
