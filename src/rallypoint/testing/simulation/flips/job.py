"""A simulated job whose servers audit themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import msgspec

from rallypoint.config import JobConfig
from rallypoint.testing.simulation.job import SimulatedJob


@dataclass(frozen=True)
class FlippedJob(SimulatedJob):
    """Like SimulatedJob, with ``audit_servers=checks``."""

    checks: int = 1

    @cached_property
    def config(self) -> JobConfig:
        """The settings that a real job of this kind has."""
        return msgspec.structs.replace(super().config, audit_servers=self.checks)


def with_audits(job: SimulatedJob, every: int) -> FlippedJob:
    """The same job, with audits of every so many versions."""
    given = {field.name: getattr(job, field.name) for field in fields(job) if field.init}
    return FlippedJob(**given, checks=every)
