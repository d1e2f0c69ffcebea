"""`examples/finetune.py`, with a model that is small enough to be made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from support.programs import run_program

pytestmark = [pytest.mark.programs, pytest.mark.slow]

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "finetune.py"


def make_model(folder: Path) -> None:
    """A GPT-2 of one layer and a tokenizer of bytes, as `save_pretrained` writes them."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=letters[0]).save_pretrained(folder)
    shape = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(letters), **shape)).save_pretrained(folder)


def test_a_model_is_tuned_and_saved_as_hugging_face_reads_it(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "a.txt").write_text("all work and no play makes a dull day\n" * 50)
    options = ["--model", "model", "--data", ".", "--steps", "3", "--block", "16"]
    status, output = run_program([str(SCRIPT), *options], tmp_path / "output", env=dict(os.environ), cwd=tmp_path)
    assert status == 0, output
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "tuned"))
    assert not torch.equal(before.transformer.wte.weight, after.transformer.wte.weight)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "tuned")("play makes")["input_ids"]) == len("play makes")
