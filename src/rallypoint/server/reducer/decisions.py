"""The decisions that all servers of a job take together: sends measures, applies verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rallypoint.core.shard import clip
from rallypoint.core.shard.effects import Finish
from rallypoint.core.shard.server import Effect
from rallypoint.core.shard.shell import ServerShell
from rallypoint.core.view import View
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.messages import Message
from rallypoint.server.reducer.inbox import Decided, Event
from rallypoint.server.shards.held import HeldShard


class Context(Protocol):
    """What the reducer calls besides followers and peers. The service implements it."""

    def say(self, message: Message) -> None:
        """Send a message to the coordinator."""

    def not_finite(self, verdict: clip.Verdict, view: View) -> None:
        """A step was skipped, or must stop the job. `view` is the one in which the verdict was reached."""


class Decisions:
    """Not thread-safe: only the owner thread calls it.

    `stops`: the job ends at a norm that is not finite. `put` appends an event to the inbox.
    """

    def __init__(
        self, shell: ServerShell[Channel], context: Context, put: Callable[[Event], None], *, stops: bool
    ) -> None:
        self._shell, self._context, self._put, self._stops = shell, context, put, stops
        self._measures = msgspec.msgpack.Encoder()

    def measured(self, owned: HeldShard, finish: Finish) -> Sequence[Effect]:
        """A shard's sum is finished. If it counts in the global norm, measure it and tell the machine."""
        if not (finish.measure and owned.measured):
            return []
        measure = clip.Measure(owned.shard.index, owned.norm(), finish.not_finite)
        return self._shell.machine.measured(finish.step, measure)

    def tell(self, tell: clip.Tell) -> None:
        """Send measures to every other server."""
        data = memoryview(self._measures.encode(tell.measures))
        header = Header(Kind.MEASURES, self._shell.fence.number, step=tell.step, length=len(data))
        for peer in self._shell.peers.values():
            peer.send(header, data, urgent=True)

    def decide(self, verdict: clip.Verdict) -> None:
        """A step's verdict is known: report a skipped or not finite step, and queue the verdict for the shards."""
        if verdict.scale is None or not math.isfinite(verdict.norm):
            view = self._shell.machine.view
            assert view is not None
            self._context.not_finite(verdict, view)
            if verdict.scale is not None and self._stops:
                return  # the job ends here: do not apply the step, so that no snapshot contains it
        # Into the inbox, not now: the shard whose Finish brought the verdict is still running its effects.
        self._put(Decided(verdict))
