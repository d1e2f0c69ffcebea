"""A server's side of handing over what codecs remember of replicas: it keeps a memory between two workers.

Workers have no links to each other, so the shard's primary is where a memory (see `core/handover.py`) changes hands. It
holds at most one of each (shard, replica): the newest, until somebody contributes a later step, who then has what
follows from it. Whoever recalls one that is not here waits if, and only if, there is a worker in the view that has
contributed last of all and has not given anything since: it will. When that worker is gone, the answer is that there is
none, and the replica begins from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from rallypoint.core.handover import Key
from rallypoint.core.view import View, ViewNumber

M = TypeVar("M")


class Answer(NamedTuple, Generic[M]):
    """Tell `worker` what there is of (shard, replica); `memory` is None if there is nothing."""

    worker: str
    shard: int
    replica: int
    step: int = 0
    memory: M | None = None


class _Last(NamedTuple):
    """The last step that was contributed, and who may still give what follows from it; None: nobody."""

    step: int
    owner: tuple[str, int] | None


@dataclass(slots=True)
class Relay(Generic[M]):
    """The memories at server `me`, for the shards of which it is the primary."""

    me: str
    _since: ViewNumber | None = None
    _births: dict[str, int] = field(default_factory=dict)
    _held: dict[Key, tuple[int, M]] = field(default_factory=dict)
    _last: dict[Key, _Last] = field(default_factory=dict)
    _asking: dict[Key, list[str]] = field(default_factory=dict)

    def holds(self, shard: int, replica: int) -> int | None:
        """The step of the memory that is held."""
        held = self._held.get((shard, replica))
        return None if held is None else held[0]

    def adopt(self, view: View) -> list[Answer[M]]:
        """A new view: what is of a void past or of another primary's shard goes, who waits for somebody gone hears."""
        if self._since != view.since:
            self._held.clear()
            self._last.clear()
            self._asking.clear()
        self._since = view.since
        self._births = {member.id: member.birth for member in view.workers}
        for known in (self._held, self._last, self._asking):
            for key in [key for key in known if view.primary.get(key[0]) != self.me]:
                del known[key]
        for key, last in self._last.items():
            if last.owner is not None and self._births.get(last.owner[0]) != last.owner[1]:
                self._last[key] = _Last(last.step, None)
        for key, workers in self._asking.items():
            self._asking[key] = [worker for worker in workers if worker in self._births]
        return [answer for key in sorted(self._asking) for answer in self._answer(key)]

    def contributed(self, shard: int, replica: int, step: int, worker: str) -> None:
        """A contribution has come."""
        key = (shard, replica)
        held, last = self._held.get(key), self._last.get(key)
        if held is not None and held[0] < step:
            del self._held[key]
        elif held is not None:
            return  # a repeat of what is in the memory, or before it
        if last is None or step > last.step or (step == last.step and last.owner is None):
            birth = self._births.get(worker)
            self._last[key] = _Last(step, None if birth is None else (worker, birth))

    def given(self, shard: int, replica: int, step: int, worker: str, memory: M, upcoming: int) -> list[Answer[M]]:
        """A worker gives a memory; the shard waits for the replica's contribution to step `upcoming`.

        One from before the last contribution is of no use: what it says was unsent has been sent since. One from after
        the next cannot be.
        """
        key = (shard, replica)
        held, last = self._held.get(key), self._last.get(key)
        if upcoming - 1 <= step <= upcoming and (held is None or held[0] < step):
            self._held[key] = (step, memory)
        if last is not None and last.owner == (worker, self._births.get(worker)):
            self._last[key] = _Last(max(last.step, step), None)
        return self._answer(key)

    def restored(self, shard: int, replica: int, step: int, memory: M) -> None:
        """A memory has come with the shard, from a snapshot."""
        self._held[shard, replica] = (step, memory)

    def recalled(self, shard: int, replica: int, worker: str, upcoming: int) -> list[Answer[M]]:
        """A worker is to compute the replica, and asks what there is of it."""
        key = (shard, replica)
        held = self._held.get(key)
        if held is not None and held[0] + 1 < upcoming:
            del self._held[key]
        asking = self._asking.setdefault(key, [])
        if worker not in asking:
            asking.append(worker)
        return self._answer(key)

    def _answer(self, key: Key) -> list[Answer[M]]:
        """Those who wait for this, if there is an answer."""
        asking, held, last = self._asking.get(key, []), self._held.get(key), self._last.get(key)
        if held is not None:
            answers = [Answer(worker, *key, *held) for worker in asking]
        else:
            owner = None if last is None or last.owner is None else last.owner[0]
            answers = [Answer[M](worker, *key) for worker in asking if owner in (None, worker)]
        self._asking[key] = [worker for worker in asking if all(answer.worker != worker for answer in answers)]
        if not self._asking[key]:
            del self._asking[key]
        return answers
