"""Which of the candidates to use, in a sentence: servers, or DDP or FSDP where servers would not pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from rallypoint.core.plan.candidates import Candidate
from rallypoint.core.plan.failures import NEVER

MARGIN = 1.03  # a lead that is smaller is not one: what nobody has to change is better
_MOST = 100  # of a ratio that is told
_CLOSE = 1.02  # among servers, fewer of them are preferred when they come so near to the best


class Verdict(msgspec.Struct, frozen=True):
    """`best` is to be used; `other` is the best of the other kind (None: there is none that fits); `why` says so."""

    best: Candidate
    other: Candidate | None
    why: str

    @property
    def ours(self) -> bool:
        return self.best.ours


def verdict_of(candidates: Sequence[Candidate]) -> Verdict:
    """Choose by price where prices are known, else by the seconds of a step, with what failures take of either."""
    priced = is_priced(candidates)
    key = _price if priced else _seconds
    ours, peers = (_best([one for one in candidates if one.fits and one.ours is kind], key) for kind in (True, False))
    if ours is None and peers is None:
        least = min(candidates, key=lambda one: one.memory.device)
        return Verdict(least, None, f"nothing fits: {least.name} needs least, {_gb(least.memory.device)} GB a device")
    if all(math.isinf(key(one)) for one in (ours, peers) if one is not None):
        least = min((one for one in (ours, peers) if one is not None), key=lambda one: one.step.seconds)
        return Verdict(least, None, f"no layout gets on: with these failures not even {called(least)} ends a step")
    if peers is None:
        assert ours is not None
        return Verdict(ours, None, f"use {called(ours)}: {_says(ours, priced)}; neither DDP nor FSDP fits")
    if ours is None:
        return Verdict(peers, None, f"use {called(peers)}: {_says(peers, priced)}; with servers it does not fit")
    ratio = key(peers) / key(ours)
    if ratio >= MARGIN:
        lead = "times as cheap as" if priced else "times as fast as"
        times = f"{ratio:.2f}" if ratio < _MOST else f"more than {_MOST}"
        beside = f"{times} {lead} {called(peers)} ({_says(peers, priced)})"
        return Verdict(ours, peers, f"use {called(ours)}: {_says(ours, priced)}, {beside}{_hint(ours)}")
    waits = peers.step.waited / peers.step.seconds
    reason = f": computing hides all but {waits:.0%} of its step" if waits < 0.1 else ""
    why = (
        f"use {called(peers)}, servers would not pay: {_says(peers, priced)}{reason}, and at best "
        f"{_says(ours, priced)} with {called(ours)}"
    )
    return Verdict(peers, ours, why)


def is_priced(candidates: Sequence[Candidate]) -> bool:
    """True if every layout has a price to choose by, though it may be infinite."""
    return all(candidate.price > 0 for candidate in candidates)


def _best(candidates: Sequence[Candidate], key: Callable[[Candidate], float]) -> Candidate | None:
    if not candidates:
        return None
    least = min(key(one) for one in candidates)
    return min((one for one in candidates if key(one) <= _CLOSE * least), key=lambda one: (one.servers, key(one)))


def _seconds(one: Candidate) -> float:
    return one.seconds


def _price(one: Candidate) -> float:
    return one.price


def called(one: Candidate) -> str:
    """A candidate with all that sets it apart: ``4 servers, replication 2, bf16``."""
    codec = "" if one.codec == "raw" else f", {one.codec}"
    return f"{one.name}{', replication 2' if one.replication > 1 else ''}{codec}"


def _says(one: Candidate, priced: bool) -> str:
    """What a step takes, or a thousand steps cost."""
    return f"{one.price:,.2f} for 1000 steps" if priced else f"{one.seconds:.3g} s a step"


def _hint(one: Candidate) -> str:
    return "" if one.period == NEVER else f"; a snapshot every {one.period:,.0f} s (--snapshot-seconds)"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g}"
