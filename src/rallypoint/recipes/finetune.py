"""Fine-tune a model of Hugging Face on a folder of text, or of labelled texts: `python -m rallypoint.recipes.finetune`.

The model and its tokenizer come from a folder that `save_pretrained` has written, and go into such a folder. Alone, it
starts a cluster inside its own process. Under `rallypoint run --workers 2 --servers 2` every worker runs this file.

This module has the options, and checks them without torch: `rallypoint train` does that before anything starts.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rallypoint.errors import ConfigError, to_install
from rallypoint.recipes import PRECISION_HELP, Precision, choose_device, exit_status
from rallypoint.recipes.text_files import labels_of, some_text, texts_of

PROGRAM = "python -m rallypoint.recipes.finetune"
_POSITIONS = ("max_position_embeddings", "n_positions")  # how config.json names the longest window


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


def check(settings: Settings, *, source: Path, data: Path | None) -> None:
    """Check what can be known before the model is loaded.

    Raises ConfigError without transformers, without a model in `source`, for longer windows than it takes; DataError
    without texts in `data`, or without labels where the task needs them.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"the recipe finetune needs Hugging Face's transformers: {to_install('huggingface')}")
    if settings.task is Task.LABELS and data is None:
        raise ConfigError("--task labels needs --data: a folder that has one folder of text files for each label")
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"{source} holds no model: give --model a folder that save_pretrained has written (config.json, the "
            "weights and the tokenizer), as `hf download gpt2 --local-dir gpt2` makes one"
        )
    check_block(settings.block, longest_of(source))
    if settings.task is Task.TEXT:
        some_text(data)
    elif data is not None:
        for label in labels_of(data):
            texts_of(data / label)


def longest_of(source: Path) -> int | None:
    """Return how many tokens the model in `source` takes, if its config.json says so."""
    try:
        told = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source / 'config.json'} cannot be read: {error}") from None
    found = [told[name] for name in _POSITIONS if isinstance(told, dict) and isinstance(told.get(name), int)]
    return found[0] if found else None


def check_block(block: int, longest: int | None) -> None:
    """Raise ConfigError for a window of more tokens than the model takes."""
    if longest and block > longest:
        raise ConfigError(f"--block {block}: this model takes windows of {longest} tokens at most")


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
    only_check: Annotated[bool, typer.Option("--check", help="Check these options, and end.")] = False,
) -> None:
    settings = Settings(
        task=task, steps=steps, batch=batch, block=block, lr=lr, warmup=min(DEFAULTS.warmup, steps), replicas=replicas,
        accumulate=accumulate, seed=seed, validate_every=validate_every, precision=precision,
    )  # fmt: skip
    check(settings, source=model, data=data)
    if only_check:
        return
    from rallypoint.recipes.finetuning import train

    train(settings, source=model, data=data, device=choose_device(device), out=out)


def main(argv: list[str] | None = None, *, program: str = PROGRAM) -> int:
    """Train as `argv` (default: the command line) says. Returns the exit status. `program`: how usage names it."""
    return exit_status(app, argv, program=program)


if __name__ == "__main__":
    sys.exit(main())
