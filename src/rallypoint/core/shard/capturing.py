"""At which version a shard's state is kept for a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.shard.effects import Capture


@dataclass(slots=True)
class CapturePoint:
    """The version at which the shard's state is wanted; -1: none is."""

    at: int = -1

    def ask(self, at: int, now: int, *, primary: bool, any_version: bool) -> list[Capture]:
        """A snapshot wants version `at`, the shard is at `now`. `any_version`: no version is common to all shards."""
        if primary and any_version and now >= 0:
            return [Capture(now)]
        if not primary or now > at:
            return [Capture(max(now, at + 1), missed=True)]
        self.at = at
        return self.reached(now)

    def reached(self, version: int) -> list[Capture]:
        """The shard is at `version` now."""
        if self.at < 0 or version != self.at:
            return []
        self.at = -1
        return [Capture(version)]
