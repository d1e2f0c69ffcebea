"""The sentence about what has become of the contributions."""

from __future__ import annotations

from rallypoint.net.messages import Accounted


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
