"""The one place of the coordinator's machine that asks what kind of job it is: it picks the strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rallypoint.core.cluster.recovery import Recovery, ServersHoldState, WorkersHoldState
from rallypoint.core.cluster.snapshot_duty import CAPTURE_AHEAD, VersionRule, a_little_ahead, slowest_clock
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord


@dataclass(slots=True)
class Strategies:
    """What follows from a job's record; the defaults are those of a job that is not known yet.

    Attributes:
        recovery: who holds the model's state, and how it is found again.
        by_speed: replicas may move to a faster worker; not where they leave something of value on their worker.
        backup_tasks: an idle worker is asked for a straggler's replica.
        workers_have_codec_states: workers are asked for those when a snapshot is taken.
        snapshot_version: which version the next snapshot is of.
        snapshot_lead: so many steps before that version the snapshot is asked for.
    """

    recovery: Recovery = field(default_factory=ServersHoldState)
    by_speed: bool = True
    backup_tasks: bool = False
    workers_have_codec_states: bool = False
    snapshot_version: VersionRule = a_little_ahead
    snapshot_lead: int = CAPTURE_AHEAD


def strategies_for(record: JobRecord, terms: Terms) -> Strategies:
    """The strategies of a job with this record."""
    recovery: Callable[[], Recovery] = WorkersHoldState if record.stateful_workers else ServersHoldState
    return Strategies(
        recovery=recovery(),
        by_speed=not record.sticky,
        # A helper lacks what a sticky replica leaves on its worker; a stateful worker that is overtaken cannot follow.
        backup_tasks=terms.backup_tasks and not record.sticky and not record.stateful_workers,
        workers_have_codec_states=record.sticky and not record.stateful_workers,
        snapshot_version=slowest_clock if record.streaming else a_little_ahead,
        snapshot_lead=0 if record.streaming else CAPTURE_AHEAD,
    )
