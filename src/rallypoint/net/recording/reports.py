"""The last reports of a worker, which it says again: some may have been sent into a link that was broken already."""

from __future__ import annotations

import msgspec

from rallypoint.net.messages import Report

STEPS = 2  # the coordinator remembers which replicas of so many steps were reported


class LastReports:
    """The reports of the last two steps of the newest generation. Not thread-safe."""

    def __init__(self) -> None:
        self._reports: list[Report] = []

    def note(self, message: object) -> None:
        """The worker says this; what is no report is passed over."""
        if isinstance(message, Report) and all(one.generation <= message.generation for one in self._reports):
            same, first = message.generation, message.step - STEPS + 1
            self._reports = [one for one in self._reports if one.generation == same and one.step >= first]
            self._reports.append(message)

    def again(self, waiting: set[int]) -> list[Report]:
        """The reports to say again, marked as such; not those that have not been sent yet: `waiting` are their ids."""
        return [msgspec.structs.replace(one, repeated=True) for one in self._reports if id(one) not in waiting]

    def forget(self) -> None:
        """What this worker has said does not count any more."""
        self._reports = []
