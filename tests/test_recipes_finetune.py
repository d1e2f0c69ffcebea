"""The recipe that fine-tunes a Hugging Face model, and the picture at a recipe's end."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rallypoint.cli import app
from rallypoint.errors import DataError, to_install
from rallypoint.recipes import finetune, finetuning, picture
from rallypoint.recipes.chart import chart
from rallypoint.recipes.labelled import load_labelled
from rallypoint.recipes.text_files import labels_of

STEPS = 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of one layer and a tokenizer of bytes, as `save_pretrained` writes them."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=letters[0]).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(letters), **shape)).save_pretrained(folder)
    return folder


def options(model: Path, folder: Path, **changed: Any) -> list[str]:
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "a.txt").write_text("all work and no play makes a dull day\n" * 200)
    chosen = {"model": model, "data": folder / "text", "steps": STEPS, "block": 32, "device": "cpu",
              "out": folder / "out", **changed}  # fmt: skip
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


@pytest.mark.slow
def test_a_model_is_tuned_and_saved_as_hugging_face_reads_it(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune.main(options(model_folder, tmp_path, lr=0.01)) == 0
    said = capsys.readouterr().out
    assert "validation loss: " in said
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = AutoModelForCausalLM.from_pretrained(model_folder)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(before.transformer.wte.weight, after.transformer.wte.weight)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("play makes")["input_ids"]
    assert len(tokens) == len("play makes")


@pytest.mark.slow
def test_a_folder_without_a_model_is_refused_with_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert finetune.main(options(tmp_path, tmp_path)) == 1
    assert "holds no model: give --model a folder that save_pretrained has written" in capsys.readouterr().err


@pytest.mark.slow
def test_windows_longer_than_the_model_takes_are_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune.main(options(model_folder, tmp_path, block=65)) == 1
    assert "--block 65: this model takes windows of 64 tokens at most" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "empty"], "empty holds no model: give --model a folder that save_pretrained has written"),
        (["--model", "model", "--task", "tags"], "'tags' is not one of 'text'"),
        (["--model", "model", "--data", "empty"], "empty holds no text"),
        (["--model", "model", "--data", "nowhere"], "nowhere is not a folder"),
        (["--model", "model", "--task", "labels"], "--task labels needs --data"),
        (["--model", "model", "--task", "labels", "--data", "empty"], "empty has 0 folders with a label's name"),
        (["--model", "model", "--block", "257"], "--block 257: this model takes windows of 256 tokens at most"),
        ([], "Missing option '--model'"),
    ],
)  # fmt: skip
def test_wrong_options_are_found_before_a_cluster_starts(
    options: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rallypoint.launch.launcher.launch", lambda *_, **__: pytest.fail("it has started"))
    Path("empty").mkdir()
    Path("model").mkdir()
    Path("model", "config.json").write_text('{"n_positions": 256}')
    with pytest.raises(SystemExit) as ended:
        app(["train", "finetune", *options], prog_name="rallypoint")
    assert ended.value.code != 0
    said = capsys.readouterr()
    assert sentence in said.err + said.out
    assert not Path("runs").exists()


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """Ten short texts of each label, which one word tells apart."""
    for label, word in (("bad", "dull"), ("good", "fine")):
        (tmp_path / "reviews" / label).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "reviews" / label / f"{number}.txt").write_text(f"{word * 2} {number}")
    return tmp_path / "reviews"


@pytest.mark.slow
def test_labels_are_learnt_and_their_names_saved(
    model_folder: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(model_folder, tmp_path, task="labels", data=reviews, steps=40, block=16, lr=0.02)
    assert finetune.main(given) == 0
    assert "validation accuracy: 1.000 of held out texts" in capsys.readouterr().out
    from transformers import AutoModelForSequenceClassification

    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.id2label == {0: "bad", 1: "good"}


@pytest.mark.slow
def test_of_each_label_every_fifth_text_is_held_out(model_folder: Path, reviews: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    tokenizer.pad_token = tokenizer.eos_token
    train, validation = load_labelled(reviews, ["bad", "good"], tokenizer, block=16)
    tokens, mask, labels = validation.tensors
    assert labels.tolist() == [0, 0, 1, 1]
    assert len(train) == 16
    assert tokenizer.decode(tokens[0][mask[0] == 1]) == "dulldull 1"


def test_labels_are_the_names_of_folders(reviews: Path) -> None:
    assert labels_of(reviews) == ["bad", "good"]
    with pytest.raises(DataError, match="has 0 folders with a label's name: to classify texts"):
        labels_of(reviews / "bad")
    (reviews / "ugly").mkdir()
    with pytest.raises(DataError, match="ugly has 0 text files: a label needs two"):
        load_labelled(reviews, ["ugly"], None, block=8)


def test_labels_need_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune.main(["--task", "labels", "--model", str(tmp_path)]) == 1
    assert "one folder of text files for each label" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_without_a_tokenizer_says_what_is_missing(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    assert finetune.main(options(half, tmp_path)) == 1
    assert "does the folder have the weights and the tokenizer" in capsys.readouterr().err


def test_without_transformers_one_sentence_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert finetune.main(options(tmp_path, tmp_path)) == 1
    assert "pip install 'transformers" in capsys.readouterr().err


def test_windows_are_cut_one_behind_the_other() -> None:
    windows = finetuning.Windows(torch.arange(10), 4)
    assert [windows[i].tolist() for i in range(len(windows))] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DataError, match="the text has only 10 tokens, fewer than a window of 11"):
        finetuning.Windows(torch.arange(10), 11)


def log(folder: Path, steps: int) -> None:
    events: list[dict[str, Any]] = [{"type": "StepDone", "step": step, "loss": 1 / (step + 1)} for step in range(steps)]
    events.append({"type": "Metrics", "step": steps, "values": {"val_loss": 0.5, "none": None}})
    lines = [json.dumps({"t": 0.0, **event}) for event in events]
    (folder / "events.jsonl").write_text("\n".join([*lines, '{"t": 1.0, "type": "Metrics", "st']))


def test_a_picture_shows_losses(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log(tmp_path, 20)
    said = picture.save_picture(tmp_path)
    *drawn, sentence = said.splitlines()
    assert sentence == f"a picture of the losses: {tmp_path / 'picture.png'}"
    assert [line for line in drawn if line.endswith(":")] == ["loss:"]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_log_or_steps_has_no_picture(tmp_path: Path) -> None:
    assert picture.save_picture(tmp_path).startswith("no picture: only a run under")
    log(tmp_path, 1)
    assert picture.save_picture(tmp_path) == "no picture: the log has too few steps"
    assert not (tmp_path / "picture.png").exists()


def test_without_matplotlib_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(tmp_path, 5)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    *drawn, sentence = picture.save_picture(tmp_path).splitlines()
    assert sentence == f"for a picture of the losses: {to_install('plots')}"
    assert drawn[:3] == ["", "loss:", "  1 |*"]  # in characters it is there all the same


def test_a_chart_falls_from_the_highest_value_to_the_lowest() -> None:
    assert chart({step: 4.0 - step for step in range(4)}, rows=4) == [
        "4 |*", "  | *", "  |  *", "1 |   *", "   0  3 (step)",
    ]  # fmt: skip
    assert all(len(line) < 80 for line in chart(dict.fromkeys(range(10_000), 1.0)))


def test_values_that_are_not_finite_are_left_out_of_a_chart() -> None:
    assert chart({0: 2.0, 1: math.nan, 2: 1.0, 3: math.inf}, rows=2) == ["2 |*", "1 | *", "   0 2 (step)"]
    assert chart({0: math.nan}) == []
