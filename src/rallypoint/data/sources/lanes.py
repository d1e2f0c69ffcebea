"""Streams of tokens side by side, for models that carry a state from one window to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rallypoint.config import JobConfig
from rallypoint.errors import DataError, UsageError

Sample = tuple[torch.Tensor, torch.Tensor]


class Lanes:
    """One long text as `lanes` streams side by side, cut into windows: ``rp.Lanes(tokens, length=35, lanes=80)``.

    The tokens are cut into `lanes` equal pieces, as pytorch/examples' word_language_model does. Sample i is window
    ``i // lanes`` of lane ``i % lanes``: ``(x, y)``, two int64 tensors of `length` tokens, y one token further than x.
    What does not fill a window in every lane is left out at each lane's end.

    A job reads it in its own order, and needs as many lanes as a step has samples (`replicas` x `batch`): then each
    place in a replica's batch reads one lane from its beginning to its end, and begins anew. That is a pure function of
    the position, so whoever computes a replica reads on where the step before has stopped.

    Example: 2 replicas of 3 samples, 6 lanes: replica 1 at step 7 reads window 7 of lanes 3, 4 and 5.

    Arguments:
        tokens: whole numbers, one after the other: a tensor, an array, or a `numpy.memmap` of a file.
        length: tokens of a window.
        lanes: streams.

    Raises DataError when there are not enough tokens for a window in each lane, UsageError for other input that cannot
    be right.
    """

    def __init__(self, tokens: torch.Tensor | npt.NDArray[Any], length: int, lanes: int) -> None:
        if length < 1 or lanes < 1:
            raise UsageError(f"rp.Lanes(length={length}, lanes={lanes}): give a length and lanes of 1 or more")
        text = tokens.numpy() if isinstance(tokens, torch.Tensor) else tokens
        if text.ndim != 1 or text.dtype.kind not in "iu":
            raise UsageError(
                f"rp.Lanes got tokens of shape {list(text.shape)} and type {text.dtype}: give whole numbers in one row"
            )
        self._text, self.length, self.lanes = text, length, lanes
        self._piece = len(text) // lanes
        self.windows = (self._piece - 1) // length
        if self.windows < 1:
            raise DataError(
                f"{len(text)} tokens in {lanes} lanes are {self._piece} in each, and a window needs length + 1 = "
                f"{length + 1}: give more tokens, fewer lanes or shorter windows"
            )

    def __len__(self) -> int:
        return self.windows * self.lanes

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window, lane = divmod(index, self.lanes)
        start = lane * self._piece + window * self.length
        both = torch.from_numpy(self._text[start : start + self.length + 1].astype(np.int64))
        return both[:-1], both[1:]

    def begins(self, step: int) -> bool:
        """True if the lanes begin (again) with this step: what a replica carries belongs to their ends."""
        return step % self.windows == 0

    def check(self, config: JobConfig) -> None:
        """Raise DataError for a job in which a replica would not read on in its lanes."""
        wanted = config.replicas * config.batch
        if config.order != "sequential":
            raise DataError(
                f'rp.Lanes with order="{config.order}": the windows of a lane follow one another; leave order= out'
            )
        if self.lanes != wanted:
            raise DataError(
                f"rp.Lanes has {self.lanes} lanes, and a step of this job has {config.replicas} x {config.batch} "
                f"samples: give lanes={wanted}, one for each sample of a step"
            )
        if config.accumulate > 1:
            raise DataError(
                f"accumulate={config.accumulate} with rp.Lanes: a replica's micro-batches would be of different lanes, "
                "and it carries one state; use more replicas in place of accumulate"
            )
