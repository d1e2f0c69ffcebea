"""Runs the shell's effects on real links."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.codec.state import CodecState, ShardCodecStates
from rallypoint.core.layout import Shard
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.handover import Key
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.core.worker.slots import CodecEffect, Give, Recall, Release, ResetCodecs, Send
from rallypoint.net.frames import COPY, Header, Kind
from rallypoint.worker.exchange.encoder import Encoder
from rallypoint.worker.exchange.links import Links
from rallypoint.worker.exchange.pushes import Pushes


class LinkEffects:
    """Runs the machine's effects. Drops an effect whose link is gone: the lost link is an event of its own."""

    def __init__(self, shell: WorkerShell, links: Links, pushes: Pushes, codec_states: CodecStates | None) -> None:
        self._shell, self._links, self._pushes, self._codec_states = shell, links, pushes, codec_states

    def run_locked(self, effect: machine.CodecEffect) -> None:
        """Run one effect on codec states. Needs the exchange's lock."""
        assert self._codec_states is not None, f"{effect}, though this job's codecs have no state"
        self._codec_states.run(effect)

    def run(self, effects: Sequence[machine.Effect]) -> None:
        """Run all other effects, in order, without the lock."""
        for effect in effects:
            match effect:
                case machine.Send():
                    if self._codec_states is not None and self._shell.snapshots.copies(effect):
                        self._codec_states.copy(effect)
                    self._pushes.push(effect)
                case machine.Fetch(shard=shard, version=version, server=server):
                    if (link := self._links.get(server)) is not None:
                        link.fetch(shard, version, self._shell.number)
                case machine.Want(shard=shard, replica=replica, server=server):
                    if (link := self._links.get(server)) is not None:
                        link.want(shard, replica, self._shell.number)
                case machine.Follow(server=server, on=on, step=step):
                    if (link := self._links.get(server)) is not None:
                        link.follow(self._shell.number, on=on, step=step)
                case _:
                    raise AssertionError(f"an effect that cannot follow here: {effect}")


# ---- Moves codec states between the encoder and a shard's primary server ----


class CodecStates:
    """Runs the shell's effects on codec states (decided in `core/worker/handover.py`).

    All methods except `check` and `copy` need the exchange's lock. No method blocks: frames are only queued.
    """

    def __init__(self, shell: WorkerShell, encoder: Encoder, formats: ShardCodecStates, links: Links) -> None:
        self._shell, self._encoder, self._formats, self._links = shell, encoder, formats, links
        self._given: dict[Key, CodecState] = {}  # taken out of the encoder, not yet confirmed by a server

    def run(self, effect: CodecEffect) -> None:
        """Run one effect."""
        match effect:
            case ResetCodecs():
                self._encoder.reset()
                self._given.clear()
            case Recall(shard=shard, replica=replica, server=server):
                self._send(server, Header(Kind.RECALL, shard=shard, replica=replica), None)
            case Release(shard=shard, replica=replica):
                if (codec_state := self._encoder.give(shard, replica)) is not None:
                    self._given[shard, replica] = codec_state
                else:
                    self._given.pop((shard, replica), None)
            case Give(shard=shard, replica=replica, server=server):
                given = self._given.get((shard, replica))
                self._send(server, _header(shard, replica, given), None if given is None else given.data)

    def check(self, shard: Shard, header: Header) -> None:
        """Raise ProtocolError unless this frame is a valid codec state of that shard, or says that there is none."""
        if header.length:
            self._formats.of(shard).check(header.codec, header.length)

    def arrived(self, header: Header, data: bytearray) -> None:
        """Handle the answer of a shard's primary: a codec state, or that there is none."""
        if self._shell.states.answered(header.shard, header.replica):
            codec_state = CodecState(header.step, header.codec, memoryview(data)) if data else None
            self._encoder.take(header.shard, header.replica, codec_state)

    def taken(self, shard: int, replica: int) -> None:
        """Handle a server's confirmation that it has stored this codec state."""
        self._shell.states.taken(shard, replica)
        self._given.pop((shard, replica), None)

    def copy(self, send: Send) -> None:
        """Send the codec state of the step before, for a snapshot. Call it before this step's contribution is sent."""
        codec_state = self._encoder.copy(send.shard, send.replica, send.step - 1)
        if codec_state is not None:
            header = _header(send.shard, send.replica, codec_state)._replace(base=COPY)
            self._send(send.server, header, codec_state.data, send.view)

    def _send(self, server: str, header: Header, payload: memoryview | None, view: ViewNumber | None = None) -> None:
        """Send under the number of `view`, or of the view in force if `view` is None."""
        if (link := self._links.get(server)) is not None:
            link.send_codec_state(header._replace(view=self._shell.number if view is None else view), payload)


def _header(shard: int, replica: int, codec_state: CodecState | None) -> Header:
    header = Header(Kind.CODEC_STATE, shard=shard, replica=replica)
    if codec_state is None:
        return header
    return header._replace(step=codec_state.step, codec=codec_state.code, length=len(codec_state.data))
