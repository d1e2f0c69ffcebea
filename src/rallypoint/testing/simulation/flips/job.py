"""A simulated job whose servers audit themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import msgspec

from rallypoint.config import JobConfig
from rallypoint.testing.simulation.job import SimulatedJob


@dataclass(frozen=True)
class AuditedJob(SimulatedJob):
    """Like SimulatedJob, with ``audit_servers=audits``."""

    audits: int = 1

    @cached_property
    def config(self) -> JobConfig:
        """The settings that a real job of this kind has."""
        return msgspec.structs.replace(super().config, audit_servers=self.audits)


def audited(job: SimulatedJob, every: int) -> AuditedJob:
    """The same job, with audits of every so many versions."""
    given = {field.name: getattr(job, field.name) for field in fields(job) if field.init}
    return AuditedJob(**given, audits=every)
