"""Learning-rate schedules as data: they are part of the job record, so that all members use the same rates."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import msgspec

from rallypoint.core.typed import CountFromOne, CountFromZero, FromZero
from rallypoint.errors import ConfigError

MOST_RATES = 1 << 16  # of a table: under 1 MiB in the job record, which every member gets


class Constant(msgspec.Struct, frozen=True, tag="constant", forbid_unknown_fields=True):
    """`peak`, after a linear rise over `warmup` steps."""

    peak: FromZero
    warmup: CountFromZero = 0


class Cosine(msgspec.Struct, frozen=True, tag="cosine", forbid_unknown_fields=True):
    """From `peak` down to `floor` on half a cosine over the job's steps (Loshchilov and Hutter, 2017)."""

    peak: FromZero
    warmup: CountFromZero = 0
    floor: FromZero = 0.0


class Linear(msgspec.Struct, frozen=True, tag="linear", forbid_unknown_fields=True):
    """From `peak` down to `floor` on a straight line over the job's steps."""

    peak: FromZero
    warmup: CountFromZero = 0
    floor: FromZero = 0.0


class StepDecay(msgspec.Struct, frozen=True, tag="step", forbid_unknown_fields=True):
    """`peak`, multiplied by `factor` after every `every` steps."""

    peak: FromZero
    every: CountFromOne
    factor: float = 0.1
    warmup: CountFromZero = 0


class Table(msgspec.Struct, frozen=True, tag="table", forbid_unknown_fields=True):
    """Rates that a function gave: ``rates[i]`` from step ``starts[i]`` on, to the next start; the last one to the end.
    """

    starts: tuple[int, ...]
    rates: tuple[float, ...]

    @property
    def problem(self) -> str:
        """Why this is no table, for a sentence; "" if it is one."""
        if not 1 <= len(self.starts) == len(self.rates) <= MOST_RATES:
            return f"it has {len(self.starts)} starts and {len(self.rates)} rates: 1 to {MOST_RATES} of each are needed"
        if self.starts[0] != 0 or any(b <= a for a, b in pairwise(self.starts)):
            return "its starts must rise from 0"
        if not all(math.isfinite(rate) and rate >= 0 for rate in self.rates):
            return "its rates must be finite, of at least 0"
        return ""


Schedule = Constant | Cosine | Linear | StepDecay | Table


def constant(peak: float, *, warmup: int = 0) -> Constant:
    """The same rate throughout, after `warmup` steps of linear rise."""
    return Constant(peak, warmup)


def cosine(peak: float, *, warmup: int = 0, floor: float = 0.0) -> Cosine:
    """Half a cosine from `peak` to `floor` over the job's steps, after `warmup` steps of linear rise."""
    return Cosine(peak, warmup, floor)


def linear(peak: float, *, warmup: int = 0, floor: float = 0.0) -> Linear:
    """A straight line from `peak` to `floor` over the job's steps, after `warmup` steps of linear rise."""
    return Linear(peak, warmup, floor)


def step_decay(peak: float, *, every: int, factor: float = 0.1, warmup: int = 0) -> StepDecay:
    """`peak`, times `factor` after every `every` steps, after `warmup` steps of linear rise."""
    return StepDecay(peak, every, factor, warmup)


def tabulated(rate_of: Callable[[int], float], *, steps: int) -> Table:
    """The rates that any function gives for steps 0 to `steps` - 1, as data; later steps have the last one.

    The function is called here, on each worker, and its values are part of the job. It must give the same ones on all
    of them. Example: ``rp.tabulated(lambda step: 1e-3 * 0.999**step, steps=20_000)``.

    Raises ConfigError for a rate that is negative or not finite, and where the rate changes more than 65536 times.
    """
    if steps < 1:
        raise ConfigError(f"rp.tabulated needs at least one step, and steps is {steps}: give the job's steps")
    starts, rates = list[int](), list[float]()
    for step in range(steps):
        rate = float(rate_of(step))
        if not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"rp.tabulated: the rate of step {step} is {rate}: it must be finite, of at least 0")
        if not rates or rate != rates[-1]:
            starts.append(step)
            rates.append(rate)
        if len(rates) > MOST_RATES:
            raise ConfigError(
                f"rp.tabulated: the rate changes more than {MOST_RATES} times by step {step}, and every member of the "
                "job gets them all: let it change at every tenth step, such as rate_of(step // 10 * 10)"
            )
    return Table(tuple(starts), tuple(rates))


def scaled_lr(lr: float, batch: int, base: int, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """Return the rate for a global batch of `batch` samples (replicas * batch) where `lr` is right for `base` samples.

    "linear" multiplies it by batch / base, as for SGD with momentum (Goyal et al., 2017, "Accurate, Large Minibatch
    SGD: Training ImageNet in 1 Hour"), "sqrt" by its root, as for Adam (Malladi et al., 2022, "On the SDEs and Scaling
    Rules for Adaptive Gradient Algorithms"). Raises ConfigError for a batch below 1 and for another rule.
    """
    if batch < 1 or base < 1:
        raise ConfigError(f"rp.scaled_lr: batches of {batch} and {base} samples: each is at least 1")
    if rule not in ("linear", "sqrt"):
        raise ConfigError(f'rp.scaled_lr: rule is {rule!r}: it is "linear" or "sqrt"')
    return lr * (batch / base if rule == "linear" else math.sqrt(batch / base))


def peak_of(schedule: Schedule) -> float:
    """Return the rate that the others are a share of, the base rate of torch's schedulers; of a table its highest."""
    return max(schedule.rates) if isinstance(schedule, Table) else schedule.peak


def rate_at(schedule: Schedule, step: int, steps: int) -> float:
    """The rate of update number `step` (from 0) in a job of `steps` updates."""
    if isinstance(schedule, Table):
        return schedule.rates[bisect_right(schedule.starts, step) - 1]
    if step < schedule.warmup:
        return schedule.peak * (step + 1) / schedule.warmup
    match schedule:
        case Constant(peak=peak):
            return peak
        case StepDecay(peak=peak, every=every, factor=factor):
            return peak * factor ** (step // every)
        case Cosine(peak=peak, floor=floor):
            return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * _progress(schedule.warmup, step, steps)))
        case Linear(peak=peak, floor=floor):
            return peak + (floor - peak) * _progress(schedule.warmup, step, steps)


def _progress(warmup: int, step: int, steps: int) -> float:
    return min(1.0, (step - warmup) / max(1, steps - warmup))
