"""Train a byte-level GPT on a folder of text: `python -m rallypoint.recipes.gpt`.

Alone, it starts a cluster inside its own process. Under `rallypoint run --workers 2 --servers 2` every worker runs this
same file and computes its share of the replicas. The result is the same in both cases.
"""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rallypoint as rp
from rallypoint.recipes import recipe
from rallypoint.recipes.gpt_model import GPT, GPTConfig
from rallypoint.recipes.text import load_text

PROGRAM = "python -m rallypoint.recipes.gpt"
VALIDATION_BYTES = 8192
"""How much text one validation reads: always the same windows, a quarter of a second for the tiny preset."""


@dataclass(frozen=True, kw_only=True)
class GptSettings(recipe.Training):
    """The settings of one training: the model and how to train it."""

    model: GPTConfig
    weight_decay: float = 0.1
    clip: float = 1.0


PRESETS = {
    "tiny": GptSettings(
        model=GPTConfig(layers=4, heads=4, width=128, block=128), steps=800, batch=8, lr=4e-3, warmup=50
    ),
    "small": GptSettings(
        model=GPTConfig(layers=6, heads=8, width=512, block=256), steps=2000, batch=16, lr=1e-3, warmup=100
    ),
}
"""`tiny` (0.8 M parameters) learns to write Python-like text in minutes on two cores; `small` (19 M parameters, 76 MB
of gradients per worker and step) is for GPUs, and for measuring networks."""


def train(
    settings: GptSettings, *, data: Path | None, device: torch.device, out: Path | None, init: Path | None = None
) -> None:
    """Train with these settings.

    Afterwards the lead worker prints the validation loss and a sample, and saves the model.

    `init` is the folder of a saved model to start from; its shape then replaces that of the settings. Raises
    `DataError` when `data` holds no text, or `init` no model.
    """
    saved = None if init is None else GPT.load(init)
    settings = settings if saved is None else replace(settings, model=saved.config)
    train_text, validation_text = load_text(data, block=settings.model.block)
    validation = validation_text.fixed_windows(max(1, VALIDATION_BYTES // settings.model.block))
    torch.manual_seed(settings.seed)  # Every worker starts from the same weights.
    model = (GPT(settings.model) if saved is None else saved.train()).to(device)
    with rp.join() as job:
        run = job.train(
            model, train_text, **settings.arguments, parallel=_spread(model, job.ranks), clip=settings.clip,
            optimizer=rp.AdamW(
                lr=rp.cosine(settings.lr, warmup=settings.warmup), betas=(0.9, 0.95), weight_decay=settings.weight_decay
            ),
            reading=rp.Reading(item="tokens", items_per_sample=settings.model.block),
        )  # fmt: skip

        if settings.patience:
            run.stop_when("val_loss", patience=settings.patience)

        @run.every(settings.validate_every)
        def validate(step: int) -> dict[str, float]:
            return {"val_loss": validation_loss(model, validation)}

        for micro in run:
            with micro:
                tokens, targets = micro.batch
                micro.backward(model.loss(tokens, targets))
        if run.worker_leads:
            whole = model if job.ranks == 1 else _gathered(model)
            if run.lead:
                _finish(whole, validation, out or run.folder)


def _spread(model: GPT, ranks: int) -> rp.Parallel | None:
    """Shard the model over the ranks of this worker (FSDP2), block by block; each computes a part of the batch."""
    if ranks == 1:
        return None
    mesh = init_device_mesh(model.tokens.weight.device.type, (ranks,), mesh_dim_names=("dp",))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return rp.Parallel(mesh, split="dp")


def _gathered(model: GPT) -> GPT:
    """Return the whole model, of whose weights each rank has a part, on the CPU. All ranks call it."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    whole = GPT(model.config)
    if weights:  # on rank 0
        whole.load_state_dict(weights)
    return whole


@torch.no_grad()
def validation_loss(model: GPT, windows: tuple[Tensor, Tensor], *, batch: int = 16) -> float:
    """Return the mean loss (nats per byte) of `model`, in eval mode, over `windows`: a pair of int64 [count, block]."""
    device = model.tokens.weight.device
    total = 0.0
    for start in range(0, len(windows[0]), batch):
        tokens, targets = (part[start : start + batch].to(device) for part in windows)
        total += float(model.loss(tokens, targets)) * len(tokens)
    return total / len(windows[0])


def readable(text: bytes) -> str:
    """Return generated bytes as text for a terminal.

    Every character that is not printable is replaced, so none can act as a command.
    """
    decoded = text.decode("utf-8", errors="replace")
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in decoded
    )


def _finish(model: GPT, validation: tuple[Tensor, Tensor], folder: Path) -> None:
    model.eval()
    recipe.save_patiently(model.save, folder)
    prompt = "def "
    sample = model.generate(prompt.encode(), 200)
    print(f"validation loss: {validation_loss(model, validation):.3f} nats/byte (guessing blindly: 5.545)")
    print(f"a sample:\n{readable(prompt.encode() + sample)}\n")
    print(
        f"model saved; to generate more:\n  {recipe.as_typed(sys.executable)} -m rallypoint.recipes.gpt "
        f"--load {recipe.as_typed(folder)} --prompt {shlex.quote(prompt)}"
    )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help="Train a byte-level GPT on a folder of text, or generate with a trained one (--load).")
def _command(
    preset: Annotated[
        Literal["tiny", "small"],
        typer.Option(help="The model and its training; the options below change single values of it."),
    ] = "tiny",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of text files, searched recursively. Default: Python's standard library."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Transformer blocks.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; must divide the width.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Features per position.")] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Bytes of context the model sees.")] = None,
    dropout: Annotated[
        float | None, typer.Option(min=0.0, max=0.99, help="Useful when the text is small and read many times.")
    ] = None,
    steps: Annotated[int | None, recipe.STEPS] = None,
    replicas: Annotated[int | None, recipe.REPLICAS] = None,
    batch: Annotated[int | None, recipe.BATCH] = None,
    accumulate: Annotated[int | None, recipe.ACCUMULATE] = None,
    lr: Annotated[float | None, recipe.LR] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Fixes the weights, the order of the samples and dropout; with --load, what is generated."),
    ] = None,
    validate_every: Annotated[int | None, recipe.VALIDATE_EVERY] = None,
    patience: Annotated[int | None, recipe.PATIENCE] = None,
    precision: Annotated[recipe.Precision | None, recipe.PRECISION] = None,
    device: Annotated[str, recipe.DEVICE] = "auto",
    out: Annotated[Path | None, recipe.OUT] = None,
    init: Annotated[
        Path | None, typer.Option(help="Begin with the saved model in this folder (and its shape), not at random.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Do not train: load the model in this folder and generate with it.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="With --load: the text to continue.")] = "def ",
    length: Annotated[int, typer.Option(min=0, help="With --load: how many bytes to generate.")] = 400,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="With --load: 0 takes the likeliest byte, 1 samples as the model predicts.")
    ] = 0.8,
) -> None:
    where = recipe.choose_device(device)
    if load is not None:
        start, saved = prompt.encode(), GPT.load(load).to(where)
        print(readable(start + saved.generate(start, length, temperature=temperature, seed=seed or 0)))
        return
    chosen = PRESETS[preset]
    shape = _given(layers=layers, heads=heads, width=width, block=block, dropout=dropout)
    training = _given(
        steps=steps, replicas=replicas, batch=batch, accumulate=accumulate, lr=lr, seed=seed,
        validate_every=validate_every, patience=patience, precision=precision,
    )  # fmt: skip
    settings = replace(chosen, model=replace(chosen.model, **shape), **training)
    train(settings, data=data, device=where, out=out, init=init)


def _given(**options: float | recipe.Precision | None) -> dict[str, Any]:
    """Return the options that were given on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def main(argv: list[str] | None = None) -> int:
    """Train or generate as `argv` (default: the command line) says. Returns the exit status."""
    return recipe.exit_status(app, argv, program=PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
