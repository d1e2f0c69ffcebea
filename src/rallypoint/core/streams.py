"""Streams: which items of which part a replica reads at a step, and how a stream ends its job. Pure.

The items of (step, replica) are a pure function of the two, as for a data set with positions (I6). A job that reads a
stream ends after `passes` over it or after `steps`, whichever comes first. A replica says that its stream is over with
the last step for which it has a full batch. At the job's last step nobody looks any more, for that would read what no
step uses.
"""

from __future__ import annotations

from typing import NamedTuple


class Items(NamedTuple):
    """Items `first` to `stop` - 1 of one part. They are numbered from 0, pass after pass, by the part's iterator."""

    part: int
    first: int
    stop: int


class StreamOrder:
    """The items of each (step, replica), of a stream in `parts` parts that are read side by side.

    With fewer parts than replicas, R / parts neighbouring replicas share one, batch after batch. With more, a replica
    has parts / R of them and takes its batches from each in turn. Examples: R = 4, batch = 8, two parts: replica 3 at
    step 5 reads items 88 to 95 of part 1. R = 1 and two parts: step 5 reads items 16 to 23 of part 1.

    Raises ValueError if neither number divides the other.

    Attributes:
        parts: how many parts there are.
        sharing: how many replicas share a part.
    """

    def __init__(self, parts: int, *, replicas: int, batch: int) -> None:
        if replicas % parts and parts % replicas:
            raise ValueError(f"{parts} parts for {replicas} replicas: neither divides the other")
        self.parts, self._batch = parts, batch
        self.sharing, self._alternating = max(1, replicas // parts), max(1, parts // replicas)

    @property
    def stride(self) -> int:
        """How many items of one part lie between the beginnings of two batches of a replica in it."""
        return self.sharing * self._batch

    def items(self, step: int, replica: int) -> Items:
        """The `batch` items of replica `replica` at step `step`."""
        if self._alternating > 1:
            block, part = divmod(step, self._alternating)
            return self._block(replica * self._alternating + part, block)
        part, place = divmod(replica, self.sharing)
        return self._block(part, step * self.sharing + place)

    def samples(self, step: int, replica: int) -> range:
        """The same items as numbers of the whole stream: item i of part p is ``i * parts + p``."""
        part, first, stop = self.items(step, replica)
        return range(first * self.parts + part, stop * self.parts + part, self.parts)

    def _block(self, part: int, number: int) -> Items:
        return Items(part, number * self._batch, (number + 1) * self._batch)


def looks_ahead(passes: int, step: int, steps: int) -> bool:
    """Return True if a replica has to know at `step` whether it has a batch for the next one. `passes` 0: no end."""
    return passes > 0 and step + 1 < steps


def reads(passes: int, steps: int, *, given: bool) -> str:
    """Return what is said as the job begins; "" if only its steps end it. `given`: the script says how many steps."""
    default = "" if given else " (steps= is not given)"
    return f"the stream is read passes={passes} times, for {steps} steps at most{default}" if passes else ""


def unread(passes: int, steps: int) -> str:
    """Return what is said when the steps have ended the job, and nobody has said that the stream is over."""
    if not passes:
        return ""
    return f"the job's {steps} steps are over, and its stream, with passes={passes}, may not be: give more to read all"
