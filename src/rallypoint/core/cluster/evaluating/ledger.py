"""What the coordinator knows of a job's evaluations: their periods, who can run them, their results, the decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.cluster.events import Evaluates
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.deciding.decisions import Decided, Rules, StopWhen
from rallypoint.core.evaluation import any_due
from rallypoint.core.job import JobRecord

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
        registered: it is known which evaluations the script has: a worker has said it, or the journal.
        stops: the script's rules for an early end.
        decided: what is decided from the results.
        asked: the newest version of which a snapshot was asked for.
        stored: the newest 64 versions of which there is a snapshot.
        first: the version with which this generation began.
    """

    periods: tuple[int, ...] = ()
    high: bool = False
    able: set[str] = field(default_factory=set)
    results: dict[int, dict[str, float]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    registered: bool = False
    stops: tuple[StopWhen, ...] = ()
    decided: Decided = field(default_factory=Decided)
    asked: int = 0
    stored: list[int] = field(default_factory=list)
    first: int = 0
    _earlier: list[Decided] = field(default_factory=list)  # ascending; the newest 64, and the one that `asked` needs

    def agrees(self, said: Evaluates, *, fixed: bool) -> bool:
        """True if this worker's script has the evaluations and rules of the job, or may say which those are.

        The first one may, and who is alone. `fixed`: no more, for what the job has computed depends on them.
        """
        none = not self.periods and not self.stops
        if not self.registered or (none and not (fixed and said.stops)) or (self.able <= {said.worker} and not fixed):
            return True
        return said.periods == self.periods and said.stops == self.stops

    def register(self, said: Evaluates, *, same: bool) -> bool:
        """A worker says which evaluations its script has. Who has others than the job (`same`) is not able.

        Returns True if those of the job are others now.
        """
        before = (self.periods, self.high, self.stops)
        if same and ((said.periods, said.stops) != (self.periods, self.stops) or self.able <= {said.worker}):
            self.periods, self.high, self.stops = said.periods, said.high, said.stops
        self.registered = True
        (self.able.add if same and said.periods else self.able.discard)(said.worker)
        return (self.periods, self.high, self.stops) != before

    def recovered(self, state: ClusterState) -> None:
        """Go on from what an earlier coordinator has left: the holder of its lease need not say that it is able."""
        self.decided, self.stored, self.asked = state.decided, list(state.stored), max(state.stored, default=0)
        self.results = {version: dict(figures) for version, figures in state.results.items()}
        self.periods, self.high, self.stops = state.periods, state.high, state.stops
        self.registered = bool(self.periods or self.stops)
        if state.view is not None and state.view.lease is not None and state.view.lease.holder:
            self.able.add(state.view.lease.holder)

    def add(self, version: int, figures: Mapping[str, float], known: int) -> bool:
        """Add the result of a version. Returns False if it is known already.

        `known` is the highest version that is known to exist. Of too many results, one of a version after it goes
        first: those of honest workers are not far ahead.
        """
        if version in self.results:
            return False
        while len(self.results) >= KEPT:
            furthest = max(self.results)
            del self.results[furthest if furthest > known else min(self.results)]
        self.results[version] = dict(figures)
        self.lost.discard(version)
        return True

    def is_over(self, version: int) -> bool:
        """True if there is nothing to wait for: the version has its result, or never will."""
        return version in self.results or version in self.lost

    def rewind(self, version: int) -> None:
        """Drop what is known of versions after `version`: the job goes back to it."""
        self.results = {known: figures for known, figures in self.results.items() if known <= version}
        self.lost = {known for known in self.lost if known <= version}
        self.decided = self.decided_at(version)
        self.first = self.asked = version
        self.stored = [*(known for known in self.stored if known < version), version]

    def go_back_to(self, decided: Decided) -> None:
        """The job goes back to a snapshot, which says that this was decided."""
        self.decided = decided
        self._earlier.clear()

    def is_stored(self, version: int) -> None:
        """There is a snapshot of this version."""
        self.stored = [*self.stored, version][-KEPT:]

    def decided_at(self, version: int) -> Decided:
        """What was decided from evaluations of versions up to this one, as far as it is known."""
        known: Sequence[Decided] = [Decided(), *self._earlier, self.decided]
        return [one for one in known if one.version <= version][-1]

    def decide(self, rules: Rules, version: int, following: int | None) -> None:
        """Decide from the result of `version`, which has one or never will. `following`: see `Decided.after`."""
        earlier = [*self._earlier, self.decided]
        needed = [one for one in earlier if one.version <= self.asked][-1:]  # by the snapshot in progress
        newest = earlier[-KEPT:]
        self._earlier = [*(one for one in needed if one.version < newest[0].version), *newest]
        self.decided = self.decided.after(rules, version, self.results.get(version, {}), following)

    def due_after(self, version: int, last: int) -> int | None:
        """The first version after this one that is due, whatever is over; None if there is none up to `last`."""
        if not self.periods or version >= last:
            return None
        return min(last, *((max(0, version) // every + 1) * every for every in self.periods))

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
