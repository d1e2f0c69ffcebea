"""The story of one seed: its plan without the faults that do not matter, and what led to the failure.

What happens in a simulated world follows from what happened before: a message from the event in which it was sent, a
process's death from a fault. `World.causes` has it, and the story follows it back from where the failure was seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from rallypoint.core.protocol import Beat, NewView, Prepare, Report, ViewChange
from rallypoint.core.view import View
from rallypoint.net.frames import Header, Kind
from rallypoint.testing.simulation.network import Cause, World
from rallypoint.testing.simulation.plan import Plan
from rallypoint.testing.simulation.run import Simulation, SimulationFailed

CAUSES = 40  # lines that are shown
_LONGEST = 110  # characters of what is said in one line
_STEPS = (Kind.PUSH, Kind.REPLICATE)
_SILENT = (Kind.CREDIT, Kind.MEASURES)


class StoryLine(NamedTuple):
    """What happened in event `number`."""

    at: float
    number: int
    text: str


def explain(plan: Plan) -> list[str]:
    """What is wrong with this plan, and what led to it; or its faults, if all is well."""
    found = _play(Simulation(plan))
    if found is None:
        return ["all is well", *described(plan)]
    fewer = shrunk(plan, found)
    simulation = Simulation(fewer)
    simulation.world.remember()
    failed = _play(simulation)
    assert failed is not None, "a seed that fails replays"
    needed = f"of {len(plan.faults)} faults {len(fewer.faults)} are needed for it" if plan.faults else "without a fault"
    lines = _lines(simulation.world, failed)
    numbers = {line.number: number for number, line in enumerate(lines, 1)}
    return [
        str(failed).split("\n")[1], needed, *described(fewer), "what led to it:",
        *(f"{number:3d}  {line.at:8.3f} s  {line.text}{_because(simulation.world, line, number, numbers)}"
          for number, line in enumerate(lines, 1)),
    ]  # fmt: skip


def described(plan: Plan) -> list[str]:
    """The cluster, the job and the faults of a plan, a line for each."""
    job, terms = plan.job, plan.terms
    beside = f", {plan.aggregators} aggregators" if plan.aggregators else ""
    cluster = f"{plan.workers} workers, {plan.servers} servers (replication {terms.replication}){beside}"
    faults = sorted((one.at, f"{one.kind}, {one.role}", one.seconds) for one in plan.faults)
    return [
        f"  {cluster}; {job.steps} steps, {job.replicas} replicas, {job.shards} shards ({job.buffers} of buffers)",
        *(f"  at {at:.3f} s: {what}" + (f" ({seconds:.2f} s)" if seconds else "") for at, what, seconds in faults),
    ]


def shrunk(plan: Plan, failed: SimulationFailed) -> Plan:
    """The plan without the faults that its failure does not need: it says the same without them, but for figures."""
    said, left = _said(failed), plan
    size = max(1, len(plan.faults) // 2)
    while True:
        for start in range(0, len(left.faults), size):
            fewer = replace(left, faults=left.faults[:start] + left.faults[start + size :])
            again = _play(Simulation(fewer)) if len(fewer.faults) < len(left.faults) else None
            if again is not None and _said(again) == said:
                left = fewer
                break
        else:
            if size == 1:
                return left
            size //= 2


def _play(simulation: Simulation) -> SimulationFailed | None:
    try:
        simulation.run()
    except SimulationFailed as failed:
        return failed
    return None


def _said(failed: SimulationFailed) -> str:
    """Its sentence without figures and names, which are others in another run."""
    return re.sub(r"[\d.]+|[A-Z]\w+|server|worker|aggregator", "", str(failed).split("\n")[1])[:_LONGEST]


def _lines(world: World, failed: SimulationFailed) -> list[StoryLine]:
    """What is shown: all faults, what the failure follows from, and of the rest what was last."""
    causes, entry = world.causes or {}, failed.entry
    at = world.cause if entry is None else entry.cause
    shard = entry.shard if entry is not None else int((re.findall(r"shard (\d+)", str(failed)) or ["-1"])[0])
    until = world.now if entry is None else entry.at
    chain = {one.number for one in _back(causes, at)}
    told = [StoryLine(*one) for one in world.told if one[0] <= until]
    views, seen = list[StoryLine](), set[str]()
    for one in world.history or ():
        if one.what == "view" and one.at <= until and str(one.number) not in seen:
            seen.add(str(one.number))
            views.append(StoryLine(one.at, one.cause, _view(one.more, shard)))
    before = [one for one in causes.values() if one.at <= until]
    heard = [StoryLine(one.at, one.number, text) for one in before if (text := _heard(one))]
    ranks = (
        [line for line in told if line.text.startswith("fault: ")],
        [line for line in heard if line.number in chain], [line for line in told if line.number in chain],
        views, told, [line for line in heard if f"shard {shard}," in line.text],
    )  # fmt: skip
    chosen: dict[StoryLine, None] = {}
    for rank in ranks:
        new = [line for line in dict.fromkeys(rank) if line not in chosen]
        chosen |= dict.fromkeys(new[max(0, len(new) - (CAUSES - len(chosen))) :])
    return sorted(chosen)


def _back(causes: Mapping[int, Cause], number: int) -> Iterator[Cause]:
    """What this one follows from, back to the beginning."""
    while number >= 0:
        yield causes[number]
        number = causes[number].of


def _because(world: World, line: StoryLine, number: int, numbers: Mapping[int, int]) -> str:
    """From which line before it this one follows, if that is another than the last."""
    before = (numbers.get(one.number, number) for one in _back(world.causes or {}, line.number))
    cause = next((known for known in before if known < number), 0)
    return f"  (because of {cause})" if cause not in (0, number - 1) else ""


def _heard(cause: Cause) -> str:
    """Who hears what from whom; "" if it is of no interest."""
    if not isinstance(cause.what, tuple):
        return ""
    sender, hears, said = cause.what
    match said:
        case (Header() as header, _):
            if header.kind in _SILENT:
                return ""
            which = f"shard {header.shard}, {'step' if header.kind in _STEPS else 'version'} {header.step}"
            what = f"{header.kind.name} of {which} in view {header.view}"
        case Beat() | Report():
            return ""
        case NewView() | ViewChange():
            what = "the new view"
        case Prepare():
            what = "prepare"
        case msgspec.Struct():
            what = repr(said)[:_LONGEST]
        case _:
            return ""
    return f"{hears} hears of {sender}: {what}"


def _view(view: View, shard: int) -> str:
    homes: Sequence[Any] = (view.primary.get(shard), view.backup.get(shard, "nobody"))
    of = f"; shard {shard} is {homes[0]}'s, its backup {homes[1]}" if shard in view.primary else ""
    workers = ", ".join(f"{w} {own}" for w, own in (view.assignments[-1].replicas if view.assignments else {}).items())
    return f"view {view.number} of generation {view.generation}: replicas {workers}{of}"[: _LONGEST + 40]
