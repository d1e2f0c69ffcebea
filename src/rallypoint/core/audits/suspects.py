"""The servers that audits have found something about, for as long as this coordinator lives."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Suspects:
    """Attributes:
    changed: servers that have found a change in their own memory.
    differed: server -> the other server with which it was in its last dispute.
    """

    changed: set[str] = field(default_factory=set)
    differed: dict[str, str] = field(default_factory=dict)
