"""A folder of labelled texts as training data: one folder of text files for each label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from rallypoint.recipes.text_files import texts_of

VALIDATION_EVERY = 5
"""Of each label every fifth text is kept for validation, from the second on."""


def load_labelled(
    folder: Path, labels: Sequence[str], tokenizer: Any, *, block: int
) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation texts: samples (tokens [block], mask [block], label), all int64.

    Each file is one text, whose first `block` tokens count. `tokenizer`: one of Hugging Face's, with a token to pad.
    Raises DataError for a label with fewer than two texts.
    """
    texts: tuple[list[str], list[str]] = [], []
    numbers: tuple[list[int], list[int]] = [], []
    for number, label in enumerate(labels):
        for place, file in enumerate(texts_of(folder / label)):
            held_out = place % VALIDATION_EVERY == 1
            texts[held_out].append(file.read_text(errors="replace"))
            numbers[held_out].append(number)
    parts = []
    for some, their in zip(texts, numbers, strict=True):
        coded = tokenizer(some, truncation=True, max_length=block, padding="max_length", return_tensors="pt")
        parts.append(TensorDataset(coded["input_ids"], coded["attention_mask"], torch.tensor(their)))
    return parts[0], parts[1]


@torch.no_grad()
def accuracy(model: Any, texts: TensorDataset, *, batch: int = 16) -> float:
    """Return the share of `texts`, from 0 to 1, to which `model` gives the right label, in eval mode."""
    training, right = model.training, 0
    model.eval()
    for start in range(0, len(texts), batch):
        tokens, mask, labels = (part[start : start + batch].to(model.device) for part in texts.tensors)
        right += int((model(input_ids=tokens, attention_mask=mask).logits.argmax(-1) == labels).sum())
    model.train(training)
    return right / len(texts)
