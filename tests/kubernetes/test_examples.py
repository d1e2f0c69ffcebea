"""The examples are what the commands in the docs print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import check_core
from typer.testing import CliRunner

from rallypoint.cli import app
from rallypoint.errors import UsageError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kubernetes.md").read_text()
COMMANDS = re.findall(r"^    rallypoint (k8s render .*) > (examples/kubernetes/\S+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("command", "file"), COMMANDS, ids=[file.rpartition("/")[2] for _, file in COMMANDS])
def test_an_example_is_what_its_command_prints(command: str, file: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == (ROOT / file).read_text(), f"{file} is old: run the command in docs/kubernetes.md"
    assert [manifest["kind"] for manifest in yaml.safe_load_all(result.stdout)]


def test_every_example_has_its_command() -> None:
    assert {file for _, file in COMMANDS} == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "examples/kubernetes").iterdir()
    }
    assert len(COMMANDS) == 1


def test_what_the_docs_have_for_trainer_and_kuberay_is_known_there() -> None:
    from kubeflow_trainer_api import models  # 400 modules: not while tests are collected

    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    runtime, job, ray = [manifest for block in blocks for manifest in yaml.safe_load_all(block)]
    kinds = (models.TrainerV1alpha1ClusterTrainingRuntime, models.TrainerV1alpha1TrainJob)
    for model, manifest in zip(kinds, (runtime, job), strict=True):
        read: Any = model.from_dict(manifest)
        assert read.to_dict() == manifest  # the model drops what it does not know
    cluster = ray["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        check_core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]})


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["render", "train.py"], "which image? give --image NAME:TAG"),
        (["render", "--imgae", "x", "train.py"], "there is no option --imgae: did you mean --image?"),
        (["secret", "My_Secret"], "the Secret My_Secret: a name has small letters"),
    ],
)
def test_the_commands_say_in_one_sentence_what_is_wrong(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        CliRunner().invoke(app, ["k8s", *argv], catch_exceptions=False)
    assert str(refused.value).startswith(sentence)
