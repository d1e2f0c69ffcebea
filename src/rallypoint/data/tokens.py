"""Tokens in a row: windows of files of them, and one long text as streams side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rallypoint.config import JobConfig
from rallypoint.data.shards import Recent
from rallypoint.errors import DataError, UsageError

Sample = tuple[torch.Tensor, torch.Tensor]

MOST_OPEN = 256  # files that are mapped at once: each is an open file
SHARD_BYTES = 4 << 20


class TokenFiles:
    """Windows of tokens: ``rp.TokenFiles("data/train_*.bin", context=1024)``.

    Sample i is ``(x, y)``: two int64 tensors of `context` tokens, y one token further than x. Windows do not reach from
    one file into the next; tokens at a file's end that do not fill a window are left out.

    It pickles as names and sizes, whatever the files hold: other processes map them again.

    Arguments:
        files: one file, a pattern (its files are taken in the order of their names), or several of both.
        context: tokens of a sample.
        dtype: how a token is stored, such as "uint16" (nanoGPT's train.bin) or "uint32".
        stride: tokens from the start of a window to the start of the next; None: `context`, so each token is the target
            of one window at most.
        skip: bytes at the beginning of each file that are no tokens (1024 for llm.c's files).

    Raises DataError when files are missing, have a size that cannot be right, or hold no window at all.
    """

    def __init__(
        self, files: str | Path | Sequence[str | Path], context: int, dtype: npt.DTypeLike = "uint16",
        stride: int | None = None, skip: int = 0,
    ) -> None:  # fmt: skip
        self._context, self._dtype, self._skip = context, np.dtype(dtype), skip
        self._stride = context if stride is None else stride
        if context < 1 or self._stride < 1 or skip < 0:
            raise UsageError(
                f"rp.TokenFiles(context={context}, stride={stride}, skip={skip}): give a context and a stride of 1 or "
                "more, and a skip of 0 or more"
            )
        if self._dtype.kind not in "iu":
            raise UsageError(f'rp.TokenFiles(dtype="{self._dtype}"): tokens are whole numbers, such as "uint16"')
        self._files = _found(files)
        self._tokens = [self._tokens_of(path) for path in self._files]
        windows = [max(0, tokens - context - 1 + self._stride) // self._stride for tokens in self._tokens]
        self._starts = np.concatenate([[0], np.cumsum(windows)]).astype(np.int64)
        self._mapped: Recent[int, npt.NDArray[Any]] = Recent(MOST_OPEN)
        if not len(self):
            raise DataError(
                f"{self._files[0]} has {self._tokens[0]} tokens, and a window needs context + 1 = {context + 1}"
                + (f" (nor have the other {len(self._files) - 1} files enough)" if len(self._files) > 1 else "")
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = int(np.searchsorted(self._starts, index, "right")) - 1
        begin = (index - int(self._starts[file])) * self._stride
        window = self._tokens_in(file)[begin : begin + self._context + 1]
        return torch.from_numpy(window[:-1].astype(np.int64)), torch.from_numpy(window[1:].astype(np.int64))

    def shard_lengths(self) -> list[int]:
        """Return the lengths of the shards: pieces of about 4 MiB, because a file is mapped and not read whole."""
        piece = max(1, SHARD_BYTES // (self._stride * self._dtype.itemsize))
        lengths = []
        for count in np.diff(self._starts).tolist():
            lengths += [piece] * (count // piece) + ([count % piece] if count % piece else [])
        return lengths

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": Recent(MOST_OPEN)}

    def _tokens_of(self, path: str) -> int:
        size, item = os.path.getsize(path), self._dtype.itemsize
        if size <= self._skip:
            raise DataError(f"{path} is empty ({size} bytes): write it again, or leave it out")
        if (size - self._skip) % item:
            raise DataError(
                f"{path} has {size - self._skip} bytes of tokens, which is no multiple of {item}, the size of a "
                f"{self._dtype}: it was not written whole, or its tokens are of another type (dtype=), or it begins "
                "with a header (skip=)"
            )
        return (size - self._skip) // item

    def _tokens_in(self, file: int) -> npt.NDArray[Any]:
        found = self._mapped.get(file)
        if found is None:
            try:
                found = np.memmap(self._files[file], self._dtype, "r", self._skip, (self._tokens[file],))
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{self._files[file]} had {self._tokens[file]} tokens when the job began, and cannot be read as "
                    f"such any more: {error}"
                ) from error
            self._mapped.put(file, found, 1)
        return found


def _found(files: str | Path | Sequence[str | Path]) -> list[str]:
    """The names of the files that are meant. Raises DataError for what is not there."""
    if isinstance(files, Mapping) or not isinstance(files, (str, Path, Sequence)):
        raise UsageError(f"rp.TokenFiles got a {type(files).__name__}: give a file, a pattern, or a list of them")
    found: list[str] = []
    for name in [files] if isinstance(files, (str, Path)) else files:
        text = str(name)
        if "://" in text:
            raise DataError(f"{text} is not on this machine: token files are mapped to memory, so copy them here first")
        if os.path.isfile(text):
            found.append(os.path.abspath(text))
        elif matching := sorted(path for path in glob(text, recursive=True) if os.path.isfile(path)):
            found += map(os.path.abspath, matching)
        else:
            raise DataError(f"there is no file {text} (looked in {os.getcwd()})")
    if not found:
        raise DataError("rp.TokenFiles got an empty list of files: there is nothing to train on")
    return found


class Lanes:
    """One long text as `lanes` streams side by side, cut into windows: ``rp.Lanes(tokens, length=35, lanes=80)``.

    The tokens are cut into `lanes` equal pieces, as pytorch/examples' word_language_model does. Sample i is window
    ``i // lanes`` of lane ``i % lanes``: ``(x, y)``, two int64 tensors of `length` tokens, y one token further than x.
    Tokens that do not fill a window in every lane are left out at each lane's end.

    A job reads it in its own order, and needs as many lanes as a step has samples (`replicas` x `batch`): then each
    place in a replica's batch reads one lane from its beginning to its end, and starts over. That is a pure function of
    the position, so any worker that computes a replica reads on where the step before has stopped.

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
        if config.reading.order != "sequential":
            raise DataError(
                f'rp.Lanes with reading.order="{config.reading.order}": the windows of a lane follow one another; '
                "leave it out"
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
