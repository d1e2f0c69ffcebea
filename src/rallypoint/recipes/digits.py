"""Scikit-learn's handwritten digits: 1,797 images of 8x8 that need no download."""

import numpy
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from rallypoint.errors import DataError, to_install

CLASSES = 10
CHANNELS = 1
VALIDATION_EVERY = 5
"""Every 5th image is kept for validation."""


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation images: samples (x, y) with x float32 [1, 8, 8] in [0, 1] and y int64.

    Alpaydin and Kaynak 1998. The split is by position, so every process makes the same one. Raises `DataError` when
    scikit-learn, which contains the images, is not installed.
    """
    images, labels = _read()
    held_out = torch.arange(len(images)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def _read() -> tuple[Tensor, Tensor]:
    try:
        # Imported here: it takes a second, and only this recipe needs this optional package.
        from sklearn import datasets
    except ImportError as missing:
        raise DataError(f"the digits come with scikit-learn: {to_install('recipes')}") from missing
    bunch = datasets.load_digits()
    # Stored as whole numbers 0..16.
    images = torch.from_numpy(bunch.images.astype(numpy.float32) / 16.0).unsqueeze(1)
    return images, torch.from_numpy(bunch.target.astype(numpy.int64))
