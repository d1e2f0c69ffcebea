"""A small ResNet for small images, with BatchNorm, whose buffers are state too.

He et al. 2015 in the form for small images (their section 4.2): a 3x3 stem, stages of basic blocks that halve the image
and double the width, the mean over the image, one linear layer.
"""

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from rallypoint.errors import ConfigError, DataError, to_install
from rallypoint.recipes.recipe import SavedModel

# ---- Scikit-learn's handwritten digits: 1,797 images of 8x8 that need no download ----


CLASSES = 10
CHANNELS = 1
VALIDATION_EVERY = 5
"""Every 5th image is kept for validation."""


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation images: samples (x, y) with x float32 [1, 8, 8] in [0, 1] and y int64.

    Alpaydin and Kaynak 1998. The split is by position, so every process makes the same one. Raises `DataError` when
    scikit-learn, which contains the images, is not installed.
    """
    try:
        # Imported here: it takes a second, and only this recipe needs this optional package.
        from sklearn import datasets
    except ImportError as missing:
        raise DataError(f"the digits come with scikit-learn: {to_install('recipes')}") from missing
    bunch = datasets.load_digits()
    # Stored as whole numbers 0..16.
    images = torch.from_numpy(bunch.images.astype(numpy.float32) / 16.0).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(numpy.int64))
    held_out = torch.arange(len(images)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


@dataclass(frozen=True)
class ResNetConfig:
    """The shape of a ResNet: `width` features in the first stage, one entry of `blocks` per stage.

    The default suits 8x8 digits; `ResNetConfig(width=16, blocks=(3, 3, 3), channels=3)` is the ResNet-20 of the paper
    for 32x32 colour images. Raises `ConfigError` for a shape that cannot be built.
    """

    width: int = 16
    blocks: tuple[int, ...] = (1, 1, 1)
    channels: int = 1
    classes: int = 10

    def __post_init__(self) -> None:
        if not self.blocks or min(self.width, self.channels, self.classes, *self.blocks) < 1:
            raise ConfigError(f"width, channels, classes and every stage's blocks must be at least 1; got {self}")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions added to their input, which is projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm_first = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_second = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            projected = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projected, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm_first(self.first(x)))
        hidden = self.norm_second(self.second(hidden))
        return functional.relu(hidden + self.shortcut(x))


class ResNet(SavedModel):
    """An image classifier: float [batch, channels, height, width] in, logits [batch, classes] out.

    The initial weights come from torch's global generator: call `torch.manual_seed` first for the same model twice.
    """

    config_type = ResNetConfig
    config: ResNetConfig

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        width = config.width
        self.stem = nn.Conv2d(config.channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential()
        inputs = width
        for stage, blocks in enumerate(config.blocks):
            outputs = width * 2**stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                self.stages.append(BasicBlock(inputs, outputs, stride=stride))
                inputs = outputs
        self.head = nn.Linear(inputs, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each image. Any image size from 2x2 up works."""
        x = functional.relu(self.norm(self.stem(images)))
        x = self.stages(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per image; `labels` is int64 [batch]."""
        return functional.cross_entropy(self(images), labels)
