"""What members can know: the coordinator takes a claim only from a member that could have seen it become true.

A claim that its sender could not know is ignored, not refused: an honest member may say it late, after a roll-back, a
reassignment or a restart of the coordinator. Values that no honest member sends at all end the connection: their ranges
stand in `core.protocol` and `coordinator.connections`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from rallypoint.core.cluster import events as cluster_events
from rallypoint.core.cluster.course import Course
from rallypoint.core.protocol import Capture, Contributed, Evaluated, Message, NotStored, Report, Stored, Updated
from rallypoint.core.view import View, ViewNumber


@dataclass(slots=True)
class Claims:
    """Remembers who was asked for a snapshot, who has held an evaluation lease, and who the lead was; all else is in
    the view."""

    _asked: Capture | None = None
    _holders: dict[str, tuple[ViewNumber, int]] = field(default_factory=dict)  # of leases: generation, newest version
    _leads: dict[str, ViewNumber] = field(default_factory=dict)  # generation; a view forgets what is long over

    def asked(self, capture: Capture) -> None:
        """A snapshot begins."""
        self._asked = capture

    def published(self, view: View) -> None:
        """A view is published: who holds its evaluation lease, or is the lead, may tell a result later too."""
        for assignment in view.assignments:
            lead = next((worker for worker, replicas in assignment.replicas.items() if 0 in replicas), "")
            self._leads[lead] = view.generation
        if (lease := view.orders.lease) is not None and lease.holder:
            self._holders[lease.holder] = (view.generation, lease.version)

    def may_say(self, member: str, message: Message, course: Course) -> bool:
        """Can the member know this? A worker that has not proposed the record cannot have computed a replica."""
        match message:
            case Report() | Contributed():
                return member in course.members.present and self.may_report(member, message, course.view)
            case Updated():
                return self.may_hold(member, message, course.view)
            case Evaluated():
                return member in course.members.present and self.may_evaluate(member, message, course.view)
            case Stored() | NotStored():
                return self.may_answer(member, message)
            case _:
                return True

    def may_report(self, worker: str, report: Report | Contributed, view: View | None) -> bool:
        """Can the worker have computed this, in the view in force or an earlier one of its generation?

        A report of an earlier generation is judged by who counts it.
        """
        if view is None:
            return False
        if report.generation == view.generation:
            return view.takes(worker, (report.replica,))
        return report.generation < view.generation

    def may_hold(self, server: str, claim: Updated, view: View | None) -> bool:
        """Can the server hold that shard: does it in the view in force? (A copy elsewhere is claimed there too.)"""
        if view is None or claim.generation != view.generation:
            return False
        return server in view.holders_of(claim.shard)

    def may_evaluate(self, worker: str, claim: Evaluated, view: View | None) -> bool:
        """Can the worker have evaluated in the view in force or an earlier one of its generation?

        Who computes replica 0 evaluates, and who holds a lease. That no server keeps a version can know who had the
        lease of that very version. Figures of an earlier generation are judged by who counts them.
        """
        if view is None:
            return False
        self.published(view)  # an earlier coordinator's, before this one's first
        if claim.values is None:
            return self._holders.get(worker) == (claim.generation, claim.version)
        if claim.generation == view.generation:
            held = self._holders.get(worker)
            leads = view.takes(worker, (0,)) or self._leads.get(worker) == view.generation
            return leads or (held is not None and held[0] == view.generation)
        return claim.generation < view.generation

    def may_answer(self, member: str, message: Stored | NotStored) -> bool:
        """Was the member asked for a part of that snapshot?"""
        asked = self._asked
        return asked is not None and asked.snapshot == message.snapshot and member in asked.writers


_Claim = TypeVar("_Claim")


@dataclass(slots=True)
class Early(Generic[_Claim]):
    """Claims about steps that are not known to be reached yet. They are kept until those are.

    What proves them comes over other connections, so an honest one may be early. At most `most` steps are kept: those
    furthest ahead are dropped first, for honest members are not far ahead of what is known.
    """

    most: int
    _by_step: dict[int, list[_Claim]] = field(default_factory=dict)

    def keep(self, step: int, claim: _Claim, limit: int) -> None:
        """Keep a claim about `step`; if there are `limit` of this step already, drop it."""
        kept = self._by_step.setdefault(step, [])
        if len(kept) < limit:
            kept.append(claim)
        if len(self._by_step) > self.most:
            del self._by_step[max(self._by_step)]

    def due(self, known: int) -> list[_Claim]:
        """Take out the claims about steps up to `known`, the earliest step first."""
        if not self._by_step:
            return []
        steps = sorted(step for step in self._by_step if step <= known)
        return [claim for step in steps for claim in self._by_step.pop(step)]


def own_part(part: Stored, shards: Container[int]) -> Stored:
    """What counts of a part: that which its sender had to store, `shards`, and the files with it."""
    own = {shard: entry for shard, entry in part.shards.items() if shard in shards}
    files = {entry[0] for entry in own.values()}
    return Stored(part.snapshot, {file: size for file, size in part.files.items() if file in files}, own)


def event_of(sender: str, message: Message) -> cluster_events.Event:
    """The machine's event for a member's message: the message, but for what concerns a snapshot."""
    match message:
        case Stored(snapshot=snapshot, shards=shards):
            return cluster_events.Captured(sender, snapshot, tuple(shards))
        case NotStored(reason=reason):
            return msgspec.structs.replace(message, reason=f"{sender}: {reason}")
        case _:
            return cluster_events.From(sender, message)


# Checks that the workers' own optimizers have the same settings: each report carries a digest of them (AllReduce).

_KEPT = 4  # steps: a report may arrive after another worker's report of the next step


class Agreement:
    """Compares the reports of each step, for the last few steps of the newest generation."""

    def __init__(self) -> None:
        self._generation = ViewNumber()
        self._first: dict[int, tuple[str, str]] = {}  # step -> the worker that reported it first, its digest

    def difference(self, worker: str, report: Report, *, own_loop: bool = False) -> str | None:
        """The sentence that says which workers had different settings at the report's step; None if all agree.

        `own_loop`: the loop is the script's (`rp.wrap`), so what to do is another thing.
        """
        if not report.settings or report.generation < self._generation:
            return None
        if report.generation > self._generation:
            self._generation = report.generation
            self._first.clear()
        other, settings = self._first.setdefault(report.step, (worker, report.settings))
        for old in sorted(self._first)[:-_KEPT]:
            del self._first[old]
        if settings == report.settings:
            return None
        who = f"{worker} and {other} do" if other != worker else f"two replicas on {worker} do"
        if own_loop:
            return (
                f"{who} not have the same learning rate, or another setting of their optimizers, by step "
                f"{report.step}, so their models would no longer be the same. A scheduler begins anew in a process "
                "that is started again: give it to rp.wrap(model, optimizer, schedule=scheduler, ...), which steps it "
                "up to the job's step; or set the rate from the step: group[\"lr\"] = rate(optimizer.position)"
            )
        return (
            f"{who} not have the same settings in own_optimizer or own_schedule by step {report.step}, so the workers' "
            "models would no longer be the same. What run.every calls runs on one worker alone, and the loop only "
            "where there are replicas to compute: change settings by own_schedule, or in the optimizer's own step()"
        )
