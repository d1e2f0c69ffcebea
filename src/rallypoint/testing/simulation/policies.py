"""The words for policies on the simulation's command line, so that a failing seed's line replays it whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Sync

Mode = Sync | BoundedStaleness | Async | LocalSteps | AllReduce
LATE = Async(scale_by_staleness=True, delay_compensation=0.5)
WORDS = (
    "sync, quorum:K, ssp:S, async or fold:N, late, fragments:F, all-reduce, inner:H, inner-fragments:F, inner-fresh:H, "
    "delay:F, scaled, evaluating, decided, audited, audited:wrong, recorded, streamed; alone or before :WORD "
    "codec-state, poisoned, tables, stopped, averaged, carrying, store, paused, malformed, uneven, resumed"
)


@dataclass(frozen=True)
class Play:
    """What `word` stands for, in the mode `sync`. `simulation.plan` has what is special about it."""

    word: str
    sync: Mode = field(default_factory=Sync)


@dataclass(frozen=True)
class InnerStatePlay:
    """A job of local steps whose contributions depend on the state of the replicas' own optimizers."""

    sync: LocalSteps


@dataclass(frozen=True)
class Around:
    """What `of` plays, and what `word` stands for happens to it."""

    word: str
    of: Mode | Play | InnerStatePlay | Around = field(default_factory=Sync)


Played = Mode | Play | InnerStatePlay | Around

CodecStatePlay = partial(Play, "codec-state")  # contributions depend on the codec's state, which moves with replicas
Poisoned = partial(Play, "poisoned")  # one replica's gradient is not finite at one step, with nonfinite="stop"
TablesPlay = partial(Play, "tables")  # some shards are parts of tables: workers pull the rows that they need
Stopped = partial(Play, "stopped")  # the script stops the job at some step: it calls `run.stop`, or leaves its loop
Carrying = partial(Play, "carrying")  # replicas carry a state from step to step
Keyed = partial(Play, "store")  # a key-value store (`job.store`), some of whose keys may be tables
Scaled = partial(Play, "scaled")  # with fp16, whose loss scale follows from the steps that servers skip
Evaluating = partial(Play, "evaluating")  # the script evaluates every few steps, with workers that stand by
Deciding = partial(Play, "decided")  # evaluations decide: when the job ends, with which rates, which snapshot is best
Audited = partial(Play, "audited")
AuditedWrong = partial(Play, "audited:wrong")  # one worker computes something else from some step on
PausedPlay = partial(Around, "paused")  # an operator pauses the job and lets it go on, amid more faults
Uneven = partial(Around, "uneven")  # servers' links are not alike, and get faster and slower: shards move because of it
ResumedPlay = partial(Around, "resumed")  # everybody is killed, and the job is resumed from a snapshot in some way


# By word: whether it is played in a mode, or around something else.
_IN: dict[str, Callable[[Played], bool]] = {
    **dict.fromkeys(
        ("scaled", "evaluating", "decided", "audited", "audited:wrong", "recorded", "streamed"), lambda of: False
    ),
    **dict.fromkeys(("codec-state", "averaged"), lambda of: not isinstance(of, AllReduce)),
    "poisoned": lambda of: isinstance(of, Mode),
    "stopped": lambda of: isinstance(of, Sync | AllReduce),
    "carrying": lambda of: of in (Sync(), AllReduce()),
    "store": lambda of: isinstance(of, BoundedStaleness) or of in (Sync(), Async()),
    "tables": lambda of: isinstance(of, Sync | BoundedStaleness | Async) and of != LATE,
}  # fmt: skip
_AROUND: dict[str, Callable[[Played], bool]] = {
    "paused": lambda of: not isinstance(of, Around) and getattr(of, "word", "") != "store",
    "malformed": lambda of: isinstance(of, Mode | Play) and getattr(of, "word", "") not in ("store", "codec-state"),
    "resumed": lambda of: not isinstance(of, Around),
    "uneven": lambda of: not isinstance(of, Around) or of.word == "paused",
}  # fmt: skip


def parse_policy(text: str) -> Played:
    """One of the `WORDS` as what is to be played. ValueError for anything else."""
    name, colon, rest = text.partition(":")
    alone: dict[str, Mode] = {"sync": Sync(), "async": Async(), "late": LATE, "all-reduce": AllReduce()}
    if text in alone:
        return alone[text]
    if text in _IN:
        return Play(text)
    if name in _IN and isinstance(of := parse_policy(rest), Mode) and _IN[name](of):
        return Play(name, of)
    if name in _AROUND and _AROUND[name](of := parse_policy(rest) if colon else Sync()):
        return Around(name, of)
    if rest.isdecimal() and (name == "ssp" or int(rest) > 0):
        match name, int(rest):
            case "ssp", staleness:
                return BoundedStaleness(staleness)
            case "quorum", quorum:
                return Sync(quorum)
            case "fold", fold:
                return Async(fold=fold)
            case "fragments", fragments if fragments > 1:
                return LocalSteps(fragments, fragments=fragments)
            case "inner", steps:
                return InnerStatePlay(LocalSteps(steps))
            case "inner-fresh", steps:
                return InnerStatePlay(LocalSteps(steps, keep_inner=False))
            case "inner-fragments", fragments if fragments > 1:
                return InnerStatePlay(LocalSteps(fragments, fragments=fragments))
            case "delay", fragments:  # rounds of three steps, the first two of which need no version
                return InnerStatePlay(LocalSteps(3 * fragments, fragments=fragments, delay=2))
    raise ValueError(f"no policy {text!r}: use {WORDS}")


_MOST = 30  # no number in a word is so high
_NUMBERED = ("ssp", "quorum", "fold", "fragments", "inner", "inner-fresh", "inner-fragments", "delay")


def word_for(policy: Played) -> str | None:
    """The word that `parse_policy` turns into this policy; None for one with settings that have no word."""
    if isinstance(policy, Play | Around):
        inner = policy.sync if isinstance(policy, Play) else policy.of
        of = word_for(inner)
        return None if of is None else policy.word if inner == Sync() else f"{policy.word}:{of}"
    for word in ("sync", "async", "late", "all-reduce", *(f"{name}:{n}" for name in _NUMBERED for n in range(_MOST))):
        with suppress(ValueError):  # no such number
            if parse_policy(word) == policy:
                return word
    return None


def replay_line(seed: int, policy: Played) -> str:
    """What to type to play this seed again."""
    word = word_for(policy)
    if word is None:
        return f"rallypoint.testing.simulation.run.simulate({seed}, {policy})"
    option = "" if word == "sync" else f"--policy {word} "
    return f"python -m rallypoint.testing.simulation {option}--seed {seed}"
