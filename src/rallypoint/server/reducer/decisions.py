"""The decisions that all servers of a job take together: measures go out, verdicts come of them."""

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
    """Whom the reducer talks to beside followers and peers: the service."""

    def say(self, message: Message) -> None:
        """Tell the coordinator."""

    def not_finite(self, verdict: clip.Verdict, view: View) -> None:
        """A step was skipped, or must stop the job. `view` is the one under which the verdict was reached."""


class Decisions:
    """The owner's thread owns it. `stops`: the job ends at a norm that is not finite; `put`: into the inbox."""

    def __init__(
        self, shell: ServerShell[Channel], context: Context, put: Callable[[Event], None], *, stops: bool
    ) -> None:
        self._shell, self._context, self._put, self._stops = shell, context, put, stops
        self._measures = msgspec.msgpack.Encoder()

    def measured(self, owned: HeldShard, finish: Finish) -> Sequence[Effect]:
        """A shard's sum is finished: its norm, if it counts, is a fact of that step."""
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
        """All measures of a step are known."""
        if verdict.scale is None or not math.isfinite(verdict.norm):
            view = self._shell.machine.view
            assert view is not None
            self._context.not_finite(verdict, view)
            if verdict.scale is not None and self._stops:
                return  # the job ends here, and a snapshot shall not catch what comes of this step
        # Into the inbox, not now: the shard whose Finish brought the verdict is still running its effects.
        self._put(Decided(verdict))
