"""The first sentence of a report: what has happened, to whom, what to do. Pure."""

from __future__ import annotations

import shlex

from rallypoint.launch.reporting.picture import Picture
from rallypoint.launch.reporting.stacks import Process

LONG_S = 10.0  # a run whose log says nothing for so long is silent


def sentence_of(picture: Picture) -> str:
    """What has happened, to whom, what to do."""
    if picture.ended == "finished":
        return f"The run has finished after {picture.step} steps{f': {picture.why}' if picture.why else ''}."
    crashed = [process for process in picture.processes if process.crash]
    if picture.ended == "failed":
        return f"The run failed {_at(picture)}: {_stop(picture.why)}{_crashes(crashed)}{_going_on(picture)}"
    if not picture.running:
        if picture.silent_s is None:
            return f"Nothing has happened in {picture.folder}: there is no log of events. Is it a run's folder?"
        return f"The run was interrupted {_at(picture)}, and nobody runs it now.{_crashes(crashed)}{_going_on(picture)}"
    if stopped := [process for process in picture.processes if process.state]:
        return f"{_at(picture).capitalize()} {_who(stopped)}{_waits(picture)} {_wake(stopped)}"
    if picture.waits:
        cause = f"{_at(picture).capitalize()} the run is {_stop(picture.waits)}{_crashes(crashed)}"
        return f"{cause} The stacks say where each process is."
    if crashed:
        where = f"in {_file(crashed[-1])}"
        return f"{_crashes(crashed).strip()} The run goes on {_at(picture)}: {where} is what it did."
    if picture.silent_s is not None and picture.silent_s > LONG_S:
        return (
            f"{_at(picture).capitalize()} nothing has happened for {picture.silent_s:.0f} s, and the coordinator says "
            "nothing: the stacks say where each process is."
        )
    return f"The run goes on {_at(picture)}."


def _at(picture: Picture) -> str:
    if not picture.step:
        return "before its first step"
    return f"after {picture.step}{f' of {picture.steps}' if picture.steps else ''} steps"


def _stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _who(processes: list[Process]) -> str:
    named = [f"{p.owner.name} (process {p.owner.pid} on {p.owner.host}) is {p.state}" for p in processes[:3]]
    more = f" and {len(processes) - 3} more" if len(processes) > 3 else ""
    return " and ".join(named) + more


def _waits(picture: Picture) -> str:
    return f"; the run is {_stop(picture.waits)}" if picture.waits else "."


def _wake(processes: list[Process]) -> str:
    stopped = [str(process.owner.pid) for process in processes if process.state.startswith("stopped")]
    if not stopped:
        return "It comes back when its device answers."
    pids = " ".join(stopped[:10])
    return f"`kill -CONT {pids}` lets it go on, `kill -KILL {pids}` lets another take its place."


def _crashes(processes: list[Process]) -> str:
    last = processes[-1] if processes else None
    return f" {last.owner.name} on {last.owner.host} crashed: {_stop(last.crash)}" if last is not None else ""


def _file(process: Process) -> str:
    return f"stacks/{process.owner.name}-{process.owner.pid}.txt"


def _going_on(picture: Picture) -> str:
    if picture.stored < 0:
        return ""
    return f" `rallypoint resume {shlex.quote(picture.folder)}` goes on from version {picture.stored}."
