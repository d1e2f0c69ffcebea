"""The server's side of moving codec states: a primary passes a replica's codec state between two workers.

Workers have no links to each other, so a codec state goes over the shard's primary (`core/worker/handover.py` is the
workers' side):

```
   worker a --gives--> primary --answers a recall--> worker b
```

The primary holds at most one codec state for each (shard, replica): the newest. It drops it when a worker contributes a
later step, because that worker then has the next one.

Each (shard, replica) has at most one *owner*: the worker that the primary answered last, or that contributed while
there was no owner. A worker stops being the owner when it gives the codec state, reports that it has nothing new, or
leaves the view. While there is an owner, other workers that recall have to wait. If the owner dies before it
contributes, the primary still has the codec state that it sent to it. If it dies after that, there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.handover import Key

M = TypeVar("M")


class StateAnswer(NamedTuple, Generic[M]):
    """Send `worker` the codec state of (shard, replica); `codec_state` is None if there is none."""

    worker: str
    shard: int
    replica: int
    step: int = 0
    codec_state: M | None = None


@dataclass(slots=True)
class Relay(Generic[M]):
    """The codec states at server `me`, for the shards that are primary there. Not thread-safe: owner thread only."""

    me: str
    _generation: ViewNumber | None = None
    _incarnations: dict[str, int] = field(default_factory=dict)
    _held: dict[Key, tuple[int, M]] = field(default_factory=dict)
    _owners: dict[Key, tuple[str, int]] = field(default_factory=dict)
    _asking: dict[Key, list[str]] = field(default_factory=dict)

    @property
    def between(self) -> frozenset[Key]:
        """The codec states that are between two workers: they are lost with this server, or if their shard moves."""
        return frozenset(self._held.keys() - self._owners.keys())

    def adopt(self, view: View) -> list[StateAnswer[M]]:
        """Adopt a view.

        Drops what is stale and what belongs to shards of other primaries. Returns answers to workers that waited for an
        owner that is gone.
        """
        if self._generation != view.generation:
            for known in (self._held, self._owners, self._asking):
                known.clear()
        self._generation = view.generation
        self._incarnations = {member.id: member.incarnation for member in view.workers}
        for known in (self._held, self._owners, self._asking):
            for key in [key for key in known if view.primary.get(key[0]) != self.me]:
                del known[key]
        self._owners = {key: who for key, who in self._owners.items() if self._incarnations.get(who[0]) == who[1]}
        for key, workers in self._asking.items():
            self._asking[key] = [worker for worker in workers if worker in self._incarnations]
        return [answer for key in sorted(self._asking) for answer in self._answer(key)]

    def contributed(self, shard: int, replica: int, step: int, worker: str, upcoming: int) -> None:
        """`worker` contributed to `step` for the replica.

        `upcoming` is the next step that the shard takes of this replica.
        """
        key = (shard, replica)
        if not upcoming - 1 <= step <= upcoming:
            return
        if key in self._held and self._held[key][0] < step:
            del self._held[key]
        if key not in self._held and key not in self._owners and worker in self._incarnations:
            self._owners[key] = (worker, self._incarnations[worker])

    def given(
        self, shard: int, replica: int, worker: str, upcoming: int, codec_state: tuple[int, M] | None
    ) -> list[StateAnswer[M]]:  # fmt: skip
        """A worker gives a codec state as (step, state), or None to report that it has nothing new.

        Keeps it only if its step is `upcoming` or the one before: an older state lacks later contributions.
        """
        key = (shard, replica)
        fits = codec_state is not None and upcoming - 1 <= codec_state[0] <= upcoming
        if codec_state is not None and fits and (key not in self._held or self._held[key][0] < codec_state[0]):
            self._held[key] = codec_state
        if self._owners.get(key, ("", 0))[0] == worker:
            del self._owners[key]
        if worker in self._asking.get(key, ()):
            self._asking[key].remove(worker)
        return self._answer(key)

    def restored(self, shard: int, replica: int, step: int, codec_state: M) -> None:
        """A codec state came with the shard from a snapshot."""
        self._held[shard, replica] = (step, codec_state)

    def recalled(self, shard: int, replica: int, worker: str, upcoming: int) -> list[StateAnswer[M]]:
        """A worker that will compute the replica asks for its codec state."""
        key = (shard, replica)
        if key in self._held and self._held[key][0] + 1 < upcoming:
            del self._held[key]
        asking = self._asking.setdefault(key, [])
        if worker not in asking and worker in self._incarnations:
            asking.append(worker)
        return self._answer(key)

    def _answer(self, key: Key) -> list[StateAnswer[M]]:
        """Make the first waiting worker the owner and answer it, unless another worker is the owner."""
        asking = self._asking.get(key, [])
        owner = self._owners.get(key)
        answers: list[StateAnswer[M]] = []
        if asking and (owner is None or owner[0] in asking):
            worker = asking[0] if owner is None else owner[0]
            asking.remove(worker)
            self._owners[key] = (worker, self._incarnations[worker])
            answers = [StateAnswer(worker, *key, *self._held.get(key, (0, None)))]
        if not asking:
            self._asking.pop(key, None)
        return answers
