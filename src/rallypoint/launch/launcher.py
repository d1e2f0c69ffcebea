"""``rallypoint run``: prepares a run's folder, runs its cluster to the end, says how it ended."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from rallypoint.launch.code import kept
from rallypoint.launch.console import RunConsole
from rallypoint.launch.folder import CLUSTER_FILE, clear, locked, refuse_an_old_run
from rallypoint.launch.interrupts import Interrupted, raised
from rallypoint.launch.local import LocalCluster
from rallypoint.launch.plan import Launch, write_plan
from rallypoint.launch.run import ClusterRun, Intervene, OutputClosed

INTERRUPTED = 130  # the exit status after Ctrl-C
CLOSED = 141  # ... and when nobody reads our output any more: what a shell says of a process that SIGPIPE ended


def launch(
    plan: Launch, console: RunConsole, intervene: Intervene | None = None, *, overwrite: bool = False,
    original: bool = False,
) -> int:  # fmt: skip
    """Start the cluster, show its progress, start again what dies, end it: the exit status.

    `intervene` is called again and again while it runs; it may do things to the cluster. `overwrite` deletes what an
    earlier run has left in the folder; without, that is a UsageError (except with `plan.resume`). `original`: a resumed
    run takes the code that it began with, not what is in its place now.
    """
    folder = Path(plan.folder)
    with locked(folder):
        if overwrite:
            clear(folder)
        elif not plan.resume:
            refuse_an_old_run(folder, plan.snapshots)
        _keep_code(plan, console, original=original)
        write_plan(plan)
        return _launch_locked(plan, console, intervene or _let_be)


def _launch_locked(plan: Launch, console: RunConsole, intervene: Intervene) -> int:
    try:
        with raised(), LocalCluster() as cluster, ClusterRun(plan, console, cluster) as run:
            return run.watch(intervene)
    except (KeyboardInterrupt, Interrupted):
        console.close()
        console.console.print("[yellow]interrupted: every process has been ended[/yellow]")
        console.say_how_to_go_on(plan)
        return INTERRUPTED
    except OutputClosed:
        return CLOSED
    finally:
        (Path(plan.folder) / CLUSTER_FILE).unlink(missing_ok=True)


def _keep_code(plan: Launch, console: RunConsole, *, original: bool) -> None:
    """Copy the script and its modules into the run's folder; of a resumed run, say what has changed in them."""
    folder = Path(plan.folder)
    if not plan.script:
        return
    if plan.resume and (folder / kept.CODE).is_dir():
        changed = kept.changed(plan.script, folder)
        which = "as it was (--original)" if original else "as it is now; --original takes it as it was"
        if changed:
            console.console.print(
                f"[yellow]changed since the run began: {escape(kept.named(changed))}. The code runs {which}[/yellow]",
                soft_wrap=True,
            )
        if original:
            return
    if sentence := kept.keep(plan.script, folder):
        console.console.print(f"[yellow]{escape(sentence)}[/yellow]", soft_wrap=True)


def _let_be(_: ClusterRun) -> None:
    """Nobody intervenes in this run."""
