"""Sentences about who has joined and left."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.net.messages import Members


def changes(before: Members, now: Members, replicas: int | None = None) -> list[str]:
    """Return sentences that say who has joined and left between two views, and who computes now.

    `replicas`: the job's, if they are known. A view names more workers than that while replicas move by speed: those
    that had one and those that get one.
    """
    said = []
    news = _news((*before.workers, *before.standby), (*now.workers, *now.standby))
    begins = not before.workers and (not news or not now.workers)  # or the first weights are not safe yet
    if (news and not begins) or (set(before.workers) != set(now.workers) and not begins):
        idle = f", {_listed(now.standby)} stand{'s' * (len(now.standby) == 1)} by" if now.standby else ""
        if replicas is not None and len(now.workers) > replicas:
            one = f"{replicas} of {_listed(now.workers)} compute{'s' * (replicas == 1)}"
            who = f"{one}: replicas are assigned by speed{idle}"
        else:
            who = f"{_listed(now.workers)} compute{'s' * (len(now.workers) < 2)}{idle}"
        said.append(f"{news}: {who}" if news else who)
    if news := _news(before.servers, now.servers):
        said.append(f"{news}: the parameters are on {_listed(now.servers)}")
    if news := _news(before.aggregators, now.aggregators):
        said.append(f"{news}: {len(now.through)} workers have an aggregator")
    return said


def _news(before: Sequence[str], now: Sequence[str]) -> str:
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    parts = [f"without {_listed(gone)}"] if gone else []
    return " and ".join([*parts, *([f"with {_listed(new)}"] if new else [])])


def _listed(names: Sequence[str]) -> str:
    """Return ``worker2, worker10``: ordered by their numbers."""
    return ", ".join(sorted(names, key=lambda name: (len(name), name))) or "nobody"
