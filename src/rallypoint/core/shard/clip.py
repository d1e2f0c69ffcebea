"""One decision per step, taken by every server alike: the clip factor, and whether to skip a step that is not finite.

Each server measures its own shards, tells the others, and once all shards of the layout are known computes the same
number from the same floats in the same order. Facts are named by (step, shard) and repeats are harmless (I2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.view import ViewNumber

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
    """What all servers do with `step` of `generation`: scale the gradient, or skip it (None)."""

    step: int
    norm: float
    scale: float | None
    not_finite: tuple[int, ...] = ()
    generation: ViewNumber = ViewNumber()


def clip_scale(norm: float, clip: float | None) -> float:
    """The factor of global-norm clipping, as torch.nn.utils.clip_grad_norm_ computes it (Pascanu et al., 2013)."""
    if clip is None:
        return 1.0
    scale = clip / (norm + _EPSILON)
    return 1.0 if scale > 1.0 else scale  # a NaN norm gives NaN, as in torch


def total_norm(norms: Iterable[float]) -> float:
    """The 2-norm of a vector from the 2-norms of its pieces, in double precision, correctly rounded."""
    return math.sqrt(math.fsum(norm * norm for norm in norms))


_REMEMBERED = 2  # steps whose decision is kept: a server promoted in the middle of one takes it again


@dataclass(slots=True)
class ClipMachine:
    """Measures in; Tell and Verdict out. A machine lives for one `generation`: after a roll-back there is a new one.

    `shards` are all parameter shards of the layout; `own`, those whose primary is here, changes with the view.

    What is known is told again (`retell`) whenever servers have changed: a server that died may have told only some.
    """

    shards: Sequence[int]
    own: frozenset[int]
    clip: float | None
    skip_not_finite: bool
    generation: ViewNumber = ViewNumber()
    _known: dict[int, dict[int, Measure]] = field(default_factory=dict)
    _verdicts: dict[int, Verdict] = field(default_factory=dict)
    _told: dict[int, frozenset[int]] = field(default_factory=dict)  # step -> whose measures the others have had of us
    _expected: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._expected = frozenset(self.shards)

    def measured(self, step: int, measure: Measure) -> list[Tell | Verdict]:
        """One of our own shards has finished its sum; the others are told once all of ours have."""
        if step in self._verdicts:
            return [*self._tell(step, self._known[step]), self._verdicts[step]]  # promoted here after the decision
        known = self._learn(step, [measure])
        return [*self._tell(step, known), *(self._decide(step, known) if self.own <= known.keys() else [])]

    def told(self, step: int, measures: Iterable[Measure]) -> list[Tell | Verdict]:
        """Another server told its measures."""
        if step in self._verdicts or step <= max(self._verdicts, default=_REMEMBERED - 1) - _REMEMBERED:
            return []
        known = self._learn(step, measures)
        return [*self._tell(step, known), *self._decide(step, known)]

    def verdict(self, step: int) -> Verdict | None:
        """What was decided for `step`, if it was, and not long ago."""
        return self._verdicts.get(step)

    def retell(self) -> list[Tell]:
        """All that is known here, of our own shards and others', for servers that may have missed it."""
        return [
            Tell(step, tuple(known[shard] for shard in sorted(known)))
            for step, known in sorted(self._known.items())
            if known
        ]

    def _tell(self, step: int, known: dict[int, Measure]) -> list[Tell]:
        """Our own measures, once they are all there: some may have come from who had the shard before us."""
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
        """AssertionError, with a sentence, unless the machine is in a state that it can come to."""
        assert self.own <= self._expected, f"shards {sorted(self.own - self._expected)} are measured, and do not count"
        newest = max(self._verdicts, default=-1)
        for step, known in self._known.items():
            assert known.keys() <= self._expected, f"step {step}: measures of shards that do not count: {sorted(known)}"
            decided = step not in self._verdicts or len(known) == len(self.shards)
            assert decided, f"step {step} was decided with {len(known)} of {len(self.shards)} measures"
        for step, verdict in self._verdicts.items():
            assert step > newest - _REMEMBERED, f"the verdict of step {step} is kept beside that of step {newest}"
            assert verdict.generation == self.generation, f"{verdict} is of another generation than {self.generation}"
