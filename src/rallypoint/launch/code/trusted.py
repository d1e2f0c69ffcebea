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
from rallypoint.own_files import is_alone_in_group, not_ours, not_private


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
    """Yield the path of a folder, and of everything in it, and whether only this user can come to it there.

    Links are not followed.
    """
    yield folder, False
    hidden = set[Path]()
    for inside, folders, files in os.walk(folder):
        place = Path(inside)
        if place.parent in hidden or not not_private(place.lstat()):
            hidden.add(place)
        yield from ((place / name, place in hidden) for name in (*folders, *files))
