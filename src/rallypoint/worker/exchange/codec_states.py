"""Codec states on the move: out of the encoder and to a shard's primary, or from there into the encoder."""

from __future__ import annotations

from rallypoint.codec.state import CodecState, ShardCodecStates
from rallypoint.core.layout import Shard
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.handover import Key
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.core.worker.slots import CodecEffect, Give, Recall, Release, ResetCodecs, Send
from rallypoint.net.frames import COPY, Header, Kind
from rallypoint.worker.exchange.encoder import Encoder
from rallypoint.worker.exchange.links import Links


class CodecStates:
    """Runs what the shell decides about codec states (`core/worker/custody.py`).

    Everything needs the exchange's lock, save for `check` and `copy`. No call blocks: frames are only queued.
    """

    def __init__(self, shell: WorkerShell, encoder: Encoder, formats: ShardCodecStates, links: Links) -> None:
        self._shell, self._encoder, self._formats, self._links = shell, encoder, formats, links
        self._given: dict[Key, CodecState] = {}  # what no server has yet

    def run(self, effect: CodecEffect) -> None:
        """Do what the shell has decided."""
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
        """ProtocolError unless what comes can be a codec state of that shard, or the word that there is none."""
        if header.length:
            self._formats.of(shard).check(header.codec, header.length)

    def arrived(self, header: Header, data: bytearray) -> None:
        """A shard's primary has answered."""
        if self._shell.states.answered(header.shard, header.replica):
            codec_state = CodecState(header.step, header.codec, memoryview(data)) if data else None
            self._encoder.take(header.shard, header.replica, codec_state)

    def taken(self, shard: int, replica: int) -> None:
        """A server has what it was given."""
        self._shell.states.taken(shard, replica)
        self._given.pop((shard, replica), None)

    def copy(self, send: Send) -> None:
        """Send the codec state of after the step before, for a snapshot. Called before the contribution leaves."""
        codec_state = self._encoder.copy(send.shard, send.replica, send.step - 1)
        if codec_state is not None:
            header = _header(send.shard, send.replica, codec_state)._replace(base=COPY)
            self._send(send.server, header, codec_state.data, send.view)

    def _send(self, server: str, header: Header, payload: memoryview | None, view: ViewNumber | None = None) -> None:
        """Under the number of the view in force, or of that in which this was decided."""
        if (link := self._links.get(server)) is not None:
            link.send_codec_state(header._replace(view=self._shell.number if view is None else view), payload)


def _header(shard: int, replica: int, codec_state: CodecState | None) -> Header:
    header = Header(Kind.MEMORY, shard=shard, replica=replica)
    if codec_state is None:
        return header
    return header._replace(step=codec_state.step, codec=codec_state.code, length=len(codec_state.data))
