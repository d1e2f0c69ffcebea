"""Copies of a user's code, kept with the run: workers run the code that the run started with, even if it is edited.

The script and the ``.py`` files below its folder are copied to ``code/`` in the run's folder. `worker_argv` starts the
script from there. `rallypoint.launch.code.runner` describes the only difference: where the source text is read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rallypoint.errors import DataError, UsageError
from rallypoint.launch.code import runner

CODE = "code"
_FILES, _BYTES, _FOLDERS = 1_000, 20_000_000, 2_000  # limits of what is copied, and of the folders that are searched
_NOT_CODE = {"__pycache__", "node_modules", "site-packages"}
_RUN_FILE, _VENV_FILE = "run.json", "pyvenv.cfg"  # they mark folders of other runs, and virtual environments


def keep(script: str, folder: Path) -> str:
    """Copy `script` and the modules below its folder to ``folder/code``.

    Returns a message when there are too many, else "".

    Old copies are replaced when the new ones are complete. Only this user may read them, because the script may be
    private. Raises UsageError when the script cannot be read or the copies cannot be written.
    """
    path, kept = Path(script).resolve(), folder / CODE
    fresh = folder / f"{CODE}.new"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{script} cannot be read: {error.strerror}") from None
    try:
        remove(fresh)
        fresh.mkdir(mode=0o700, parents=True)
        _write(fresh / path.name, text)
        complete = _copy_modules(path.parent, fresh, (kept.resolve(), fresh.resolve()))
        remove(kept)
        fresh.rename(kept)
    except OSError as error:
        raise UsageError(f"the code of {script} cannot be kept in {folder}: {error.strerror}") from None
    if complete:
        return ""
    return (
        f"{path.parent} has more than {_FILES} Python files, or {_BYTES // 10**6} MB of them: the first are "
        "kept with the run; do not edit the others while it runs"
    )


def remove(path: Path) -> None:
    """Delete a folder, or a link to one (but not what the link points to). Does nothing when there is none."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def changed(script: str, folder: Path) -> list[str]:
    """Return the kept files that were changed or removed since, as paths from the script's folder.

    Raises DataError when the run has kept none.
    """
    home, kept = Path(script).resolve().parent, folder / CODE
    if not kept.is_dir():
        raise DataError(f"{folder} has kept no code of {script}")
    files = [path.relative_to(kept) for path in sorted(kept.rglob("*")) if path.is_file()]
    return [str(file) for file in files if _digest(home / file) != _digest(kept / file)]


def named(files: Sequence[str], most: int = 5) -> str:
    """Return ``a.py, b.py and 3 more``."""
    more = len(files) - most
    return ", ".join(files[:most]) + (f" and {more} more" if more > 0 else "")


def worker_argv(worker: Sequence[str], script: str, folder: Path) -> tuple[str, ...]:
    """Return `worker` (``python script.py --its options``) with the script run from the kept copy."""
    arguments = worker[list(worker).index(script) + 1 :]
    return (sys.executable, runner.__file__, str((folder / CODE).resolve()), script, *arguments)


def _copy_modules(home: Path, kept: Path, without: Sequence[Path]) -> bool:
    """Copy the modules below `home`. Returns False when there are more than the limits allow."""
    count = size = 0
    for source in _modules(home, without):
        if (text := _read(source)) is None:
            continue  # a file that cannot be read here cannot be imported either
        count, size = count + 1, size + len(text)
        if count > _FILES or size > _BYTES:
            return False
        target = kept / source.relative_to(home)
        if target.exists():
            continue  # the script: it was copied first
        for parent in reversed(target.relative_to(kept).parents):
            (kept / parent).mkdir(mode=0o700, exist_ok=True)
        _write(target, text)
    return True


def _write(path: Path, text: bytes) -> None:
    """Write a new file that only this user may read and write, whatever new files are here by default."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(text)


def _modules(home: Path, without: Sequence[Path]) -> Iterator[Path]:
    """Yield the Python files below `home`, those directly in it first.

    Leaves out virtual environments, hidden folders, the folders of runs, what this user cannot read, and `without`.
    """
    waiting, seen = [home], 0
    while waiting and seen < _FOLDERS:
        folder, seen = waiting.pop(0), seen + 1
        try:
            entries = sorted(folder.iterdir())
        except OSError:
            continue  # a folder that cannot be read here cannot be imported from either
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if os.path.isfile(entry) and entry.suffix == ".py" and os.access(entry, os.R_OK):
                yield entry
            elif (
                os.path.isdir(entry) and not os.path.islink(entry) and entry not in without and _may_hold_code(entry)
            ):
                waiting.append(entry)


def _may_hold_code(folder: Path) -> bool:
    """False for folders of runs, virtual environments and caches. Not `Path.exists`: it raises for others' folders."""
    own = (_RUN_FILE, _VENV_FILE)
    return folder.name not in _NOT_CODE and not any(os.path.exists(folder / name) for name in own)


def _read(path: Path) -> bytes | None:
    """Return the bytes of a file; None when they cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _digest(path: Path) -> bytes:
    """Return the SHA-256 of a file; b"" when there is none."""
    text = _read(path)
    return b"" if text is None else hashlib.sha256(text).digest()
