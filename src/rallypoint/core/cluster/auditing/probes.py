"""What workers' probes say about each other: which of them cannot audit each other (`core.audits.alike`)."""

from __future__ import annotations

import msgspec

from rallypoint.core.audits.alike import unlike
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect, Say


def probed(worker: str, kernels: bytes, course: Course) -> list[Effect]:
    """Note the digest of a worker's probe, and say it if its kernels are unlike those of all workers before it."""
    workers = course.members.workers
    workers[worker] = msgspec.structs.replace(workers[worker], kernels=kernels)
    if not kernels:
        return []  # a job without audits
    sentence = unlike(workers[worker], [workers[id] for id in course.members.proposed if id in workers])
    return [Say(sentence)] if sentence else []
