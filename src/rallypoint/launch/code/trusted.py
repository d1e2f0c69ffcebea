"""Whose words and code a command runs that is given an earlier run's folder: nobody's but this user's (and root's)."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from rallypoint.errors import UsageError
from rallypoint.launch.code.kept import CODE
from rallypoint.launch.plan import RUN_FILE, Launch
from rallypoint.own_files import is_alone_in_group, not_ours


def refuse_others_words(folder: Path, doing: str = "resuming") -> None:
    """Raise UsageError when another user could have written what the run in this folder runs.

    That is its plan (``run.json``: a command with its arguments) and each file of the code that it keeps. They, and
    their folders, must belong to this user (or to root), and nobody else may write them. `doing`: what runs them, for
    the sentence.
    """
    for path in (folder, folder / RUN_FILE, *_with_all_in(folder / CODE)):
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
        if why:
            raise UsageError(
                f"other users may write {path}, and {doing} a run runs what it says: look at its run.json, then "
                f"chmod -R go-w {shlex.quote(str(folder))}"
            )


def refuse_others_script(plan: Launch, doing: str, instead: str) -> None:
    """Raise UsageError when the script of an earlier run could be any, or another user could have written it.

    For who is about to run it as it is now, and not the copy that was kept. The script and its folder, from which it
    imports, must belong to this user (or to root), and nobody else may write them; a group that is this user's alone
    may, as it is the default of many systems. `doing` what runs it, and what to do `instead`, are for the sentence.
    """
    if not plan.script:
        return
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
        if (why := not_ours(about)) and not is_alone_in_group(about):
            raise UsageError(
                f"{looked} {why}, and {doing} this run runs {plan.script} as it is now: {instead}; or look at it, make "
                "it yours, and let nobody else write it"
            )


def _with_all_in(folder: Path) -> Iterator[Path]:
    """Yield the path of a folder, and of everything in it; links are not followed."""
    yield folder
    for inside, folders, files in os.walk(folder):
        yield from (Path(inside) / name for name in (*folders, *files))
