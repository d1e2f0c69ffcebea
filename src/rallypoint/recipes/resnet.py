"""Train a small ResNet on handwritten digits: `python -m rallypoint.recipes.resnet`.

This recipe shows buffers, because of BatchNorm: after a step every worker has the buffers of replica 0. Alone, it
starts a cluster inside its own process. Under `rallypoint run --workers 2 --servers 2` every worker runs this same
file.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.utils.data import TensorDataset

import rallypoint as rp
from rallypoint.recipes import recipe
from rallypoint.recipes.resnet_model import CHANNELS, CLASSES, ResNet, ResNetConfig, load_digits

PROGRAM = "python -m rallypoint.recipes.resnet"
STAGES = 3


@dataclass(frozen=True, kw_only=True)
class ResnetSettings(recipe.Training):
    """The settings of one training: the model and how to train it."""

    model: ResNetConfig
    steps: int = 200
    batch: int = 32
    lr: float = 0.1
    warmup: int = 20
    momentum: float = 0.9
    weight_decay: float = 5e-4


DEFAULTS = ResnetSettings(model=ResNetConfig(channels=CHANNELS, classes=CLASSES))


def train(settings: ResnetSettings, *, device: torch.device, out: Path | None) -> None:
    """Train with these settings. Afterwards the lead worker prints the validation accuracy and saves the model."""
    train_images, validation_images = load_digits()
    torch.manual_seed(settings.seed)  # Every worker starts from the same weights.
    model = ResNet(settings.model).to(device)
    with rp.join() as job:
        run = job.train(
            model, train_images, **settings.arguments,
            optimizer=rp.SGD(
                lr=rp.cosine(settings.lr, warmup=settings.warmup), momentum=settings.momentum,
                weight_decay=settings.weight_decay,
            ),
            reading=rp.Reading(item="images", items_per_sample=1),
        )  # fmt: skip

        if settings.patience:
            run.stop_when("val_accuracy", patience=settings.patience, mode="max")

        @run.every(settings.validate_every)
        def validate(step: int) -> dict[str, float]:
            return {"val_accuracy": accuracy(model, validation_images)}

        for micro in run:
            with micro:
                images, labels = micro.batch
                micro.backward(model.loss(images, labels))
        if run.lead:
            _finish(model, validation_images, out or run.folder)


@torch.no_grad()
def accuracy(model: ResNet, images: TensorDataset) -> float:
    """Return the share of `images`, from 0 to 1, that `model` (in eval mode) classifies correctly."""
    device = model.head.weight.device
    x, y = images.tensors
    predicted: Tensor = model(x.to(device)).argmax(dim=1)
    return float((predicted.cpu() == y).float().mean())


def _finish(model: ResNet, validation: TensorDataset, folder: Path) -> None:
    model.eval()
    recipe.save_patiently(model.save, folder)
    print(f"validation accuracy: {100 * accuracy(model, validation):.2f} % of {len(validation)} images")
    print(f"model saved in {folder}; to use it:\n  {ResNet.__module__}.ResNet.load(pathlib.Path({str(folder)!r}))")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help="Train a small ResNet with BatchNorm on scikit-learn's 8x8 handwritten digits.")
def _command(
    width: Annotated[
        int, typer.Option(min=1, help="Features in the first of three stages; each stage doubles them.")
    ] = (DEFAULTS.model.width),
    blocks: Annotated[int, typer.Option(min=1, help="Residual blocks in each stage; 3 gives the ResNet-20.")] = (
        DEFAULTS.model.blocks[0]
    ),
    steps: Annotated[int, recipe.STEPS] = DEFAULTS.steps,
    replicas: Annotated[int, recipe.REPLICAS] = DEFAULTS.replicas,
    batch: Annotated[int, recipe.BATCH] = DEFAULTS.batch,
    accumulate: Annotated[int, recipe.ACCUMULATE] = DEFAULTS.accumulate,
    lr: Annotated[float, recipe.LR] = DEFAULTS.lr,
    seed: Annotated[int, typer.Option(help="Fixes the weights and the order of the samples.")] = DEFAULTS.seed,
    validate_every: Annotated[int, recipe.VALIDATE_EVERY] = DEFAULTS.validate_every,
    patience: Annotated[int, recipe.PATIENCE] = DEFAULTS.patience,
    precision: Annotated[recipe.Precision, recipe.PRECISION] = DEFAULTS.precision,
    device: Annotated[str, recipe.DEVICE] = "auto",
    out: Annotated[Path | None, recipe.OUT] = None,
) -> None:
    model = ResNetConfig(width=width, blocks=(blocks,) * STAGES, channels=CHANNELS, classes=CLASSES)
    settings = ResnetSettings(
        model=model, steps=steps, batch=batch, lr=lr, replicas=replicas, accumulate=accumulate, seed=seed,
        validate_every=validate_every, patience=patience, precision=precision,
    )  # fmt: skip
    train(settings, device=recipe.choose_device(device), out=out)


def main(argv: list[str] | None = None) -> int:
    """Train as `argv` (default: the command line) says. Returns the exit status."""
    return recipe.exit_status(app, argv, program=PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
