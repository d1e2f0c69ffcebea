"""Codec states in the simulation: a name for each residual, in a worker's encoder, between two workers, in a snapshot.

The machine that decides is the real one: `core/worker/handover.py`. Here is what stands around it:
`worker/exchange/pushes.py` is its counterpart. What servers do with codec states is `server/snapshots.py` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.codec.build import ShardCodecStates
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.handover import Encoding, Key, encoding_of
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.core.worker.slots import CodecEffect, Give, Recall, ReleaseState, ResetCodecs, Send
from rallypoint.net.frames import COPY, Header, Kind
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Content

if TYPE_CHECKING:
    from rallypoint.testing.simulation.network import Tokens
    from rallypoint.worker.exchange.links import Links


class Coded(NamedTuple):
    """A contribution as it leaves its encoder: made from the codec state after the step `after` (-1: from none)."""

    content: Content
    step: int
    replica: int
    after: int
    generation: ViewNumber | None  # the one that the state belongs to; None without a state


@dataclass(frozen=True, slots=True)
class Residual:
    """The codec state of a (shard, replica) after `coded` was encoded; `name` stands for what was not sent."""

    coded: Coded
    name: int
    generation: ViewNumber

    @property
    def step(self) -> int:
        """The step of the last contribution, in the shard's own count."""
        return self.coded.step


class SimulatedEncoder:
    """One worker's codec states. Nothing is encoded twice: a contribution that is sent again is the one that is kept.

    """

    def __init__(
        self, job: SimulatedJob, shell: WorkerShell, links: Links, tokens: Tokens
    ) -> None:
        self._job, self._shell, self._links, self._tokens = job, shell, links, tokens
        self._formats = ShardCodecStates(job.config)
        self._kept: dict[Key, Residual] = {}
        self._given: dict[Key, Residual | None] = {}  # what no server has yet

    def encode(self, send: Send, gradient: Content) -> Coded:
        """The contribution to be sent for the gradient in the slot."""
        key = (send.shard, send.replica)
        kept = self._kept.get(key)
        match encoding_of(None if kept is None else kept.step, send.step, drops=self._job.config.quorum is not None):
            case Encoding.AGAIN if kept is not None:
                return kept.coded
            case Encoding.OVER:
                return Coded(GARBAGE, send.step, send.replica, -1, None)
            case Encoding.ANEW:
                kept = None
        before = 0 if kept is None else kept.name
        after, generation = (-1, None) if kept is None else (kept.step, kept.generation)
        content, name = self._job.encoded(gradient, before)
        coded = Coded(content, send.step, send.replica, after, generation)
        self._kept[key] = Residual(coded, name, self._shell.view.generation)
        return coded

    def copy(self, send: Send) -> None:
        """Before this contribution is encoded: send the state after the step before, for a snapshot."""
        kept = self._kept.get((send.shard, send.replica))
        if kept is not None and kept.step == send.step - 1:
            self._say(send.server, send.shard, send.replica, kept, COPY)

    def run(self, effect: CodecEffect) -> None:
        """Do what the shell has decided."""
        match effect:
            case ResetCodecs():
                self._kept.clear()
                self._given.clear()
            case Recall(shard=shard, replica=replica, server=server):
                self._send(server, Header(Kind.RECALL, self._shell.number, shard=shard, replica=replica))
            case ReleaseState(shard=shard, replica=replica):
                self._given[shard, replica] = self._kept.pop((shard, replica), None)
            case Give(shard=shard, replica=replica, server=server):
                self._say(server, shard, replica, self._given.get((shard, replica)))

    def _say(self, server: str, shard: int, replica: int, state: Residual | None, base: int = 0) -> None:
        header = Header(Kind.CODEC_STATE, self._shell.number, shard=shard, replica=replica, base=base)
        if state is not None:
            limits = self._formats.of(self._job.layout.shards[shard])
            header = header._replace(step=state.step, codec=limits.code, length=limits.least)
        self._send(server, header, None if state is None else self._tokens.bytes_of(state))

    def _send(self, server: str, header: Header, payload: memoryview | None = None) -> None:
        if (link := self._links.get(server)) is not None:
            link.send_codec_state(header, payload)

    def arrived(self, shard: int, replica: int, state: Residual | None) -> None:
        """A shard's primary has answered a recall."""
        if self._shell.states.answered(shard, replica):
            self._kept.pop((shard, replica), None)
            if state is not None:
                self._kept[shard, replica] = state

    def taken(self, shard: int, replica: int) -> None:
        """A shard's primary has what it was given."""
        self._shell.states.taken(shard, replica)
        self._given.pop((shard, replica), None)
