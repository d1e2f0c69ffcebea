"""Chooses the strategies of a job from its mode. No other file of `core/cluster` reads the mode's description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rallypoint.core.cluster.recovery import Recovery, ServersHoldState, WorkersHoldState
from rallypoint.core.cluster.storing.snapshot_duty import CAPTURE_AHEAD, VersionRule, a_little_ahead, slowest_clock
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.decisions import Rules
from rallypoint.core.job import JobRecord
from rallypoint.core.modes import Feature, Pace, StateHolder

_RECOVERY: dict[StateHolder, Callable[[], Recovery]] = {
    StateHolder.SERVERS: ServersHoldState,
    StateHolder.WORKERS: WorkersHoldState,
}
_SNAPSHOTS: dict[Pace, tuple[VersionRule, int]] = {
    Pace.ROUNDS: (a_little_ahead, CAPTURE_AHEAD),
    Pace.OWN: (slowest_clock, 0),
}


@dataclass(slots=True)
class Strategies:
    """What depends on a job's record. The defaults are for a job whose record is not known yet.

    Attributes:
        recovery: who holds the model's state, and how the job goes on when some of it is lost.
        by_speed: replicas may move to a faster worker. False where a replica leaves state on its worker.
        backup_tasks: an idle worker is asked for a straggler's replica.
        aggregates: workers may use aggregators.
        hands_over: shards move between two steps. Else each of them at once, and steps may be computed again.
        warms: a worker that joins fetches a version before it gets replicas.
        pinned: each replica stays with its worker, also while that is away: see `core.placing.pinned`.
        workers_have_codec_states: a snapshot needs the workers' codec states.
        in_rounds: servers report each round, once.
        anybody_begins: any worker may upload first values, so nothing is half done if one of them dies.
        rules: by which evaluations decide, as the record has them.
        snapshot_version: the rule for the version of the next snapshot.
        snapshot_lead: ask for a snapshot so many steps before its version.
    """

    recovery: Recovery = field(default_factory=ServersHoldState)
    by_speed: bool = True
    backup_tasks: bool = False
    aggregates: bool = True
    hands_over: bool = False
    warms: bool = False
    pinned: bool = False
    workers_have_codec_states: bool = False
    in_rounds: bool = True
    anybody_begins: bool = False
    rules: Rules = field(default_factory=Rules)
    snapshot_version: VersionRule = a_little_ahead
    snapshot_lead: int = CAPTURE_AHEAD


def strategies_for(record: JobRecord, terms: Terms) -> Strategies:
    """The strategies of a job with this record."""
    snapshot_version, snapshot_lead = _SNAPSHOTS[record.mode.pace]
    pinned, in_rounds = Feature.OWN_LOOP in record.features, record.mode.pace is Pace.ROUNDS
    steps = in_rounds and not {Feature.SUMS, Feature.KEYED} & set(record.features)
    stay = {Feature.OWN_LOOP, Feature.KEYED, Feature.AUDIT} & set(record.features)  # one worker alone cannot be audited
    return Strategies(
        recovery=_RECOVERY[record.mode.holder](),
        by_speed=not stay and not record.mode.leaves_state,
        backup_tasks=terms.backup_tasks and record.supports(Feature.BACKUP_TASKS),
        hands_over=steps and not pinned,
        warms=steps and not pinned and record.mode.holder is StateHolder.SERVERS,
        pinned=pinned,
        aggregates=not terms.backup_tasks and record.supports(Feature.AGGREGATORS),
        workers_have_codec_states=Feature.CODEC_STATE in record.features and record.mode.holder is StateHolder.SERVERS,
        in_rounds=in_rounds,
        anybody_begins=Feature.KEYED in record.features,
        rules=record.rules,
        snapshot_version=snapshot_version,
        snapshot_lead=snapshot_lead,
    )
