"""How fast each worker computes replicas, from its reports: to assign replicas by speed, and to find stragglers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_REMEMBERED = 32  # replicas of each worker
_ENOUGH = 4  # replicas before a worker's speed is believed
_STALE_S = 60.0  # after which what is known of a worker that computes nothing is known no longer
_LATE = 2.0  # times the usual time of a replica after which an idle worker is asked for it too


@dataclass(slots=True)
class Speeds:
    """The last replicas' seconds of every worker, and who is busy with what in the step in progress."""

    _seconds: dict[str, deque[float]] = field(default_factory=dict)
    _reported: dict[int, set[int]] = field(default_factory=dict)  # step -> replicas
    _last: dict[str, float] = field(default_factory=dict)  # when each worker last reported
    _assisted: set[tuple[int, int]] = field(default_factory=set)

    def computed(self, worker: str, step: int, replica: int, seconds: float, now: float) -> bool:
        """A report has come; is it the first of that replica and step?"""
        self._seconds.setdefault(worker, deque(maxlen=_REMEMBERED)).append(max(seconds, 1e-6))
        first = replica not in self._reported.setdefault(step, set())
        self._reported[step].add(replica)
        self._last[worker] = now
        for old in [s for s in self._reported if s < step - 2]:
            del self._reported[old]
        return first

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._seconds.pop(worker, None)
        self._last.pop(worker, None)

    def restart(self) -> None:
        """Steps will be computed again."""
        self._reported.clear()
        self._assisted.clear()

    def rates(self, workers: Sequence[str]) -> dict[str, float]:
        """Replicas per second; who is not known well is taken for the median of the others."""
        known = {w: 1.0 / _median(self._seconds[w]) for w in workers if len(self._seconds.get(w, ())) >= _ENOUGH}
        usual = _median(list(known.values())) if known else 1.0
        return {worker: known.get(worker, usual) for worker in workers}

    def makespan(self, assigned: Mapping[str, Sequence[int]], rates: Mapping[str, float]) -> float:
        """Seconds until the last worker has computed all of its replicas."""
        return max((len(own) / rates.get(worker, 1.0) for worker, own in assigned.items()), default=0.0)

    def known(self, assigned: Mapping[str, Sequence[int]]) -> bool:
        """Is enough known of everybody who computes?"""
        return all(len(self._seconds.get(worker, ())) >= _ENOUGH for worker, own in assigned.items() if own)

    def fade(self, assigned: Mapping[str, Sequence[int]], now: float) -> None:
        """Forget the speeds of those who have computed nothing for long: they may not be slow any more."""
        for worker, own in assigned.items():
            if not own and now - self._last.get(worker, now) > _STALE_S:
                self.forget(worker)

    def straggler(
        self, assigned: Mapping[str, Sequence[int]], step: int, workers: Sequence[str], now: float
    ) -> tuple[str, int, int] | None:
        """(idle worker, step, replica) when somebody is late with the furthest step and somebody has nothing to do."""
        done = self._reported.get(step, set())
        late = [
            (worker, replica) for worker, own in assigned.items() for replica in own
            if replica not in done and (step, replica) not in self._assisted
            and now - self._last.get(worker, now) > _LATE * self._usual(workers)
        ]  # fmt: skip
        # One without replicas does not follow the job, and so has nothing to compute with.
        idle = [w for w in workers if assigned.get(w) and set(assigned[w]) <= done and not any(w == slow for slow,
            _ in late)]
        if not late or not idle:
            return None
        _, replica = late[-1]
        self._assisted.add((step, replica))
        return idle[0], step, replica

    def _usual(self, workers: Sequence[str]) -> float:
        return _median([1.0 / rate for rate in self.rates(workers).values()])


def _median(values: Sequence[float] | deque[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
