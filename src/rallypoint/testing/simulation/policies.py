"""The words for policies on the simulation's command line, so that a failing seed's line replays it whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Sync

Mode = Sync | BoundedStaleness | Async | LocalSteps | AllReduce
WORDS = (
    "sync, quorum:K, ssp:S, async or fold:N, fragments:F, all-reduce, codec-state or "
    "codec-state:WORD, poisoned or poisoned:WORD, inner:H, inner-fragments:F, inner-fresh:H, delay:F, tables or "
    "tables:WORD, stopped or stopped:WORD, scaled, evaluating, decided, audited, audited:wrong, "
    "carrying or carrying:WORD, store or store:WORD, "
    "paused or paused:WORD, uneven or uneven:WORD, resumed or resumed:WORD"
)


@dataclass(frozen=True)
class _Settled:
    """Played in one mode only."""


@dataclass(frozen=True)
class _InMode:
    sync: Mode = field(default_factory=Sync)


class CodecStatePlay(_InMode):
    """A job in the mode `sync` whose codec has a state: contributions depend on it, and it moves with the replicas."""


@dataclass(frozen=True)
class InnerStatePlay:
    """A job of local steps whose contributions depend on the state of the replicas' own optimizers."""

    sync: LocalSteps


class Poisoned(_InMode):
    """A job in which one replica's gradient is not finite at one step, with nonfinite="stop"."""


class TablesPlay(_InMode):
    """A job in the mode `sync` some of whose shards are parts of tables: workers pull the rows that they need."""


class Stopped(_InMode):
    """A job in the mode `sync` whose script stops it at some step: it calls `run.stop`, or leaves its loop."""


class Scaled(_Settled):
    """A job with fp16, whose loss scale follows from the steps that servers skip."""


class Evaluating(_Settled):
    """A synchronous job whose script evaluates every few steps, with workers that stand by."""


class Deciding(_Settled):
    """A synchronous job whose evaluations decide: when it ends, with which rates, which snapshot is the best."""


class Audited(_Settled):
    """A synchronous job with audits."""


class AuditedWrong(_Settled):
    """The same; one worker computes something else from some step on."""


class Carrying(_InMode):
    """A job whose replicas carry a state from step to step."""


@dataclass(frozen=True)
class Keyed:
    """A key-value store (`job.store`), some of whose keys may be tables."""

    sync: Sync | BoundedStaleness | Async = field(default_factory=Sync)


_Alone = Scaled | Evaluating | Deciding | Audited | AuditedWrong
_ALONE: dict[str, type[_Alone]] = {
    "scaled": Scaled, "evaluating": Evaluating, "decided": Deciding, "audited": Audited, "audited:wrong": AuditedWrong,
}  # fmt: skip
_Played = _Alone | Mode | CodecStatePlay | InnerStatePlay | Poisoned | TablesPlay | Stopped | Carrying | Keyed


@dataclass(frozen=True)
class PausedPlay:
    """What `of` plays, and an operator pauses the job and lets it go on, amid more faults."""

    of: _Played = field(default_factory=Sync)


@dataclass(frozen=True)
class Uneven:
    """What `of` plays, on servers whose links are not alike and get faster and slower: shards move because of it."""

    of: _Played | PausedPlay = field(default_factory=Sync)


@dataclass(frozen=True)
class ResumedPlay:
    """What `of` plays; everybody is killed, and the job is resumed from a snapshot, in one of several ways."""

    of: _Played = field(default_factory=Sync)


Played = _Played | PausedPlay | Uneven | ResumedPlay


# What is played around something else, by word; of what: `of`'s type, or whether a mode may be it.
_AROUND: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "paused": (PausedPlay, lambda of: not isinstance(of, PausedPlay | Uneven | Keyed | ResumedPlay)),
    "resumed": (ResumedPlay, lambda of: not isinstance(of, PausedPlay | Uneven | ResumedPlay)),
    "uneven": (Uneven, lambda of: not isinstance(of, Uneven | ResumedPlay)),
    "codec-state": (CodecStatePlay, lambda of: isinstance(of, Sync | BoundedStaleness | Async | LocalSteps)),
    "poisoned": (Poisoned, lambda of: isinstance(of, Mode)),
    "stopped": (Stopped, lambda of: isinstance(of, Sync | AllReduce)),
    "carrying": (Carrying, lambda of: of in (Sync(), AllReduce())),
    "store": (Keyed, lambda of: isinstance(of, BoundedStaleness) or of in (Sync(), Async())),
    "tables": (TablesPlay, lambda of: isinstance(of, Sync | BoundedStaleness | Async)),
}


def parse_policy(text: str) -> Played:
    """One of the `WORDS` as what is to be played. ValueError for anything else."""
    name, colon, rest = text.partition(":")
    if text in _ALONE:
        return _ALONE[text]()
    if name in _AROUND:
        kind, may = _AROUND[name]
        of = parse_policy(rest) if colon else Sync()
        if may(of):
            return cast(Played, kind(of))
    elif rest.isdecimal() and int(rest) > 0:
        match name, int(rest):
            case "inner", steps:
                return InnerStatePlay(LocalSteps(steps))
            case "inner-fresh", steps:
                return InnerStatePlay(LocalSteps(steps, keep_inner=False))
            case "inner-fragments", fragments if fragments > 1:
                return InnerStatePlay(LocalSteps(fragments, fragments=fragments))
            case "delay", fragments:  # rounds of three steps, the first two of which need no version
                return InnerStatePlay(LocalSteps(3 * fragments, fragments=fragments, delay=2))
    return _parse_mode(text)


def _parse_mode(text: str) -> Mode:
    name, colon, number = text.partition(":")
    alone: dict[str, Mode] = {"sync": Sync(), "async": Async(), "all-reduce": AllReduce()}
    if not colon and name in alone:
        return alone[name]
    if number.isdecimal():
        match name, int(number):
            case "ssp", staleness:
                return BoundedStaleness(staleness)
            case "quorum", quorum if quorum > 0:
                return Sync(quorum)
            case "fold", fold if fold > 0:
                return Async(fold=fold)
            case "fragments", fragments if fragments > 1:
                return LocalSteps(fragments, fragments=fragments)
    raise ValueError(f"no policy {text!r}: use {WORDS}")


_MOST = 30  # no number in a word is so high
_NUMBERED = ("ssp", "quorum", "fold", "fragments", "inner", "inner-fresh", "inner-fragments", "delay")


def word_for(policy: Played) -> str | None:
    """The word that `parse_policy` turns into this policy; None for one with settings that have no word."""
    for around, (kind, _) in _AROUND.items():
        if isinstance(policy, kind):
            inner = getattr(policy, "of", None) or policy.sync
            of = word_for(inner)
            return None if of is None else around if inner == Sync() else f"{around}:{of}"
    words = ("sync", "async", "all-reduce", *_ALONE, *(f"{name}:{n}" for name in _NUMBERED for n in range(_MOST)))
    return next((word for word in words if _is(word, policy)), None)


def _is(word: str, policy: Played) -> bool:
    try:
        return parse_policy(word) == policy
    except ValueError:  # no such number
        return False


def replay_line(seed: int, policy: Played) -> str:
    """What to type to play this seed again."""
    word = word_for(policy)
    if word is None:
        return f"rallypoint.testing.simulation.run.simulate({seed}, {policy})"
    option = "" if word == "sync" else f"--policy {word} "
    return f"python -m rallypoint.testing.simulation {option}--seed {seed}"
