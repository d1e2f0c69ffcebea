"""Phrases of the console: members that come and go, sizes, counts, the account of contributions."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from rallypoint.net.messages import Accounted, Members


def changes(before: Members, now: Members, replicas: int | None = None) -> list[str]:
    """Return sentences that say who has joined and left between two views, and who computes now.

    `replicas`: the job's, if they are known. A view names more workers than that while replicas move by speed: those
    that had one and those that get one.
    """
    said = []
    news = _news((*before.workers, *before.standby), (*now.workers, *now.standby))
    begins = not before.workers and (not news or not now.workers)  # or the first weights are not safe yet
    if (news and not begins) or (set(before.workers) != set(now.workers) and not begins):
        idle = f", {listed(now.standby)} stand{'s' * (len(now.standby) == 1)} by" if now.standby else ""
        if replicas is not None and len(now.workers) > replicas:
            one = f"{replicas} of {listed(now.workers)} compute{'s' * (replicas == 1)}"
            who = f"{one}: replicas are assigned by speed{idle}"
        else:
            who = f"{listed(now.workers)} compute{'s' * (len(now.workers) < 2)}{idle}"
        said.append(f"{news}: {who}" if news else who)
    if news := _news(before.servers, now.servers):
        said.append(f"{news}: the parameters are on {listed(now.servers)}")
    if news := _news(before.aggregators, now.aggregators):
        said.append(f"{news}: {len(now.through)} workers have an aggregator")
    return said


def _news(before: Sequence[str], now: Sequence[str]) -> str:
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    parts = [f"without {listed(gone)}"] if gone else []
    return " and ".join([*parts, *([f"with {listed(new)}"] if new else [])])


def listed(names: Sequence[str]) -> str:
    """Return ``worker2, worker10``: ordered by their numbers."""
    return ", ".join(sorted(names, key=lambda name: (len(name), name))) or "nobody"


def count_of(number: int, what: str) -> str:
    """Return ``3 steps``."""
    return f"{number} {what}{'s' * (number != 1)}"


def millions(number: int) -> str:
    """Return ``0.84 M``; of a small number all digits."""
    return f"{number:,}" if number < 100_000 else f"{number / 1e6:,.2f} M"


def size_of(nbytes: int) -> str:
    """Return ``3.4 MB``."""
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


def figures_of(values: dict[str, float]) -> str:
    """Return ``loss 0.1234  accuracy 0.9``, for rich."""
    return escape("  ".join(f"{name} {f'{value:#.4g}'.rstrip('.')}" for name, value in values.items()))


def account(accounted: Accounted) -> str:
    """Return a line that says what happened to the contributions."""
    said = [f"{accounted.applied:,} contributions applied"]
    said += [f"{accounted.folded:,} folded into another's update"] if accounted.folded else []
    said += [f"{accounted.dropped:,} dropped"] if accounted.dropped else []
    if late := sorted(accounted.staleness.items()):
        said.append(f"staleness p50 {_quantile(late, 0.5)}, p99 {_quantile(late, 0.99)}, at most {late[-1][0]} updates")
    return ", ".join(said)


def _quantile(counts: list[tuple[int, int]], share: float) -> int:
    total, seen = sum(count for _, count in counts), 0
    for value, count in counts:
        seen += count
        if seen >= share * total:
            return value
    return 0
