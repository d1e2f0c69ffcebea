"""No payload does anything but decode to finite words or raise ProtocolError."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from codec_cases import FINITE_ONLY, SPECS, decoder_of, encoded, encoder_of, gradient
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import ProtocolError

WORDS = [0, 1, 100, 48 * 80, 65536 + 3]


def read(name: str, payload: bytes, words: int) -> None:
    decoder, into, total = decoder_of(name, words), torch.ones(words), torch.ones(words)
    try:
        decoder.decode(memoryview(bytearray(payload)), into)
        decoder.decode_add(memoryview(payload), total)
    except ProtocolError:
        assert torch.equal(total, torch.ones(words))
        assert torch.equal(into, torch.ones(words))
        return
    if name in FINITE_ONLY and decoder.code:
        assert torch.isfinite(into).all()


@pytest.mark.parametrize("name", SPECS)
@given(data=st.data())
def test_noise(name: str, data: st.DataObject) -> None:
    words = data.draw(st.sampled_from(WORDS))
    length = data.draw(st.sampled_from([decoder_of(name, words).bytes_for(words), 0, 1, 4, 10, 16]))
    noise = data.draw(st.binary(max_size=64))
    read(name, (noise * (length // max(1, len(noise)) + 1))[:length], words)


@pytest.mark.parametrize("name", SPECS)
@given(data=st.data())
def test_a_payload_with_bytes_changed(name: str, data: st.DataObject) -> None:
    words = data.draw(st.sampled_from([100, 48 * 80]))
    payload = bytearray(encoded(encoder_of(name, words), gradient(words)))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(payload)))
        payload[start : start + 4] = data.draw(st.binary(max_size=8))
    read(name, bytes(payload), words)


@pytest.mark.parametrize("name", ["topk", "dgc"])
@given(counts=st.tuples(*[st.integers(0, 4) | st.sampled_from([0xFFFFFFFF, 65536])] * 2), places=st.binary(max_size=8))
def test_forged_positions(name: str, counts: tuple[int, int], places: bytes) -> None:
    places = places[: len(places) // 2 * 2]
    head = b"".join(count.to_bytes(4, "little") for count in counts)
    read(name, head + b"\0\0\x80\x3f" * (len(places) // 2) + places, 65536 + 3)


# Where in each payload an fp32 lies that every decoded word depends on, and what it must not be.
@pytest.mark.parametrize(
    ("name", "place"), [("int8", 0), ("int4", 0), ("sign", 0), ("topk", 4), ("randomk", 8), ("powersgd", 0),
                        ("powersgd", -4)],
)  # fmt: skip
@pytest.mark.parametrize("forged", [math.nan, math.inf, -math.inf, 3.4e38, -1.0])
def test_a_forged_number_is_refused(name: str, place: int, forged: float) -> None:
    if forged == -1.0 and name in ("topk", "randomk", "powersgd"):
        return  # a number like any other
    if forged == 3.4e38 and name in ("topk", "randomk", "sign"):
        return
    payload = bytearray(encoded(encoder_of(name, 48 * 80), gradient(48 * 80)))
    struct.pack_into("<f", payload, place % len(payload), forged)
    with pytest.raises(ProtocolError):
        decoder_of(name, 48 * 80).decode(memoryview(payload), torch.zeros(48 * 80))
