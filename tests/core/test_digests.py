"""Digests of contributions are the same everywhere, and notice a single bit."""

from __future__ import annotations

import struct

import pytest

from rallypoint.core.sums import DIGEST_BYTES, leaf_digest

LEAF = struct.pack("<5f", 0.0, 1.0, -2.5, 1e-30, float("inf"))


def test_a_digest_has_known_bytes() -> None:
    """They are compared between machines and kept with runs: another digest would be another format."""
    assert leaf_digest(LEAF).hex() == "a6a5f33c8d93ca17271bade19cd67351"
    assert len(leaf_digest(LEAF)) == DIGEST_BYTES


def test_the_digest_is_that_of_the_bytes_however_they_come() -> None:
    words = memoryview(LEAF).cast("f")
    assert leaf_digest(words) == leaf_digest(memoryview(LEAF)) == leaf_digest(bytearray(LEAF)) == leaf_digest(LEAF)


@pytest.mark.parametrize("bit", [0, 31, 77, 8 * len(LEAF) - 1])
def test_one_flipped_bit_is_another_digest(bit: int) -> None:
    flipped = bytearray(LEAF)
    flipped[bit // 8] ^= 1 << bit % 8
    assert leaf_digest(flipped) != leaf_digest(LEAF)


def test_zero_and_minus_zero_are_other_bytes() -> None:
    assert leaf_digest(struct.pack("<f", 0.0)) != leaf_digest(struct.pack("<f", -0.0))


def test_half_a_word_is_no_leaf() -> None:
    with pytest.raises(ValueError, match="21 bytes"):
        leaf_digest(LEAF + b"x")
