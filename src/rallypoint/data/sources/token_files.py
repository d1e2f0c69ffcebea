"""Files of tokens, as language models' scripts write them: numbers of one type in a row, mapped to memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rallypoint.data.sources.recent import Recent
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
