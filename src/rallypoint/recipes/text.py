"""Any folder of text as training data: a map-style dataset of byte windows."""

import codecs
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rallypoint.errors import DataError

BUDGET = 16 * 2**20
"""Bytes read from a folder unless told otherwise: enough for a demonstration, small enough for any machine."""

VALIDATION_EVERY = 20
"""Every 20th file is kept for validation."""

# fmt: off
TEXT_SUFFIXES = frozenset({
    ".c", ".cc", ".cfg", ".cpp", ".css", ".csv", ".go", ".h", ".hpp", ".html", ".ini", ".java", ".js", ".json", ".md",
    ".py", ".pyi", ".rs", ".rst", ".sh", ".sql", ".tex", ".toml", ".ts", ".txt", ".xml", ".yaml", ".yml",
})
# fmt: on
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
STDLIB_SKIPPED_FOLDERS = SKIPPED_FOLDERS | {"test", "idlelib"}


class TextDataset(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is the window of `block` bytes that starts at byte i, and the same window one byte later.

    `data` is one uint8 vector. A sample is an int64 pair (x, y), each of shape [block]. Every offset is a sample, so
    even a short text gives many different batches.
    """

    def __init__(self, data: Tensor, *, block: int) -> None:
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(f"data must be one uint8 vector; got {data.dtype} of shape {tuple(data.shape)}")
        if len(data) <= block:
            raise DataError(
                f"the text has only {len(data)} bytes, but one window needs {block + 1}: "
                "give a folder with more text, or a smaller block"
            )
        self.data = data
        self.block = block

    def __len__(self) -> int:
        return len(self.data) - self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        window = self.data[index : index + self.block + 1].long()
        return window[:-1], window[1:]

    def fixed_windows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return at most `count` validation windows, spread evenly over the text, as (x, y) of shape [count, block]."""
        count = min(count, len(self))
        pairs = [self[number * len(self) // count] for number in range(count)]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def load_text(folder: Path | None = None, *, block: int, budget: int = BUDGET) -> tuple[TextDataset, TextDataset]:
    """Return the training and the validation text of `folder` (default: the standard library of this Python).

    Files are read in the order of their paths until `budget` bytes are reached, so every worker that sees the same
    files builds the same datasets. With too few files for a validation file, validation gets the last twentieth of the
    bytes. Raises `DataError` when the folder holds no text.
    """
    if not (files := list_text_files(folder)):
        raise DataError(_nothing_found(folder or stdlib_folder()))
    train, validation = split_files(files)
    for_validation = budget // VALIDATION_EVERY
    if validation:
        train_data = read_bytes(train, budget=budget - for_validation)
        validation_data = read_bytes(validation, budget=for_validation)
    else:
        data = read_bytes(train, budget=budget)
        cut = len(data) - max(len(data) // VALIDATION_EVERY, block + 1)
        train_data, validation_data = data[: max(cut, 0)], data[max(cut, 0) :]
    return TextDataset(train_data, block=block), TextDataset(validation_data, block=block)


def split_files(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the files for training and, every 20th, for validation; no file is in both."""
    train = [path for number, path in enumerate(files, start=1) if number % VALIDATION_EVERY]
    return train, list(files[VALIDATION_EVERY - 1 :: VALIDATION_EVERY])


def read_bytes(files: Sequence[Path], *, budget: int) -> Tensor:
    """Return the files' bytes one after another, separated by line breaks, at most `budget`, as one uint8 vector."""
    text = bytearray()
    for path in files:
        if len(text) >= budget:
            break
        with path.open("rb") as file:
            text += file.read(budget - len(text)) + b"\n"
    del text[budget:]
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def stdlib_folder() -> Path:
    """Return the folder of the interpreter's standard library: about 12 MB of Python that is always there."""
    return Path(sysconfig.get_paths()["stdlib"])


def list_text_files(folder: Path | None = None) -> list[Path]:
    """Return the text files under `folder`, ordered by path; hidden folders, caches and installed packages are skipped.

    A file is text if its suffix says so or its first KB is UTF-8 without zero bytes.
    """
    skipped = SKIPPED_FOLDERS if folder else STDLIB_SKIPPED_FOLDERS
    root = folder or stdlib_folder()
    found: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    # Ordered as POSIX text, because folder listings, and paths on Windows, have other orders.
    ordered = sorted(found, key=lambda path: path.relative_to(root).as_posix())
    return [path for path in ordered if _is_text(path)]


def _is_text(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.suffix.lower() in TEXT_SUFFIXES:
        return path.stat().st_size > 0
    with path.open("rb") as file:
        start = file.read(1024)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # a character may be cut off at its end
    except UnicodeDecodeError:
        return False
    return bool(start) and b"\0" not in start


def _nothing_found(folder: Path) -> str:
    if not folder.is_dir():
        return (
            f"{folder} is not a folder: give --data a folder with text files (.txt, .md, .py or any other UTF-8 text)"
        )
    return (
        f"{folder} holds no text: looked in it and its folders for files that are UTF-8 (.txt, .md, .py, ...), except "
        "in hidden folders, __pycache__ and site-packages; give --data a folder with text in it"
    )
