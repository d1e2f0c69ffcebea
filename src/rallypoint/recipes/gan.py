"""Train a small DCGAN on handwritten digits: `python -m rallypoint.recipes.gan`.

This recipe shows two models with an optimizer each, which steps update alternately: a step updates the discriminator,
the next one the generator, both with the same images. Alone, it starts a cluster inside its own process. Under
`rallypoint run --workers 2 --servers 2` every worker runs this same file.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional

import rallypoint as rp
from rallypoint.recipes import choose_device, exit_status, save_patiently
from rallypoint.recipes.digits import CHANNELS, load_digits
from rallypoint.recipes.gan_model import Discriminator, GANConfig, Generator
from rallypoint.recipes.picture import save_picture

PROGRAM = "python -m rallypoint.recipes.gan"
SHADES = " .:-=+*#%@"
SHOWN = 4  # images in a row of the picture


@dataclass(frozen=True)
class Settings:
    """The settings of one training. `iterations`: updates of each model; `batch`: images per replica."""

    model: GANConfig
    iterations: int = 600
    batch: int = 32
    lr: float = 2e-3
    replicas: int = 2
    seed: int = 1234
    validate_every: int = 100


DEFAULTS = Settings(GANConfig(channels=CHANNELS))


def train(settings: Settings, *, device: torch.device, out: Path | None) -> None:
    """Train with these settings. Afterwards the lead worker shows some images and saves the generator."""
    real_images, validation_images = load_digits()
    torch.manual_seed(settings.seed)  # Every worker starts from the same weights.
    generator, discriminator = Generator(settings.model).to(device), Discriminator(settings.model).to(device)
    with rp.join() as job:
        run = job.train(
            {"generator": generator, "discriminator": discriminator},
            real_images,
            replicas=settings.replicas,
            batch=settings.batch,
            steps=2 * settings.iterations,
            alternate=("discriminator", "generator"),
            optimizer=rp.Adam(lr=settings.lr, betas=(0.5, 0.999)),
            seed=settings.seed,
            item="images",
        )

        @run.every(2 * settings.validate_every)
        def validate(step: int) -> dict[str, float]:
            noise = torch.randn(1000, settings.model.noise, device=device)
            return {"pixel_gap": pixel_gap(generator(noise).cpu(), validation_images.tensors[0])}

        for micro in run:
            with micro:
                real, _ = micro.batch
                noise = torch.randn(len(real), settings.model.noise, device=device)
                if "discriminator" in micro.updates:
                    micro.backward(judged(discriminator(real), real=True), more=True)
                    micro.backward(judged(discriminator(generator(noise).detach()), real=False))
                else:
                    micro.backward(judged(discriminator(generator(noise)), real=True))
        if run.lead:
            made = _finish(generator, validation_images.tensors[0], out or run.folder)
            print(save_picture(run.folder, run.folder, curves=("discriminator", "generator"), images=made))


def judged(logits: Tensor, *, real: bool) -> Tensor:
    """Return the loss of a discriminator's logits for images that it is to take for real, or not."""
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def pixel_gap(made: Tensor, real: Tensor) -> float:
    """Return how far made images are from real ones in each pixel's mean and standard deviation, on average."""
    return float((made.mean(0) - real.mean(0)).abs().mean() + (made.std(0) - real.std(0)).abs().mean())


def picture(images: Tensor) -> str:
    """Return images [n, 1, height, width] in [0, 1] side by side, in characters: two for each pixel."""
    rows = (images[:, 0].clamp(0, 1) * (len(SHADES) - 1)).round().long().permute(1, 0, 2)
    lines = ["  ".join("".join(2 * SHADES[int(pixel)] for pixel in image) for image in row) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


@torch.no_grad()
def _finish(generator: Generator, real: Tensor, folder: Path) -> Tensor:
    """Save the generator, show some of its images, and return them."""
    generator.eval()
    save_patiently(generator.save, folder)
    torch.manual_seed(0)
    noise = torch.randn(1000, generator.config.noise, device=next(generator.parameters()).device)
    made: Tensor = generator(noise).cpu()
    print(f"real images:\n{picture(real[:SHOWN])}\nmade by the generator:\n{picture(made[:SHOWN])}")
    print(f"pixel gap: {pixel_gap(made, real):.4f} (of means and standard deviations; 0: none)")
    used = f"{Generator.__module__}.Generator.load(pathlib.Path({str(folder)!r}))"
    print(f"generator saved in {folder}; to use it:\n  {used}")
    return made


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help="Train a small DCGAN on scikit-learn's 8x8 handwritten digits: two models, updated alternately.")
def _command(
    width: Annotated[int, typer.Option(min=1, help="Features in the models' layers.")] = DEFAULTS.model.width,
    noise: Annotated[int, typer.Option(min=1, help="Random numbers that an image is made of.")] = DEFAULTS.model.noise,
    iterations: Annotated[
        int, typer.Option(min=1, help="Updates of each of the two models: the job has twice as many steps.")
    ] = DEFAULTS.iterations,
    replicas: Annotated[
        int,
        typer.Option(min=1, help="Logical data-parallel replicas, fixed for the run however many workers come and go."),
    ] = DEFAULTS.replicas,
    batch: Annotated[
        int, typer.Option(min=2, help="Images per replica: the global batch is replicas times this.")
    ] = DEFAULTS.batch,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of both Adams.")] = DEFAULTS.lr,
    seed: Annotated[int, typer.Option(help="Fixes the weights, the noise and the images' order.")] = DEFAULTS.seed,
    validate_every: Annotated[
        int, typer.Option(min=1, help="Iterations between validations.")
    ] = DEFAULTS.validate_every,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the generator. Default: the run folder.")] = None,
) -> None:
    settings = Settings(
        GANConfig(noise=noise, width=width, channels=CHANNELS),
        iterations=iterations,
        batch=batch,
        lr=lr,
        replicas=replicas,
        seed=seed,
        validate_every=validate_every,
    )
    train(settings, device=choose_device(device), out=out)


def main(argv: list[str] | None = None) -> int:
    """Train as `argv` (default: the command line) says. Recurves the exit status."""
    return exit_status(app, argv, program=PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
