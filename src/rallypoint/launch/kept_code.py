"""Copies of a user's code, kept with the run: workers run the code that the run started with, even if it is edited.

The script and the ``.py`` files below its folder are copied to ``code/`` in the run's folder. `worker_argv` starts the
script from there. `rallypoint.launch.runner` describes the only difference: where the source text is read.

A command that is given an earlier run's folder runs nobody's words and code but this user's (and root's).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rallypoint.errors import DataError, Explained, UsageError
from rallypoint.launch import runner
from rallypoint.launch.plan import RUN_FILE, Launch
from rallypoint.own_files import is_alone_in_group, not_ours, not_private

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
    with Explained(UsageError, f"{script} cannot be read"):
        text = path.read_bytes()
    with Explained(UsageError, f"the code of {script} cannot be kept in {folder}"):
        remove(fresh)
        fresh.mkdir(mode=0o700, parents=True)
        _write(fresh / path.name, text)
        complete = _copy_modules(path.parent, fresh, (kept.resolve(), fresh.resolve()))
        remove(kept)
        fresh.rename(kept)
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
    """Yield the Python files below `home`, those directly in it first. Leaves out virtual environments, hidden folders,
    the folders of runs, what this user cannot read, and `without`."""
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
            elif os.path.isdir(entry) and not os.path.islink(entry) and entry not in without and _may_hold_code(entry):
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


def refuse_others_words(folder: Path, doing: str = "resuming") -> None:
    """Raise UsageError when another user could have written what the run in this folder runs.

    That is its plan (``run.json``: a command with its arguments) and each file of the code that it keeps. They, and
    their folders, must belong to this user (or to root), and nobody else may write them; a group that is this user's
    alone may, and what lies in a folder that only he can enter may say what it likes. `doing`: what runs them, for the
    sentence.
    """
    for path, hidden in ((folder, False), (folder / RUN_FILE, False), *_with_all_in(folder / CODE)):
        try:
            about = path.lstat() if path.is_relative_to(folder / CODE) else path.stat()
        except OSError:
            continue  # who reads it says what is missing
        why = not_ours(about)
        if about.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"{path} {why}, and {doing} a run runs what it says: copy the folder, and read its run.json, if you "
                "trust it"
            )
        if stat.S_ISLNK(about.st_mode):
            raise UsageError(
                f"{path} is a link, which no run makes there, and {doing} a run runs what is in {CODE}/: put a copy of "
                "what it leads to in its place, if you trust that"
            )
        if why and not hidden and not is_alone_in_group(about):
            raise UsageError(
                f"other users may write {path}, and {doing} a run runs what it says: look at its run.json, then "
                f"chmod -R go-w {shlex.quote(str(folder))}"
            )


def refuse_others_script(plan: Launch, doing: str, instead: str) -> str:
    """Raise UsageError when the script of an earlier run could be any, or another user could have written it.

    For who is about to run it as it is now, and not the copy that was kept. The script and its folder, from which it
    imports, must belong to this user (or to root), and nobody else may write them; a group that is this user's alone
    may, as it is the default of many systems. `doing` what runs it, and what to do `instead`, are for the sentence.

    Root may also run what belongs to the owner of the folder where it is: in a container, a user's files that are
    mounted there. Then it returns a sentence that says so, else "".
    """
    if not plan.script:
        return ""
    here, said = os.stat(".").st_uid if os.geteuid() == 0 else os.geteuid(), ""
    path = Path(plan.script)
    if not path.is_absolute():
        raise UsageError(
            f"{Path(plan.folder) / RUN_FILE} names the script {plan.script} without its folder: {doing} would run what "
            "has that name in the folder where you are. Write its whole path there, in `script` and in `worker`"
        )
    whole = path.resolve()
    for looked in dict.fromkeys((path.parent, whole.parent, whole)):
        try:
            about = looked.stat()
        except OSError:
            continue  # who reads it says what is missing
        why = not_ours(about)
        if why and about.st_uid == here:
            alone = is_alone_in_group(about, here) or not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            why = "" if alone else "may be written by other users"
        if why and not is_alone_in_group(about):
            raise UsageError(
                f"{looked} {why}, and {doing} this run runs {plan.script} as it is now: {instead}; or look at it, make "
                "it yours, and let nobody else write it"
            )
        if about.st_uid not in (os.geteuid(), 0):  # of who owns the folder where root is
            said = f"{looked} belongs to user number {here}, as the folder does where you are: it runs as root"
    return said


def _with_all_in(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the path of a folder, and of everything in it, and whether only this user can come to it there. Links are
    not followed."""
    yield folder, False
    hidden = set[Path]()
    for inside, folders, files in os.walk(folder):
        place = Path(inside)
        if place.parent in hidden or not not_private(place.lstat()):
            hidden.add(place)
        yield from ((place / name, place in hidden) for name in (*folders, *files))
