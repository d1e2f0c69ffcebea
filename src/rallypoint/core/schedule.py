"""Learning-rate schedules as data: they are part of the job record, so that all members use the same rates."""

from __future__ import annotations

import math

import msgspec


class Constant(msgspec.Struct, frozen=True, tag="constant", forbid_unknown_fields=True):
    """`peak`, after a linear rise over `warmup` steps."""

    peak: float
    warmup: int = 0


class Cosine(msgspec.Struct, frozen=True, tag="cosine", forbid_unknown_fields=True):
    """From `peak` down to `floor` on half a cosine over the job's steps (Loshchilov and Hutter, 2017)."""

    peak: float
    warmup: int = 0
    floor: float = 0.0


class Linear(msgspec.Struct, frozen=True, tag="linear", forbid_unknown_fields=True):
    """From `peak` down to `floor` on a straight line over the job's steps."""

    peak: float
    warmup: int = 0
    floor: float = 0.0


class StepDecay(msgspec.Struct, frozen=True, tag="step", forbid_unknown_fields=True):
    """`peak`, multiplied by `factor` after every `every` steps."""

    peak: float
    every: int
    factor: float = 0.1
    warmup: int = 0


Schedule = Constant | Cosine | Linear | StepDecay


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


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """The schedule with all of its rates, those of the warm-up too, multiplied by `factor`."""
    if factor == 1.0:
        return schedule
    peak = schedule.peak * factor
    if isinstance(schedule, Cosine | Linear):
        return msgspec.structs.replace(schedule, peak=peak, floor=schedule.floor * factor)
    return msgspec.structs.replace(schedule, peak=peak)


def rate_at(schedule: Schedule, step: int, steps: int) -> float:
    """The rate of update number `step` (from 0) in a job of `steps` updates."""
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
