"""The words for policies on the simulation's command line, so that a failing seed's line replays it whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Sync

Mode = Sync | BoundedStaleness | Async | LocalSteps | AllReduce
LATE = Async(scale_by_staleness=True, delay_compensation=0.5)
WORDS = (
    "sync, quorum:K, ssp:S, async or fold:N, late, fragments:F, all-reduce, inner:H, inner-fragments:F, inner-fresh:H, "
    "delay:F, scaled, evaluating, decided, audited, audited:wrong, recorded, streamed; alone or before :WORD "
    "codec-state, poisoned, tables, stopped, averaged, carrying, store, paused, malformed, uneven, resumed"
)


_ALONE: dict[str, Mode] = {"sync": Sync(), "async": Async(), "late": LATE, "all-reduce": AllReduce()}


@dataclass(frozen=True)
class Play:
    """What `of` plays, and what `word` stands for in it, or happens to it: `simulation.plan` has what is special.

    The word `inner` is for local steps whose contributions depend on the state of the replicas' own optimizers.
    """

    word: str
    of: Mode | Play = field(default_factory=Sync)


Played = Mode | Play


def _except(*words: str) -> Callable[[Played], bool]:
    return lambda of: getattr(of, "word", "") not in words


_AROUND = ("paused", "malformed", "resumed", "uneven")
# By word: what else than `sync` it may be played in, or around.
_PLAYED: dict[str, Callable[[Played], bool]] = {
    **dict.fromkeys(
        ("scaled", "evaluating", "decided", "audited", "audited:wrong", "recorded", "streamed"), lambda of: False
    ),
    **dict.fromkeys(("codec-state", "averaged"), lambda of: isinstance(of, Mode) and not isinstance(of, AllReduce)),
    "poisoned": lambda of: isinstance(of, Mode),
    "stopped": lambda of: isinstance(of, Sync | AllReduce),
    "carrying": lambda of: of in (Sync(), AllReduce()),
    "store": lambda of: isinstance(of, BoundedStaleness) or of in (Sync(), Async()),
    "tables": lambda of: isinstance(of, Sync | BoundedStaleness | Async) and of != LATE,
    "paused": _except(*_AROUND, "store"), "malformed": _except(*_AROUND, "store", "codec-state", "inner"),
    "resumed": _except(*_AROUND), "uneven": _except("malformed", "resumed", "uneven"),
}  # fmt: skip


def parse_policy(text: str) -> Played:
    """One of the `WORDS` as what is to be played. ValueError for anything else."""
    name, _, rest = text.partition(":")
    if text in _ALONE:
        return _ALONE[text]
    if text in _PLAYED:
        return Play(text)
    if name in _PLAYED and _PLAYED[name](of := parse_policy(rest)):
        return Play(name, of)
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
                return Play("inner", LocalSteps(steps))
            case "inner-fresh", steps:
                return Play("inner", LocalSteps(steps, keep_inner=False))
            case "inner-fragments", fragments if fragments > 1:
                return Play("inner", LocalSteps(fragments, fragments=fragments))
            case "delay", fragments:  # rounds of three steps, the first two of which need no version
                return Play("inner", LocalSteps(3 * fragments, fragments=fragments, delay=2))
    raise ValueError(f"no policy {text!r}: use {WORDS}")


_MOST = 30  # no number in a word is so high
_NUMBERED = ("ssp", "quorum", "fold", "fragments", "inner", "inner-fresh", "inner-fragments", "delay")


def word_for(policy: Played) -> str | None:
    """The word that `parse_policy` turns into this policy; None for one with settings that have no word."""
    if isinstance(policy, Play) and policy.word != "inner":
        of = word_for(policy.of)
        return None if of is None else policy.word if policy.of == Sync() else f"{policy.word}:{of}"
    for word in (*_ALONE, *(f"{name}:{n}" for name in _NUMBERED for n in range(_MOST))):
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
