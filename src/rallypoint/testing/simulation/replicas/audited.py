"""Audits in a simulated job: what a worker that computes wrong contributes, and what servers compare."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rallypoint.config import audits_of
from rallypoint.core.shard.events import Contribute
from rallypoint.testing.simulation.replicas.contents import Content, combine

if TYPE_CHECKING:
    from rallypoint.testing.simulation.job import SimulatedJob


@dataclass(frozen=True)
class AuditedJob:
    """A share of the steps is audited. The worker `wrong` computes something else from step `first` on."""

    share: float = 1.0
    wrong: str = ""
    first: int = 0

    def computed(self, worker: str, step: int, content: Content) -> Content:
        """What this worker's computation gives where `content` is right."""
        return combine(content, 97) if worker == self.wrong and step >= self.first else content

    def check(self, said: list[str], aborted: str) -> bool:
        """Has the job ended well although it was aborted? AssertionError if somebody was blamed who is right."""
        lost = [sentence for sentence in said if "has computed something else" in sentence]
        blamed = rf"and {self.wrong or '?'}( on host)? has computed"
        honest = [sentence for sentence in lost if not re.search(blamed, sentence)]
        assert not honest, f"an honest worker has lost: {honest[0]}"
        assert self.wrong or not any("different bytes" in sentence for sentence in said), f"a mismatch: {said}"
        return bool(self.wrong) and "nobody can decide" in aborted


def with_digest(job: SimulatedJob, event: Contribute, worker: str, content: Content) -> Contribute:
    """The contribution as a server's machine gets it: with a digest, if it is audited."""
    audits = audits_of(job.config)
    if audits is None or not audits.audited(event.step):
        return event
    assert event.count == 1, f"{event} has an audited replica"
    return replace(event, sender=worker, digest=str(content).encode())
