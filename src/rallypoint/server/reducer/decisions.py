"""The decisions that all servers of a job take together: sends measures, applies verdicts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rallypoint.core.protocol import Message
from rallypoint.core.shard import clip
from rallypoint.core.shard.effects import Finish
from rallypoint.core.shard.server import Effect
from rallypoint.core.shard.shell import ServerShell
from rallypoint.core.typed import MOST_NORM
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.server.reducer.inbox import Decided, Event
from rallypoint.server.shards.held import HeldShard


class Context(Protocol):
    """What the reducer calls besides followers and peers. The service implements it."""

    def say(self, message: Message) -> None:
        """Send a message to the coordinator."""

    def not_finite(self, verdict: clip.Verdict, *, alone: bool) -> None:
        """A step was skipped, or must stop the job. `alone`: only this server has decided so, about one shard."""


class Decisions:
    """Not thread-safe: only the owner thread calls it. `put` appends an event to the inbox."""

    def __init__(self, shell: ServerShell[Channel], context: Context, put: Callable[[Event], None]) -> None:
        self._shell, self._context, self._put = shell, context, put
        self._measures = msgspec.msgpack.Encoder()
        self._verdicts: deque[clip.Verdict] = deque(maxlen=2)  # the last ones

    def measured(self, owned: HeldShard, finish: Finish) -> Sequence[Effect]:
        """A shard's sum is finished. If a decision is awaited, look at it and tell the machine.

        A norm that clipping needs also says whether all values are finite.
        """
        if not finish.measure:
            return []
        rule = self._shell.machine.plan.rule
        norm = owned.norm() if owned.measured and rule.clip is not None else None
        known = norm is not None and math.isfinite(norm)
        at = -1 if known or not rule.examines else owned.first_not_finite()
        measure = clip.Measure(
            owned.shard.index, norm or 0.0, finish.not_finite, finish.gradients, at, owned.loss_scale
        )
        return self._shell.machine.measured(finish.step, measure)

    def tell(self, tell: clip.Tell) -> None:
        """Send measures to every other server."""
        data = memoryview(self._measures.encode(tell.measures))
        header = Header(Kind.MEASURES, self._shell.fence.number, step=tell.step, length=len(data))
        for peer in self._shell.peers.values():
            peer.send(header, data, urgent=True)

    def decide(self, verdict: clip.Verdict) -> None:
        """A step's verdict is known: report one that is not finite, and queue the verdict for the shards."""
        if verdict.scale is None:
            self.report(verdict, alone=False)
        self._verdicts.append(verdict)
        # Into the inbox, not now: the shard whose Finish brought the verdict is still running its effects.
        self._put(Decided(verdict))

    def norm(self, step: int) -> float | None:
        """The norm of a step's mean gradient, before clipping; None if nobody measures it, or it is not finite.

        Only of the last two steps that were decided.
        """
        if self._shell.machine.plan.rule.clip is None:
            return None
        asked = (step, self._shell.fence.generation)
        found = next((v.norm for v in self._verdicts if (v.step, v.generation) == asked), None)
        return found if found is not None and found <= MOST_NORM else None

    def report(self, verdict: clip.Verdict, *, alone: bool) -> None:
        """Tell the coordinator of a step that is not finite."""
        self._context.not_finite(verdict, alone=alone)
