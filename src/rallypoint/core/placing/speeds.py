"""The workers' speeds, measured from their reports: to assign replicas by speed, and to find stragglers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_REMEMBERED = 32  # a worker's speed is the median of so many last replicas
_ENOUGH = 4  # replicas before a worker's speed counts as known
_STALE_S = 60.0  # seconds without a replica after which a worker's speed is dropped
_LATE = 2.0  # a replica is late after so many times the usual time


@dataclass(slots=True)
class Speeds:
    """The seconds that each worker's last replicas took, and which replicas of the last steps were reported.

    Every `now` is in seconds; rates are replicas per second. `revision` rises whenever a speed may have changed.
    """

    revision: int = 0
    _seconds: dict[str, deque[float]] = field(default_factory=dict)
    _medians: dict[str, float] = field(default_factory=dict)  # of `_seconds`, as far as they were asked for
    _reported: dict[int, set[int]] = field(default_factory=dict)  # step -> replicas
    _last: dict[str, float] = field(default_factory=dict)  # when each worker last reported
    _assisted: set[tuple[int, int]] = field(default_factory=set)

    def computed(self, worker: str, step: int, replica: int, seconds: float, now: float) -> bool:
        """Note a report. Returns True if it is the first for that step and replica."""
        self._changed(worker)
        self._seconds.setdefault(worker, deque(maxlen=_REMEMBERED)).append(max(seconds, 1e-6))
        first = replica not in self._reported.setdefault(step, set())
        self._reported[step].add(replica)
        self._last[worker] = now
        for old in [s for s in self._reported if s < step - 2]:
            del self._reported[old]
        return first

    def forget(self, worker: str) -> None:
        self._changed(worker)
        self._seconds.pop(worker, None)
        self._last.pop(worker, None)

    def restart(self) -> None:
        """Drop which replicas were reported: steps will be computed again."""
        self._reported.clear()
        self._assisted.clear()

    def rates(self, workers: Sequence[str]) -> dict[str, float]:
        """Worker -> replicas per second; a worker with too few reports gets the median of the others."""
        known = {w: 1.0 / self._median_of(w) for w in workers if len(self._seconds.get(w, ())) >= _ENOUGH}
        usual = _median(list(known.values())) if known else 1.0
        return {worker: known.get(worker, usual) for worker in workers}

    def makespan(self, assigned: Mapping[str, Sequence[int]], rates: Mapping[str, float]) -> float:
        """Seconds until the last worker has computed all of its replicas."""
        return max((len(own) / rates.get(worker, 1.0) for worker, own in assigned.items()), default=0.0)

    def known(self, assigned: Mapping[str, Sequence[int]]) -> bool:
        return all(len(self._seconds.get(worker, ())) >= _ENOUGH for worker, own in assigned.items() if own)

    def fade(self, assigned: Mapping[str, Sequence[int]], now: float) -> None:
        """Drop the speeds of workers that have computed nothing for long: they may not be slow any more."""
        for worker, own in assigned.items():
            if not own and now - self._last.get(worker, now) > _STALE_S:
                self.forget(worker)

    def straggler(
        self, assigned: Mapping[str, Sequence[int]], step: int, workers: Sequence[str], now: float
    ) -> tuple[str, int, int] | None:
        """(idle worker, step, replica) if a replica of `step` is late and a worker has nothing to do; else None.

        Returns each (step, replica) only once. Last come the replicas that the late worker has computed: it may keep
        them, to add them up with the late one before it sends them (I3).
        """
        done = self._reported.get(step, set())
        late = [
            (worker, replica) for worker, own in assigned.items() for replica in own
            if (step, replica) not in self._assisted and not done.issuperset(own)
            and now - self._last.get(worker, now) > _LATE * self._usual(workers)
        ]  # fmt: skip
        late.sort(key=lambda found: found[1] not in done)
        # A worker without replicas does not follow the job, and so does not have the parameters.
        idle = [w for w in workers if assigned.get(w) and set(assigned[w]) <= done and not any(w == slow for slow,
            _ in late)]
        if not late or not idle:
            return None
        _, replica = late[-1]
        self._assisted.add((step, replica))
        return idle[0], step, replica

    def _changed(self, worker: str) -> None:
        self.revision += 1
        self._medians.pop(worker, None)

    def _median_of(self, worker: str) -> float:
        found = self._medians.get(worker)
        if found is None:
            found = self._medians[worker] = _median(self._seconds[worker])
        return found

    def _usual(self, workers: Sequence[str]) -> float:
        return _median([1.0 / rate for rate in self.rates(workers).values()])


def _median(values: Sequence[float] | deque[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
