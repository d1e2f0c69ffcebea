"""Which files of a folder are text, and which folders are labels. torch is not needed for that."""

import codecs
import os
import sysconfig
from pathlib import Path

from rallypoint.errors import DataError

# fmt: off
TEXT_SUFFIXES = frozenset({
    ".c", ".cc", ".cfg", ".cpp", ".css", ".csv", ".go", ".h", ".hpp", ".html", ".ini", ".java", ".js", ".json", ".md",
    ".py", ".pyi", ".rs", ".rst", ".sh", ".sql", ".tex", ".toml", ".ts", ".txt", ".xml", ".yaml", ".yml",
})
# fmt: on
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
STDLIB_SKIPPED_FOLDERS = SKIPPED_FOLDERS | {"test", "idlelib"}


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


def labels_of(folder: Path) -> list[str]:
    """Return the labels: the names of the folders in `folder`, in their order. Raises DataError for fewer than two."""
    found = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    labels = [name for name in found if not name.startswith((".", "__"))]
    if len(labels) < 2:
        raise DataError(
            f"{folder} has {len(labels)} folders with a label's name: to classify texts, give --data a folder that has "
            "one folder of text files for each label, as reviews/good and reviews/bad"
        )
    return labels


def texts_of(folder: Path) -> list[Path]:
    """Return the texts of a label's folder. Raises DataError for fewer than two: one of them is to validate."""
    files = list_text_files(folder)
    if len(files) < 2:
        raise DataError(f"{folder} has {len(files)} text files: a label needs two, one of them to validate")
    return files


def some_text(folder: Path | None) -> list[Path]:
    """Return the text files of `folder` (default: the standard library). Raises DataError if there is none."""
    if not (files := list_text_files(folder)):
        raise DataError(_nothing_found(folder or stdlib_folder()))
    return files


def _is_text(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.suffix.lower() in TEXT_SUFFIXES:
        return path.stat().st_size > 0
    with path.open("rb") as file:
        start = file.read(1024)
    return bool(start) and b"\0" not in start and _is_utf8(start)


def _is_utf8(start: bytes) -> bool:
    """True if these bytes begin a UTF-8 text; a character may be cut off at their end."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return True


def _nothing_found(folder: Path) -> str:
    if not folder.is_dir():
        return (
            f"{folder} is not a folder: give --data a folder with text files (.txt, .md, .py or any other UTF-8 text)"
        )
    return (
        f"{folder} holds no text: looked in it and its folders for files that are UTF-8 (.txt, .md, .py, ...), except "
        "in hidden folders, __pycache__ and site-packages; give --data a folder with text in it"
    )
