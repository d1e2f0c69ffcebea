"""What mutated frames have found: one test for each defect."""

from __future__ import annotations

import pytest
from fuzz_jobs import POLICIES, running

from rallypoint.core.protocol import Welcome, decode, encode
from rallypoint.errors import ProtocolError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.pool import Buffer
from rallypoint.server.intake import Intake


def test_a_first_state_that_is_lost_on_its_way_is_uploaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """AllReduce, a model with buffers: the worker has no installed version yet to which it could set them back."""
    with running(POLICIES["all-reduce"]) as cluster:
        assert cluster.finish()
    undisturbed, honest, lost = cluster.hashes, Intake._receive_into, []

    def receive_into(intake: Intake, buffer: Buffer, channel: Channel, header: Header, *rest: object) -> Header:
        if header.kind is Kind.STATE and not lost:
            lost.append(header)
            raise ProtocolError("a state that cannot be read")
        return honest(intake, buffer, channel, header, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Intake, "_receive_into", receive_into)
    with running(POLICIES["all-reduce"]) as cluster:
        assert cluster.finish()
    assert lost
    assert not cluster.errors
    assert cluster.hashes == undisturbed


@pytest.mark.parametrize("heartbeat", [0.0, -1.0, float("nan"), float("inf")])
def test_a_welcome_with_a_heartbeat_that_cannot_be_is_refused(heartbeat: float) -> None:
    """A member would send heartbeats without a pause, or its thread would fail."""
    with pytest.raises(ProtocolError):
        decode(encode(Welcome(heartbeat=heartbeat)))
    assert decode(encode(Welcome(heartbeat=300.0)))


def test_what_is_wrong_with_a_message_is_said_in_one_line_without_control_characters() -> None:
    data = b"\x82\xa4type\xa4Beat\xa8\x1b[2J\n\r\x07x\x00"  # a field of that name
    with pytest.raises(ProtocolError, match="unknown field") as refused:
        decode(data)
    assert str(refused.value).isprintable()
    with pytest.raises(ProtocolError) as refused:
        decode(b"\x81\xa4type\xda\x13\x88" + b"x" * 5000)
    assert len(str(refused.value)) < 1000
