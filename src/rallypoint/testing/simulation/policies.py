"""The words for policies on the simulation's command line, so that a failing seed's line replays it whole."""

from __future__ import annotations

from dataclasses import dataclass, field

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
class CodecStatePlay:
    """A job in the mode `sync` whose codec has a state: contributions depend on it, and it moves with the replicas."""

    sync: Mode = field(default_factory=Sync)


@dataclass(frozen=True)
class InnerStatePlay:
    """A job of local steps whose contributions depend on the state of the replicas' own optimizers."""

    sync: LocalSteps


@dataclass(frozen=True)
class Poisoned:
    """A job in which one replica's gradient is not finite at one step, with nonfinite="stop"."""

    sync: Mode = field(default_factory=Sync)


@dataclass(frozen=True)
class TablesPlay:
    """A job in the mode `sync` some of whose shards are parts of tables: workers pull the rows that they need."""

    sync: Mode = field(default_factory=Sync)


@dataclass(frozen=True)
class Stopped:
    """A job in the mode `sync` whose script stops it at some step: it calls `run.stop`, or leaves its loop."""

    sync: Mode = field(default_factory=Sync)


@dataclass(frozen=True)
class Scaled:
    """A job with fp16, whose loss scale follows from the steps that servers skip."""


@dataclass(frozen=True)
class Evaluating:
    """A synchronous job whose script evaluates every few steps, with workers that stand by."""


@dataclass(frozen=True)
class Deciding:
    """A synchronous job whose evaluations decide: when it ends, with which rates, which snapshot is the best."""


@dataclass(frozen=True)
class Audited:
    """A synchronous job with audits."""


@dataclass(frozen=True)
class AuditedWrong:
    """The same; one worker computes something else from some step on."""


@dataclass(frozen=True)
class Carrying:
    """A job whose replicas carry a state from step to step."""

    sync: Mode = field(default_factory=Sync)


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


def parse_policy(text: str) -> Played:
    """One of the `WORDS` as what is to be played. ValueError for anything else."""
    name, colon, number = text.partition(":")
    if text in _ALONE:
        return _ALONE[text]()
    if name == "paused":
        of = parse_policy(number) if colon else Sync()
        if not isinstance(of, PausedPlay | Uneven | Keyed | ResumedPlay):
            return PausedPlay(of)
    if name == "resumed":
        of = parse_policy(number) if colon else Sync()
        if not isinstance(of, PausedPlay | Uneven | ResumedPlay):
            return ResumedPlay(of)
    if name == "uneven":
        inside = parse_policy(number) if colon else Sync()
        if not isinstance(inside, Uneven | ResumedPlay):
            return Uneven(inside)
    if name == "codec-state":
        sync = parse_policy(number) if colon else Sync()
        if isinstance(sync, Sync | BoundedStaleness | Async | LocalSteps):
            return CodecStatePlay(sync)
    if name == "poisoned":
        return Poisoned(_parse_mode(number) if colon else Sync())
    if name == "stopped":
        sync = _parse_mode(number) if colon else Sync()
        if isinstance(sync, Sync | AllReduce):
            return Stopped(sync)
    if name == "carrying":
        sync = _parse_mode(number) if colon else Sync()
        if sync in (Sync(), AllReduce()):
            return Carrying(sync)
    if name == "store":
        sync = _parse_mode(number) if colon else Sync()
        if isinstance(sync, BoundedStaleness) or sync in (Sync(), Async()):
            return Keyed(sync)
    if name == "tables":
        sync = parse_policy(number) if colon else Sync()
        if isinstance(sync, Sync | BoundedStaleness | Async):
            return TablesPlay(sync)
    if number.isdecimal() and int(number) > 0:
        match name, int(number):
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


def word_for(policy: Played) -> str | None:
    """The word that `parse_policy` turns into this policy; None for one with settings that have no word."""
    match policy:
        case Scaled() | Evaluating() | Deciding() | Audited() | AuditedWrong():
            return next(word for word, kind in _ALONE.items() if isinstance(policy, kind))
        case PausedPlay(of=played):
            of = word_for(played)
            return None if of is None else "paused" if played == Sync() else f"paused:{of}"
        case ResumedPlay(of=played):
            of = word_for(played)
            return None if of is None else "resumed" if played == Sync() else f"resumed:{of}"
        case Uneven(of=played):
            of = word_for(played)
            return None if of is None else "uneven" if played == Sync() else f"uneven:{of}"
        case CodecStatePlay(sync=sync):
            of = word_for(sync)
            return None if of is None else "codec-state" if sync == Sync() else f"codec-state:{of}"
        case Poisoned(sync=sync):
            of = word_for(sync)
            return None if of is None else "poisoned" if sync == Sync() else f"poisoned:{of}"
        case Stopped(sync=sync):
            of = word_for(sync)
            return None if of is None else "stopped" if sync == Sync() else f"stopped:{of}"
        case Carrying(sync=sync):
            of = word_for(sync)
            return None if of is None else "carrying" if sync == Sync() else f"carrying:{of}"
        case Keyed(sync=sync):
            of = word_for(sync)
            return None if of is None else "store" if sync == Sync() else f"store:{of}"
        case TablesPlay(sync=sync):
            of = word_for(sync)
            return None if of is None else "tables" if sync == Sync() else f"tables:{of}"
        case InnerStatePlay(sync=LocalSteps(fragments=fragments, delay=delay)) if delay:
            word = f"delay:{fragments}"
        case InnerStatePlay(sync=LocalSteps(steps=steps, fragments=fragments, keep_inner=keep)):
            own = f"inner:{steps}" if keep else f"inner-fresh:{steps}"
            word = own if fragments == 1 else f"inner-fragments:{fragments}"
        case BoundedStaleness(staleness=staleness):
            word = f"ssp:{staleness}"
        case Sync(quorum=None):
            word = "sync"
        case Sync(quorum=quorum):
            word = f"quorum:{quorum}"
        case Async(fold=1):
            word = "async"
        case Async(fold=fold):
            word = f"fold:{fold}"
        case AllReduce():
            word = "all-reduce"
        case LocalSteps(fragments=1):
            return None
        case LocalSteps(fragments=fragments):
            word = f"fragments:{fragments}"
    return word if parse_policy(word) == policy else None


def replay_line(seed: int, policy: Played) -> str:
    """What to type to play this seed again."""
    word = word_for(policy)
    if word is None:
        return f"rallypoint.testing.simulation.run.simulate({seed}, {policy})"
    option = "" if word == "sync" else f"--policy {word} "
    return f"python -m rallypoint.testing.simulation {option}--seed {seed}"
