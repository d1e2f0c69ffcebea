"""What workers of a job of sums say of their scripts: how many sums are here, and that a script has ended."""

from __future__ import annotations

from typing import Annotated

import msgspec

from rallypoint.core.typed import Count, Name
from rallypoint.net.greetings import AnyMessage

MOST_LANES = 64


class Summed(AnyMessage, frozen=True):
    """For observers: rank 0 has so many sums, and they have so many bytes together."""

    sums: Count = 0
    nbytes: Count = 0


class ScriptEnded(AnyMessage, frozen=True):
    """A worker's script has ended, and asks for no more sums: by lane, it has asked for so many.

    The worker sends it without its name; the coordinator gives it to all workers with the name.
    """

    sums: Annotated[dict[Count, Count], msgspec.Meta(max_length=MOST_LANES)]
    worker: Name = ""


OfSums = Summed | ScriptEnded
