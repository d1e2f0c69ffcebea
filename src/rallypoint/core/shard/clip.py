"""One decision per step that all servers compute alike: the clip factor, or not to apply a step that is not finite.

Each server measures the norms of its own shards and sends them to the other servers. When a server knows the norms of
all shards of the layout, it computes the decision. All servers use the same floats in the same order, so they get the
same number. A norm is named by (step, shard), and repeats are harmless (I2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from rallypoint.core.layout import MOST_SHARD_BYTES, SHARD_BYTES
from rallypoint.core.view import ViewNumber

_FIRST = ViewNumber()
_Replicas = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...], msgspec.Meta(max_length=1 << 16)]
_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Measure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a server found in the finished sum of one shard at a step.

    Attributes:
        norms: the 2-norms of the mean gradient's pieces of 1 MiB, so that a step's norm does not depend on the size of
            shards of so many bytes or a multiple; (): no factor depends on it.
        not_finite: the replicas whose loss was not finite.
        gradients: the replicas whose contribution to the shard was not finite, as far as they are known.
        at: the first word of the shard that is not finite; -1: all are finite.
        loss_scale: what the step's losses were multiplied by, if this shard has the loss scale; else 0.
    """

    shard: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    norms: Annotated[tuple[float, ...], msgspec.Meta(max_length=MOST_SHARD_BYTES // SHARD_BYTES)] = ()
    not_finite: _Replicas = ()
    gradients: _Replicas = ()
    at: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)] = -1
    loss_scale: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class Tell(msgspec.Struct, frozen=True):
    """Send these measures of `step` to every other server."""

    step: int
    measures: tuple[Measure, ...]


class StepVerdict(msgspec.Struct, frozen=True):
    """The decision on `step` of `generation`: all servers scale the gradient by `scale`, or skip the step (None).

    `norm` is that of the mean gradient, before clipping; `loss_scale` what losses were multiplied by. With `stops`
    nobody applies the step, and the job ends. `not_finite` and `gradients` are as in `Measure`; `at` is the first
    (shard, word) that is not finite, None if there is none.
    """

    step: int
    norm: float
    scale: float | None
    not_finite: tuple[int, ...] = ()
    generation: ViewNumber = _FIRST
    gradients: tuple[int, ...] = ()
    at: tuple[int, int] | None = None
    stops: bool = False
    loss_scale: float = 1.0

    @property
    def whole(self) -> bool:
        """Is everything finite, as far as the servers know?"""
        return not self.not_finite and not self.gradients and self.at is None and math.isfinite(self.norm)


def clip_scale(norm: float, clip: float | None) -> float:
    """The factor of global-norm clipping, as torch.nn.utils.clip_grad_norm_ computes it (Pascanu et al., 2013)."""
    if clip is None:
        return 1.0
    scale = clip / (norm + _EPSILON)
    return 1.0 if scale > 1.0 else scale  # a NaN norm gives NaN, as in torch


def total_norm(norms: Iterable[float]) -> float:
    """The 2-norm of a vector from the 2-norms of its pieces. Computed in float64 and correctly rounded."""
    return math.sqrt(math.fsum([norm * norm for norm in norms]))


@dataclass(frozen=True, slots=True)
class Rule:
    """How servers decide: the limit of the norm (None: no clipping), and what is done with a step that is not finite.

    Without `skips` and `stops` it is applied like any other. With `scaled`, losses are multiplied by a loss scale: the
    gradient is divided by it, and one that is not finite is skipped, because a lower scale may help. Where the scale is
    at most 1 already, or a loss is not finite, it cannot help; then `stops` counts.
    """

    clip: float | None = None
    skips: bool = False
    stops: bool = False
    scaled: bool = False
    examines: bool = field(init=False)  # do servers look at each finished sum before they apply it?

    def __post_init__(self) -> None:
        object.__setattr__(self, "examines", self.skips or self.stops or self.scaled)  # asked for each shard and step

    def verdict(self, step: int, measures: Sequence[Measure], generation: ViewNumber) -> StepVerdict:
        """The decision on a step, from the measures in shard order."""
        loss_scale = (max([measure.loss_scale for measure in measures]) if self.scaled else 0.0) or 1.0
        norm = total_norm([norm for measure in measures for norm in measure.norms]) / loss_scale
        losses = _union([measure.not_finite for measure in measures])
        gradients = _union([measure.gradients for measure in measures])
        bad = [(measure.shard, measure.at) for measure in measures if measure.at >= 0]
        at = bad[0] if bad else None
        factor = clip_scale(norm, self.clip) / loss_scale
        found = StepVerdict(step, norm, factor, losses, generation, gradients, at, loss_scale=loss_scale)
        if found.whole or not self.examines:
            return found
        a_lower_scale_may_help = self.scaled and loss_scale > 1.0 and not losses
        return msgspec.structs.replace(found, scale=None, stops=self.stops and not a_lower_scale_may_help)


def phrase(losses: Sequence[int], gradients: Sequence[int], parameter: str) -> str:
    """What is not finite, for a sentence: whose loss, or whose gradient and in which parameter first."""
    if losses:
        return f"the loss of {_listed(losses)} is not finite"
    whose = f" of {_listed(gradients)}" if gradients else ""
    return f"the gradient{whose} is not finite" + (f", first in {parameter}" if parameter else "")


def _listed(replicas: Sequence[int]) -> str:
    """Return ``replica 3``, or ``replicas 0, 3 and 5``."""
    *others, last = map(str, replicas)
    return f"replicas {', '.join(others)} and {last}" if others else f"replica {last}"


def _union(replicas: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*replicas)))


_REMEMBERED = 2  # steps whose decision is kept, for a backup promoted in the middle of a step


@dataclass(slots=True)
class ClipMachine:
    """Takes measures; returns `Tell` and `StepVerdict`. It lives for one `generation`; a roll-back replaces it.

    `shards` are all shards of the layout that wait for it; `own` those whose primary is this server, which changes with
    the view. Steps are the job's.

    A server that died may have sent its measures to only some of the others. So every server sends all that it knows
    again (`retell`) whenever the servers change.
    """

    shards: Sequence[int]
    own: frozenset[int]
    rule: Rule
    generation: ViewNumber = _FIRST
    _known: dict[int, dict[int, Measure]] = field(default_factory=dict)
    _verdicts: dict[int, StepVerdict] = field(default_factory=dict)
    _told: dict[int, frozenset[int]] = field(default_factory=dict)  # step -> the shards sent
    _all: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._all = frozenset(self.shards)

    def measured(self, step: int, measure: Measure) -> list[Tell | StepVerdict]:
        """One of this server's shards has finished its sum. Sends the measures once all of its shards have."""
        if step in self._verdicts:
            return [*self._tell(step, self._known[step]), self._verdicts[step]]  # we became primary after it
        known = self._learn(step, [measure])
        return [*self._tell(step, known), *self._decide(step, known)]

    def told(self, step: int, measures: Iterable[Measure]) -> list[Tell | StepVerdict]:
        """Another server sent its measures."""
        if step in self._verdicts or step <= max(self._verdicts, default=_REMEMBERED - 1) - _REMEMBERED:
            return []
        known = self._learn(step, measures)
        return [*self._tell(step, known), *self._decide(step, known)]

    def verdict(self, step: int) -> StepVerdict | None:
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
        own = self.own
        if not own or not own <= known.keys() or self._told.get(step) == own:
            return []
        self._told[step] = own
        return [Tell(step, tuple(known[shard] for shard in sorted(own)))]

    def _learn(self, step: int, measures: Iterable[Measure]) -> dict[int, Measure]:
        known = self._known.setdefault(step, {})
        for measure in measures:
            if measure.shard in self._all:
                known.setdefault(measure.shard, measure)
        return known

    def _decide(self, step: int, known: dict[int, Measure]) -> list[Tell | StepVerdict]:
        if len(known) < len(self._all):
            return []
        verdict = self.rule.verdict(step, [known[shard] for shard in sorted(known)], self.generation)
        self._verdicts[step] = verdict
        for old in [s for s in self._known.keys() | self._verdicts.keys() if s <= step - _REMEMBERED]:
            self._known.pop(old, None)
            self._verdicts.pop(old, None)
            self._told.pop(old, None)
        return [verdict]

    def validate(self) -> None:
        """Raise AssertionError, with a sentence, if the machine is in a state that it can never reach."""
        assert self.own <= self._all, f"shards {sorted(self.own - self._all)} are measured, and do not count"
        newest = max(self._verdicts, default=-1)
        for step, known in self._known.items():
            assert known.keys() <= self._all, f"step {step}: measures of shards that do not count: {sorted(known)}"
            decided = step not in self._verdicts or len(known) == len(self._all)
            assert decided, f"step {step} was decided with {len(known)} of {len(self._all)} measures"
        for step, verdict in self._verdicts.items():
            assert step > newest - _REMEMBERED, f"the verdict of step {step} is kept beside that of step {newest}"
            assert verdict.generation == self.generation, f"{verdict} is of another generation than {self.generation}"
