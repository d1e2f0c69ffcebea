"""What members can know: the coordinator takes a claim only from a member that could have seen it become true.

A claim that its sender could not know is ignored, not refused: an honest member may say it late, after a roll-back, a
reassignment or a restart of the coordinator. Values that no honest member sends at all end the connection: their ranges
stand in `net.messages` and `coordinator.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.cluster import events as cluster_events
from rallypoint.core.view import View
from rallypoint.net.messages import (
    Capture,
    CaughtUp,
    Disproved,
    Done,
    GiveUp,
    Leaving,
    Message,
    NotStored,
    Propose,
    Report,
    Stored,
)


@dataclass(slots=True)
class Claims:
    """Remembers who was asked for a snapshot; all else is in the view in force."""

    _asked: Capture | None = None

    def asked(self, capture: Capture) -> None:
        """A snapshot begins."""
        self._asked = capture

    def may_say(self, member: str, message: Report | Stored | NotStored, view: View | None) -> bool:
        """Can the member know this? `view` is the view in force."""
        if isinstance(message, Report):
            return self.may_report(member, message, view)
        return self.may_answer(member, message)

    def may_report(self, worker: str, report: Report, view: View | None) -> bool:
        """Can the worker have computed this, in the view in force or an earlier one of its generation?

        A report of an earlier generation is judged by who counts it.
        """
        if view is None:
            return False
        if report.generation == view.generation:
            return report.replica in view.contributors.get(worker, ())
        return report.generation < view.generation

    def may_answer(self, member: str, message: Stored | NotStored) -> bool:
        """Was the member asked for a part of that snapshot?"""
        asked = self._asked
        return asked is not None and asked.snapshot == message.snapshot and member in asked.writers


def claim_of(sender: str, message: Message) -> cluster_events.Event:
    """The machine's event for a member's message."""
    match message:
        case Propose(record=record):
            return cluster_events.Proposed(sender, record)
        case CaughtUp(backups=backups):
            return cluster_events.CaughtUp(sender, backups)
        case Disproved(shard=shard, version=version, paired=paired):
            return cluster_events.Disproved(sender, shard, version, paired)
        case Leaving():
            return cluster_events.Leaving(sender)
        case Stored(snapshot=snapshot, shards=shards):
            return cluster_events.Captured(sender, snapshot, tuple(shards))
        case NotStored(snapshot=snapshot, reason=reason, passed=passed):
            return cluster_events.SnapshotLost(snapshot, f"{sender}: {reason}", passed)
        case Done(generation=generation):
            return cluster_events.Done(sender, generation)
        case GiveUp(reason=reason):
            return cluster_events.Failed(sender, reason)
        case _:
            raise AssertionError(f"a message that nobody takes: {message}")
