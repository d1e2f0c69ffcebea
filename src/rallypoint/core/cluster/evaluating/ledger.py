"""What the coordinator knows of a job's evaluations: their periods, who can run them, their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.core.evaluation import any_due
from rallypoint.core.job import JobRecord
from rallypoint.core.view import View

KEPT = 64  # versions


@dataclass(slots=True)
class EvaluationLedger:
    """The evaluations of a job.

    Attributes:
        periods: how often each evaluation of the script is due, in steps; empty while no worker has said so.
        high: one of them has a high priority: who evaluates goes on with it also if it is to train.
        able: the workers whose script has these evaluations.
        results: version -> its figures by name, of the newest 64 versions that were evaluated.
        lost: versions that nobody can evaluate any more: the servers that kept them are gone.
    """

    periods: tuple[int, ...] = ()
    high: bool = False
    able: set[str] = field(default_factory=set)
    results: dict[int, dict[str, float]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def register(self, worker: str, periods: tuple[int, ...], *, high: bool) -> None:
        """A worker says which evaluations its script has. Who has others than the first one said is not able."""
        if not self.periods or self.able <= {worker}:
            self.periods, self.high = periods, high
        (self.able.add if periods == self.periods and periods else self.able.discard)(worker)

    def recovered(self, results: Mapping[int, Mapping[str, float]], view: View | None) -> None:
        """Go on from what an earlier coordinator has left: the holder of its lease need not say that it is able."""
        self.results = {version: dict(figures) for version, figures in results.items()}
        if view is not None and view.lease is not None and view.lease.holder:
            self.able.add(view.lease.holder)

    def add(self, version: int, figures: Mapping[str, float]) -> bool:
        """Add the result of a version. Returns False if it is known already."""
        if version in self.results:
            return False
        self.results[version] = dict(figures)
        while len(self.results) > KEPT:
            del self.results[min(self.results)]
        self.lost.discard(version)
        return True

    def is_over(self, version: int) -> bool:
        """True if there is nothing to wait for: the version has its result, or never will."""
        return version in self.results or version in self.lost

    def rewind(self, version: int) -> None:
        """Drop what is known of versions after `version`: the job goes back to it."""
        self.results = {known: figures for known, figures in self.results.items() if known <= version}
        self.lost = {known for known in self.lost if known <= version}

    def is_due(self, record: JobRecord, version: int, last: int) -> bool:
        """True if an evaluation is due with that version of a job that ends with `last`."""
        if version <= 0:
            return False
        step, before = record.steps_at(version), record.steps_at(version - 1)
        return any_due(self.periods, step, before, ends=version == last)

    def next_due(self, version: int, last: int) -> int | None:
        """The first version from `version` on that is due and not over; None if there is none up to `last`.

        Only where a version is one step, as wherever evaluations are leased.
        """
        while version <= last:
            version = min(last, *(-(-max(1, version) // every) * every for every in self.periods))
            if not self.is_over(version):
                return version
            version += 1
        return None
