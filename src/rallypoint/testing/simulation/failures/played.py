"""What a plan was made for, so that a failing seed's line says it."""

from __future__ import annotations

from dataclasses import replace

from rallypoint.codec.spec import has_state
from rallypoint.core.policy import AllReduce, LocalSteps
from rallypoint.testing.simulation.keys.job import KeyedJob
from rallypoint.testing.simulation.operating import links
from rallypoint.testing.simulation.operating.pauses import PAUSE
from rallypoint.testing.simulation.operating.resuming import RESUME
from rallypoint.testing.simulation.plan import Plan
from rallypoint.testing.simulation.policies import (
    Audited,
    AuditedWrong,
    Carrying,
    CodecState,
    Deciding,
    Evaluating,
    InnerState,
    Keyed,
    Paused,
    Played,
    Poisoned,
    Resumed,
    Scaled,
    Stopped,
    Tables,
    Uneven,
)


def played_by(plan: Plan) -> Played:
    """What a plan was made for."""
    job, faults = plan.job, tuple(fault for fault in plan.faults if fault.kind != PAUSE)
    if plan.resumes:
        played = played_by(replace(plan, faults=tuple(fault for fault in plan.faults if fault.kind != RESUME)))
        assert not isinstance(played, Paused | Uneven | Resumed)
        return Resumed(played)
    if plan.terms.measure_links:
        return links.on_uneven(played_by(links.steady(plan)))
    if len(faults) < len(plan.faults):
        played = played_by(replace(plan, faults=faults))
        assert not isinstance(played, Paused | Uneven | Resumed)
        return Paused(played)
    if isinstance(job, KeyedJob):
        assert not isinstance(job.sync, LocalSteps | AllReduce)
        return Keyed(job.sync)
    if job.audits is not None:
        return AuditedWrong() if job.audits.wrong else Audited()
    if job.carries:
        return Carrying(job.sync)
    if job.fp16:
        return Scaled()
    if job.every:
        return Deciding() if job.rules.steers else Evaluating()
    if job.tables:
        assert not isinstance(job.sync, LocalSteps | AllReduce)
        return Tables(job.sync)
    if job.inner and isinstance(job.sync, LocalSteps):
        return InnerState(job.sync)
    if job.poison is not None:
        return Poisoned(job.sync)
    if job.stop is not None:
        return Stopped(job.sync)
    return CodecState(job.sync) if has_state(job.codec) else job.sync
