"""The examples are what the commands in the docs print."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rallypoint.testing.programs import run_program

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clusters.md").read_text()
COMMANDS = re.findall(r"^    rallypoint (k8s render .*) > (examples/kubernetes/\S+)$", PAGE, re.MULTILINE)


@pytest.mark.programs
@pytest.mark.parametrize(("command", "file"), COMMANDS, ids=[file.rpartition("/")[2] for _, file in COMMANDS])
def test_an_example_is_what_its_command_prints(command: str, file: str, tmp_path: Path) -> None:
    argv = ["-m", "rallypoint.cli", *shlex.split(command)]
    status, text = run_program(argv, tmp_path / "output", env={**os.environ}, cwd=tmp_path)
    assert (status, text) == (0, (ROOT / file).read_text()), f"{file} is old: run the command in docs/clusters.md"
    assert [manifest["kind"] for manifest in yaml.safe_load_all(text)]


def test_there_is_one_example_of_each_kind() -> None:
    assert {file for _, file in COMMANDS} == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "examples/kubernetes").iterdir()
    }
    assert len(COMMANDS) == 3


@pytest.mark.programs
def test_the_commands_say_in_one_sentence_what_is_wrong(tmp_path: Path) -> None:
    for argv, sentence in (
        (["render", "train.py"], "error: which image? give --image NAME:TAG: it needs rallypoint and your script\n"),
        (["render", "--imgae", "x", "train.py"], "error: there is no option --imgae: did you mean --image?"),
        (["secret", "My_Secret"], "error: the Secret My_Secret: a name has small letters"),
    ):
        status, text = run_program(
            ["-m", "rallypoint.cli", "k8s", *argv], tmp_path / "output", env={**os.environ}, cwd=tmp_path
        )
        assert status == 1
        assert text.startswith(sentence)
