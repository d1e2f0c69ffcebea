"""What a seed plays where the job is a store."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from rallypoint.testing.simulation.keys.job import with_keys

if TYPE_CHECKING:
    from rallypoint.testing.simulation.plan import Plan


def as_store(plan: Plan) -> Plan:
    """The plan for a store of one key or several; some of the shards may be parts of a table."""
    rng = random.Random(plan.seed * 7919 + 17)
    tables = rng.choice([0, 0, rng.randint(1, plan.job.shards)])
    job = replace(plan.job, buffers=0, clip=None, skip=False, tables=tables)
    faults = tuple(fault for fault in plan.faults if fault.role != "aggregator")
    terms = msgspec.structs.replace(plan.terms, backup_tasks=False, aggregators=0)
    keyed = with_keys(job, rng.randint(1, job.shards))
    return replace(plan, job=keyed, terms=terms, faults=faults, aggregators=0)
