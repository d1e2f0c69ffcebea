"""A small DCGAN (Radford, Metz and Chintala, 2016) for images of 8x8: a generator and a discriminator."""

from pathlib import Path

import msgspec
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from rallypoint.errors import DataError

WEIGHTS_FILE = "generator.safetensors"
CONFIG_FILE = "generator.json"


class GANConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The size of both models: `noise` numbers are made an image by layers of `width` features and fewer."""

    noise: int = 16
    width: int = 32
    channels: int = 1


class Generator(nn.Module):
    """Makes images float32 [n, channels, 8, 8] in [0, 1] of noise [n, noise]."""

    def __init__(self, config: GANConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.main = nn.Sequential(
            nn.ConvTranspose2d(config.noise, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, config.channels, 3, padding=1),
            nn.Sigmoid(),
        )
        self.apply(_first_values)

    def forward(self, noise: Tensor) -> Tensor:
        """Return one image for each row of `noise`."""
        images: Tensor = self.main(noise[:, :, None, None])
        return images

    def save(self, folder: Path) -> None:
        """Write `generator.safetensors` (buffers included) and `generator.json` (the configuration) into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self, str(folder / WEIGHTS_FILE))
        (folder / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self.config)) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Generator":
        """Return the generator that `save` wrote into `folder`, on the CPU, in eval mode.

        Raises `DataError` if there is none.
        """
        try:
            generator = cls(msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=GANConfig))
            load_model(generator, str(folder / WEIGHTS_FILE))
        except (FileNotFoundError, msgspec.MsgspecError) as missing:
            raise DataError(
                f"{folder} holds no trained generator ({CONFIG_FILE} and {WEIGHTS_FILE}): give the run folder that the "
                "training printed at its end"
            ) from missing
        return generator.eval()


class Discriminator(nn.Module):
    """Says of images whether they are real: a logit for each."""

    def __init__(self, config: GANConfig) -> None:
        super().__init__()
        width = config.width
        self.main = nn.Sequential(
            nn.Conv2d(config.channels, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4),
        )
        self.apply(_first_values)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [n] of images [n, channels, 8, 8]."""
        logits: Tensor = self.main(images)
        return logits.flatten()


def _first_values(module: nn.Module) -> None:
    """As in the paper: weights from a normal distribution of 0.02, those of BatchNorm around 1."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)
