"""One decision per step that all servers compute alike: the clip factor, or to skip a step that is not finite.

Each server measures the norms of its own shards and sends them to the other servers. When a server knows the norms of
all shards of the layout, it computes the decision. All servers use the same floats in the same order, so they get the
same number. A norm is named by (step, shard), and repeats are harmless (I2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.view import ViewNumber

_FIRST = ViewNumber()
_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Measure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The 2-norm of one shard's mean gradient at a step, and the replicas whose loss was not finite."""

    shard: int
    norm: float
    not_finite: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tell:
    """Send these measures of `step` to every other server."""

    step: int
    measures: tuple[Measure, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on `step` of `generation`: all servers scale the gradient by `scale`, or skip the step (None)."""

    step: int
    norm: float
    scale: float | None
    not_finite: tuple[int, ...] = ()
    generation: ViewNumber = _FIRST


def clip_scale(norm: float, clip: float | None) -> float:
    """The factor of global-norm clipping, as torch.nn.utils.clip_grad_norm_ computes it (Pascanu et al., 2013)."""
    if clip is None:
        return 1.0
    scale = clip / (norm + _EPSILON)
    return 1.0 if scale > 1.0 else scale  # a NaN norm gives NaN, as in torch


def total_norm(norms: Iterable[float]) -> float:
    """The 2-norm of a vector from the 2-norms of its pieces. Computed in float64 and correctly rounded."""
    return math.sqrt(math.fsum(norm * norm for norm in norms))


_REMEMBERED = 2  # steps whose decision is kept, for a backup promoted in the middle of a step


@dataclass(slots=True)
class ClipMachine:
    """Takes measures; returns `Tell` and `Verdict`. It lives for one `generation`; a roll-back replaces it.

    `shards` are all parameter shards of the layout. `own` are those whose primary is this server; it changes with the
    view.

    A server that died may have sent its measures to only some of the others. So every server sends all that it knows
    again (`retell`) whenever the servers change.
    """

    shards: Sequence[int]
    own: frozenset[int]
    clip: float | None
    skip_not_finite: bool
    generation: ViewNumber = _FIRST
    _known: dict[int, dict[int, Measure]] = field(default_factory=dict)
    _verdicts: dict[int, Verdict] = field(default_factory=dict)
    _told: dict[int, frozenset[int]] = field(default_factory=dict)  # step -> the shards sent
    _expected: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._expected = frozenset(self.shards)

    def measured(self, step: int, measure: Measure) -> list[Tell | Verdict]:
        """One of this server's shards has finished its sum. Sends the measures once all of its shards have."""
        if step in self._verdicts:
            return [*self._tell(step, self._known[step]), self._verdicts[step]]  # we became primary after it
        known = self._learn(step, [measure])
        return [*self._tell(step, known), *(self._decide(step, known) if self.own <= known.keys() else [])]

    def told(self, step: int, measures: Iterable[Measure]) -> list[Tell | Verdict]:
        """Another server sent its measures."""
        if step in self._verdicts or step <= max(self._verdicts, default=_REMEMBERED - 1) - _REMEMBERED:
            return []
        known = self._learn(step, measures)
        return [*self._tell(step, known), *self._decide(step, known)]

    def verdict(self, step: int) -> Verdict | None:
        """The decision on `step`. None if it is not taken yet, or is older than the last two decisions."""
        return self._verdicts.get(step)

    def retell(self) -> list[Tell]:
        """All measures known here, of this server's shards and others', for servers that may have missed them."""
        return [
            Tell(step, tuple(known[shard] for shard in sorted(known)))
            for step, known in sorted(self._known.items())
            if known
        ]

    def _tell(self, step: int, known: dict[int, Measure]) -> list[Tell]:
        """This server's measures, once they are complete. Some may come from an earlier primary of the shard."""
        if not self.own or not self.own <= known.keys() or self._told.get(step) == self.own:
            return []
        self._told[step] = self.own
        return [Tell(step, tuple(known[shard] for shard in sorted(self.own)))]

    def _learn(self, step: int, measures: Iterable[Measure]) -> dict[int, Measure]:
        known = self._known.setdefault(step, {})
        for measure in measures:
            if measure.shard in self._expected:
                known.setdefault(measure.shard, measure)
        return known

    def _decide(self, step: int, known: dict[int, Measure]) -> list[Tell | Verdict]:
        if len(known) < len(self.shards):
            return []
        norm = total_norm(known[shard].norm for shard in self.shards)
        bad = tuple(sorted({replica for measure in known.values() for replica in measure.not_finite}))
        skip = self.skip_not_finite and (bool(bad) or not math.isfinite(norm))
        verdict = Verdict(step, norm, None if skip else clip_scale(norm, self.clip), bad, self.generation)
        self._verdicts[step] = verdict
        for old in [s for s in self._known.keys() | self._verdicts.keys() if s <= step - _REMEMBERED]:
            self._known.pop(old, None)
            self._verdicts.pop(old, None)
            self._told.pop(old, None)
        return [verdict]

    def validate(self) -> None:
        """Raise AssertionError, with a sentence, if the machine is in a state that it can never reach."""
        assert self.own <= self._expected, f"shards {sorted(self.own - self._expected)} are measured, and do not count"
        newest = max(self._verdicts, default=-1)
        for step, known in self._known.items():
            assert known.keys() <= self._expected, f"step {step}: measures of shards that do not count: {sorted(known)}"
            decided = step not in self._verdicts or len(known) == len(self.shards)
            assert decided, f"step {step} was decided with {len(known)} of {len(self.shards)} measures"
        for step, verdict in self._verdicts.items():
            assert step > newest - _REMEMBERED, f"the verdict of step {step} is kept beside that of step {newest}"
            assert verdict.generation == self.generation, f"{verdict} is of another generation than {self.generation}"
