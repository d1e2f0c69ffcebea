"""``rallypoint run``: prepares a run's folder, runs its cluster to the end, reports how it ended."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from rich.markup import escape

from rallypoint.launch.code import kept
from rallypoint.launch.console import OutputClosed, RunConsole, Screen
from rallypoint.launch.engines.choice import cluster_of, kind_of
from rallypoint.launch.folder import (
    CLUSTER_FILE,
    clear,
    locked,
    not_begun,
    refuse_an_old_run,
    refuse_unwritable_snapshots,
    refuse_used_snapshots,
)
from rallypoint.launch.lifeline import Interrupted, raised
from rallypoint.launch.plan import Launch, write_plan
from rallypoint.launch.run import ClusterRun, Intervene

INTERRUPTED = 130  # the exit status after Ctrl-C
CLOSED = 141  # the status of a process that SIGPIPE ended, when nobody reads our output any more


def launch(
    plan: Launch, console: RunConsole, intervene: Intervene | None = None, *, overwrite: bool = False,
    original: bool = False, made: bool = False,
) -> int:  # fmt: skip
    """Start the cluster, show its progress, restart what dies, end it. Returns the exit status.

    `intervene` is called repeatedly during the run and may change the cluster. `overwrite` deletes what an earlier run
    has left in the folder; without it that raises UsageError (except with `plan.resume`). With `original` a resumed run
    uses the code that it began with, not the files as they are now. `made`: its folder was made for it (`new_folder`),
    and goes if it cannot begin.
    """
    folder = Path(plan.folder)
    fresh = made or not folder.exists()
    with locked(folder), not_begun(folder) if fresh else contextlib.nullcontext():
        if overwrite:
            if stays := clear(folder):
                console.say(f"[yellow]{escape(stays)}[/yellow]")
            refuse_used_snapshots(plan.snapshots)
        elif not plan.resume:
            refuse_an_old_run(folder, plan.snapshots)
        if plan.engine == "local":  # else the servers' machines write them
            refuse_unwritable_snapshots(plan.snapshots)
        edited = _keep_code(plan, console, original=original)
        write_plan(plan)
        console.console.print(f"[dim]the run's folder: {escape(plan.folder)}[/dim]", soft_wrap=True)
        screen = console.console
        if not isinstance(screen, Screen):
            return _launch_locked(plan, console, intervene or _let_be, edited)
        with screen.unhurried():
            status = _launch_locked(plan, console, intervene or _let_be, edited)
            screen.hurried = status in (INTERRUPTED, CLOSED)
        return status


def _launch_locked(plan: Launch, console: RunConsole, intervene: Intervene, edited: list[str]) -> int:
    def warn(text: str) -> None:
        console.say(f"[yellow]{escape(text)}[/yellow]")

    engine = kind_of(plan.engine)
    try:
        with (
            raised(),
            cluster_of(plan, warn) as cluster,
            ClusterRun(plan, console, cluster, edited) as run,
        ):
            status = run.watch(intervene)
        if status == 0:
            console.console.print(f"[dim]everything of this run: {escape(plan.folder)}[/dim]", soft_wrap=True)
        return status
    except (KeyboardInterrupt, Interrupted) as interrupt:
        console.close()
        number = interrupt.args[0] if isinstance(interrupt, Interrupted) else signal.SIGINT
        by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        console.console.print(f"[yellow]interrupted{by}: every process has been ended[/yellow]")
        console.say_how_to_go_on(plan, failed=False)
        if number in engine.notices:
            console.say(escape(engine.run_again()))
        return INTERRUPTED
    except OutputClosed:
        return CLOSED
    finally:
        (Path(plan.folder) / CLUSTER_FILE).unlink(missing_ok=True)


def _keep_code(plan: Launch, console: RunConsole, *, original: bool) -> list[str]:
    """Copy the script and its modules into the run's folder. For a resumed run, report which of them have changed.

    Returns the files that differ from the copies from now on: none, unless `original`.
    """
    folder = Path(plan.folder)
    if not plan.script:
        return []
    if plan.resume and (folder / kept.CODE).is_dir():
        changed = kept.changed(plan.script, folder)
        which = "as it was (--original)" if original else "as it is now; --original takes it as it was"
        if changed:
            files = escape(kept.named(changed))
            console.say(f"[yellow]changed since the run began: {files}. The code runs {which}[/yellow]")
        if original:
            return changed
    if sentence := kept.keep(plan.script, folder):
        console.say(f"[yellow]{escape(sentence)}[/yellow]")
    return []


def _let_be(_: ClusterRun) -> None:
    """Do nothing: the default for `intervene`."""
