"""What the recipe finetune does once its options are known: load, train, evaluate, save."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import rallypoint as rp
from rallypoint.errors import ConfigError, DataError
from rallypoint.recipes import as_typed, save_patiently
from rallypoint.recipes.finetune import Settings, Task, check_block
from rallypoint.recipes.labelled import accuracy, load_labelled
from rallypoint.recipes.picture import save_picture
from rallypoint.recipes.text import load_text
from rallypoint.recipes.text_files import labels_of

_WINDOWS = 64  # of the validation
_WHY = 400  # characters of an error of transformers
_PROMPT, _SAMPLE = 8, 60  # tokens that are given at the end, and that are generated
_FIGURES = {
    "val_loss": ("validation loss", " nats/token"),
    "val_accuracy": ("validation accuracy", " of held out texts"),
}
_KIND = {True: "AutoModelForCausalLM", False: "AutoModelForSequenceClassification"}


class Windows(Dataset[Tensor]):
    """Sample i is tokens [i * block, (i + 1) * block) of one long text: int64 [block]."""

    def __init__(self, tokens: Tensor, block: int) -> None:
        """`tokens`: int64 [count]. Raises DataError with fewer than one window."""
        if len(tokens) < block:
            raise DataError(f"the text has only {len(tokens)} tokens, fewer than a window of {block}: give more text")
        self.windows = tokens[: len(tokens) // block * block].view(-1, block)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


def train(settings: Settings, *, source: Path, data: Path | None, device: torch.device, out: Path | None) -> None:
    """Train the model in the folder `source` with these settings, on the text in `data`.

    Afterwards the lead worker saves model and tokenizer, and shows the validation loss and a sample. What
    `finetune.check` finds is to be checked before. Raises ConfigError if the model cannot be loaded, DataError without
    enough text.
    """
    labels = _labels(settings.task, data)
    torch.manual_seed(settings.seed)  # A new head has the same first weights on every worker.
    model, tokenizer = _load(source, labels)
    check_block(settings.block, getattr(model.config, "max_position_embeddings", None))
    samples, validation = _samples(settings, data, labels, tokenizer)
    model = model.to(device)
    before = evaluate(model, validation)
    with rp.join() as job:
        run = job.train(
            model,
            samples,
            replicas=settings.replicas,
            batch=settings.batch,
            steps=settings.steps,
            accumulate=settings.accumulate,
            seed=settings.seed,
            precision=settings.precision.value,
            optimizer=rp.AdamW(
                lr=rp.cosine(settings.lr, warmup=settings.warmup), weight_decay=settings.weight_decay
            ),
            clip=settings.clip,
            item="tokens",
            items_per_sample=settings.block,
        )  # fmt: skip

        @run.every(settings.validate_every)
        def validate(step: int) -> dict[str, float]:
            return evaluate(model, validation)

        for micro in run:
            with micro:
                micro.backward(model(**_arguments(micro.batch)).loss)
        if run.lead:
            _finish(model, tokenizer, validation, before, out or run.folder / "model")
            print(save_picture(run.folder))


def evaluate(model: Any, validation: Windows | TensorDataset) -> dict[str, float]:
    """Return val_loss of windows, val_accuracy of labelled texts."""
    if isinstance(validation, Windows):
        return {"val_loss": validation_loss(model, validation)}
    return {"val_accuracy": accuracy(model, validation)}


def _arguments(batch: Any) -> dict[str, Tensor]:
    """What the model is called with: windows are their own labels, texts have others."""
    if isinstance(batch, Tensor):
        return {"input_ids": batch, "labels": batch}
    return dict(zip(("input_ids", "attention_mask", "labels"), batch, strict=True))


def _labels(task: Task, data: Path | None) -> list[str]:
    return labels_of(data) if task is Task.LABELS and data is not None else []


def _samples(settings: Settings, data: Path | None, labels: list[str], tokenizer: Any) -> tuple[Any, Any]:
    """The training samples and those of the validation."""
    if labels and data is not None:
        return load_labelled(data, labels, tokenizer, block=settings.block)
    train, validation = (Windows(tokens, settings.block) for tokens in _tokens(tokenizer, data, settings.block))
    return train, validation


@torch.no_grad()
def validation_loss(model: torch.nn.Module, windows: Windows) -> float:
    """Return the mean loss (nats per token) of `model`, in eval mode, over at most 64 windows spread over the text."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    chosen = windows.windows[:: max(1, len(windows) // _WINDOWS)][:_WINDOWS].to(device)
    losses = [float(model(input_ids=part, labels=part).loss) * len(part) for part in torch.split(chosen, 8)]
    model.train(training)
    return sum(losses) / len(chosen)


def _load(folder: Path, labels: list[str]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not labels:
            return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).train(), tokenizer
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, id2label=dict(enumerate(labels)),
            label2id={label: number for number, label in enumerate(labels)},
        )  # fmt: skip
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:_WHY]
        raise ConfigError(
            f"the model in {folder} cannot be loaded: does the folder have the weights and the tokenizer, as "
            f"save_pretrained writes both? {why}"
        ) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return model.train(), tokenizer


def _tokens(tokenizer: Any, data: Path | None, block: int) -> tuple[Tensor, Tensor]:
    """The training text's tokens and the validation text's, int64."""
    texts = (part.data.numpy().tobytes().decode(errors="replace") for part in load_text(data, block=block))
    train, validation = (torch.tensor(tokenizer(text, verbose=False)["input_ids"]) for text in texts)
    return train, validation


def _finish(
    model: Any, tokenizer: Any, validation: Windows | TensorDataset, before: dict[str, float], folder: Path
) -> None:  # fmt: skip
    model.eval()

    def save(where: Path) -> None:
        model.save_pretrained(where)
        tokenizer.save_pretrained(where)

    save_patiently(save, folder)
    for name, value in evaluate(model, validation).items():
        what, unit = _FIGURES[name]
        print(f"{what}: {value:.3f}{unit} (before: {before[name]:.3f})")
    if isinstance(validation, Windows):
        _show_sample(model, tokenizer, validation)
    print(f"model and tokenizer saved; to use them: {_KIND[isinstance(validation, Windows)]}"
          f".from_pretrained({as_typed(folder)!r})")  # fmt: skip


@torch.no_grad()
def _show_sample(model: Any, tokenizer: Any, validation: Windows) -> None:
    prompt = validation.windows[:1, :_PROMPT].to(model.device)
    length = min(_SAMPLE, max(1, validation.windows.shape[1] - _PROMPT))  # a window is what the model is sure to take
    torch.manual_seed(0)
    sample = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=True,
        pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    shown = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in tokenizer.decode(sample[0]))
    print(f"a sample:\n{shown}\n")
