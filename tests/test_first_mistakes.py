"""What a first command line gets wrong: one sentence, before anything is started, that says what to type."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rallypoint
from rallypoint.cli import app
from rallypoint.cli.given import hint_at_folder, hint_at_page, options_of
from rallypoint.errors import UsageError, to_install
from rallypoint.launch.observing import page
from rallypoint.launch.plan import RUN_FILE
from rallypoint.recipes import RECIPES


@pytest.mark.parametrize(("line", "sentence"), [
    ("train --steps 5 gpt", "--steps is gpt's: rallypoint train gpt --steps 5"),
    ("chaos --layers 5 gpt --steps 9", "--layers is gpt's: rallypoint chaos gpt --layers 5 --steps 9"),
    ("train --wokers 5 gpt", "there is no option --wokers: did you mean --workers?"),
    ("train gpt --step 5", "gpt has no option --step: did you mean --steps?"),
    ("train resnet --zzz 5", "resnet has no option --zzz; `rallypoint train resnet --help` lists them"),
    ("chaos resnet --lerning-rate=1", "resnet has no option --lerning-rate"),
])  # fmt: skip
def test_a_recipes_option_that_is_misplaced_or_misspelt_is_told_before_anything_starts(
    line: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert str(refused.value).startswith(sentence)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipes_options_are_read_from_its_source(recipe: str) -> None:
    assert {"--batch", "--replicas"} <= {*options_of(recipe)}


def test_a_value_that_looks_like_an_option_is_left_alone() -> None:
    from rallypoint.cli.given import check_recipe

    check_recipe("gpt", ["--prompt", "--so", "--steps", "5", "--data=--here"])


def test_a_run_among_other_files_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hint_at_folder(str(tmp_path / "new"))
    hint_at_folder(str(tmp_path))
    assert capsys.readouterr().err == ""
    (tmp_path / "train.py").touch()
    hint_at_folder(str(tmp_path))
    assert capsys.readouterr().err.startswith(f"hint: {tmp_path} holds other files (train.py): the run's own")
    (tmp_path / RUN_FILE).touch()
    hint_at_folder(str(tmp_path))
    assert capsys.readouterr().err == ""


def test_a_page_that_is_missing_is_told_to_who_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(page, "missing", lambda: "uvicorn")
    hint_at_page(False)
    assert capsys.readouterr().err == ""
    hint_at_page(None)
    assert capsys.readouterr().err == f"hint: this run has no page, which needs uvicorn: {to_install('watch')}\n"


def test_what_to_install_is_what_an_index_has() -> None:
    assert to_install("watch").startswith("pip install 'prometheus_client")
    assert "rallypoint" not in to_install("plots")
    assert to_install("nothing-of-the-kind") == "pip install '.[nothing-of-the-kind]'"


def test_sentences_and_help_name_what_exists() -> None:
    for word in re.findall(r"\brp\.([\w.]+)\(", (Path(__file__).parents[1] / "docs" / "modes.md").read_text()):
        assert hasattr(rallypoint, word), f"a refusal advises rp.{word}()"
    source = Path(rallypoint.__file__).parent
    for name in re.findall(r"`((?:worker|server|core)\.[\w.]+)`", str(rallypoint.__doc__)):
        path = source / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), f"help(rallypoint) names {name}"
