"""Chooses the version at which a shard's state is kept for a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.shard.effects import Capture


@dataclass(slots=True)
class CapturePoint:
    """The version that a snapshot waits for; -1 if there is none. `any_version`: the first one that is here will do."""

    at: int = -1
    any_version: bool = False

    def ask(self, at: int, now: int, *, primary: bool, any_version: bool) -> list[Capture]:
        """A snapshot wants version `at`; the shard is at version `now`.

        With `any_version` (streaming policies, where no version is common to all shards) the current version is
        captured; if the shard is still being restored, the version that it is restored to.
        """
        if primary and any_version:
            self.any_version = True
            return self.reached(now)
        if not primary or now > at:
            return [Capture(max(now, at + 1), missed=True)]
        self.at = at
        return self.reached(now)

    def reached(self, version: int) -> list[Capture]:
        """The shard is now at `version`. Returns a Capture if the snapshot waits for it."""
        if version < 0 or not (self.any_version or version == self.at):
            return []
        self.at, self.any_version = -1, False
        return [Capture(version)]
