"""Fine-tune a model of Hugging Face on a folder of text, or of labelled texts: `python -m rallypoint.recipes.finetune`.

The model and its tokenizer come from a folder that `save_pretrained` has written, and go into such a folder. Alone, it
starts a cluster inside its own process. Under `rallypoint run --workers 2 --servers 2` every worker runs this file.
"""

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import rallypoint as rp
from rallypoint.errors import ConfigError, DataError
from rallypoint.recipes import PRECISION_HELP, Precision, as_typed, choose_device, exit_status, save_patiently
from rallypoint.recipes.labelled import accuracy, labels_of, load_labelled
from rallypoint.recipes.picture import save_picture
from rallypoint.recipes.text import load_text

PROGRAM = "python -m rallypoint.recipes.finetune"
_WINDOWS = 64  # of the validation
_WHY = 400  # characters of an error of transformers
_PROMPT, _SAMPLE = 8, 60  # tokens that are given at the end, and that are generated
_FIGURES = {
    "val_loss": ("validation loss", " nats/token"),
    "val_accuracy": ("validation accuracy", " of held out texts"),
}
_KIND = {True: "AutoModelForCausalLM", False: "AutoModelForSequenceClassification"}
_MISSING = "the recipe finetune needs Hugging Face's transformers: pip install 'rallypoint[huggingface]'"


class Task(StrEnum):
    """What the model learns, as choices of the command line."""

    TEXT = "text"
    LABELS = "labels"


@dataclass(frozen=True)
class Settings:
    """The settings of one training. `batch`: windows of `block` tokens per replica; `lr`: the highest rate."""

    task: Task = Task.TEXT
    steps: int = 200
    batch: int = 4
    block: int = 128
    lr: float = 1e-4
    warmup: int = 20
    weight_decay: float = 0.01
    clip: float = 1.0
    replicas: int = 2
    accumulate: int = 1
    seed: int = 1234
    validate_every: int = 50
    precision: Precision = Precision.FP32


DEFAULTS = Settings()


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

    Afterwards the lead worker saves model and tokenizer, and shows the validation loss and a sample. Raises ConfigError
    without transformers or a model in `source`, DataError without enough text.
    """
    labels = _labels(settings.task, data)
    torch.manual_seed(settings.seed)  # A new head has the same first weights on every worker.
    model, tokenizer = _load(source, labels)
    longest = getattr(model.config, "max_position_embeddings", None) or settings.block
    if settings.block > longest:
        raise ConfigError(f"--block {settings.block}: this model takes windows of {longest} tokens at most")
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
            print(save_picture(run.folder, run.folder))


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
    if task is Task.TEXT:
        return []
    if data is None:
        raise ConfigError("--task labels needs --data: a folder that has one folder of text files for each label")
    return labels_of(data)


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
    try:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    except ModuleNotFoundError:
        raise ConfigError(_MISSING) from None
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} holds no model: give --model a folder that save_pretrained has written (config.json, the "
            "weights and the tokenizer), as `hf download gpt2 --local-dir gpt2` makes one"
        )
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


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


HELP = """Fine-tune a model of Hugging Face (a local folder) on a folder of text.

[bold]rallypoint train finetune --model gpt2/ --data texts/[/bold] teaches a causal language model to write such text.

[bold]rallypoint train finetune --task labels --model bert/ --data reviews/[/bold] teaches a model which label a text \
has: reviews/good/ and reviews/bad/ hold one text in each file. The head for it is new, unless the folder has one.

Nothing is downloaded: `hf download NAME --local-dir FOLDER` fetches a model. Needs rallypoint\\[huggingface].
"""


@app.command(help=HELP)
def _command(
    model: Annotated[Path, typer.Option(help="Folder with the model and its tokenizer, as save_pretrained writes it.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of text files, searched recursively. Default: Python's standard library."),
    ] = None,
    task: Annotated[
        Task, typer.Option(help="text: predict the next token. labels: classify; each folder in --data is a label.")
    ] = DEFAULTS.task,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the model.")] = DEFAULTS.steps,
    block: Annotated[int, typer.Option(min=2, help="Tokens in a window.")] = DEFAULTS.block,
    replicas: Annotated[
        int,
        typer.Option(min=1, help="Logical data-parallel replicas, fixed for the run however many workers come and go."),
    ] = DEFAULTS.replicas,
    batch: Annotated[
        int, typer.Option(min=1, help="Windows per replica: the global batch is replicas times this.")
    ] = DEFAULTS.batch,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Micro-batches whose gradients add up before anything is sent.")
    ] = DEFAULTS.accumulate,
    lr: Annotated[float, typer.Option(min=0.0, help="Highest learning rate: after the warm-up.")] = DEFAULTS.lr,
    seed: Annotated[int, typer.Option(help="Fixes the order of the windows and dropout.")] = DEFAULTS.seed,
    validate_every: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = DEFAULTS.validate_every,
    precision: Annotated[Precision, typer.Option(help=PRECISION_HELP)] = DEFAULTS.precision,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the model. Default: `model` in the run folder.")] = None,
) -> None:
    settings = Settings(
        task=task, steps=steps, batch=batch, block=block, lr=lr, warmup=min(DEFAULTS.warmup, steps), replicas=replicas,
        accumulate=accumulate, seed=seed, validate_every=validate_every, precision=precision,
    )  # fmt: skip
    train(settings, source=model, data=data, device=choose_device(device), out=out)


def main(argv: list[str] | None = None) -> int:
    """Train as `argv` (default: the command line) says. Returns the exit status."""
    return exit_status(app, argv, program=PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
