"""Buffers come back when their last holder lets go, and only then."""

from __future__ import annotations

import pytest
import torch

from rallypoint.net.pool import BufferPool, bytes_of


def test_a_buffer_is_words_and_the_same_bytes() -> None:
    buffer = BufferPool(16).take()
    assert buffer.tensor.shape == (16,)
    assert buffer.tensor.dtype == torch.float32
    assert len(buffer.bytes) == 64
    buffer.bytes[:4] = torch.tensor([1.5]).numpy().tobytes()
    assert buffer.tensor[0] == 1.5


def test_a_released_buffer_is_taken_again() -> None:
    pool = BufferPool(4)
    first, second = pool.take(), pool.take()
    assert first is not second
    first.release()
    assert pool.take() is first
    assert pool.made == 2


def test_a_buffer_comes_back_with_its_last_holder() -> None:
    pool = BufferPool(4)
    buffer = pool.take()
    assert buffer.retain() is buffer
    buffer.release()
    assert pool.free == []
    buffer.release()
    assert pool.free == [buffer]


def test_no_buffer_is_in_two_hands() -> None:
    pool = BufferPool(4)
    for _ in range(50):
        held = [pool.take() for _ in range(4)]
        assert len({id(buffer) for buffer in held}) == 4
        for buffer in held:
            buffer.release()
    assert pool.made == 4
    assert len(pool.free) == 4


def test_releasing_once_too_often_is_noticed() -> None:
    pool = BufferPool(4)
    buffer = pool.take()
    buffer.release()
    with pytest.raises(AssertionError):
        buffer.release()
    assert pool.free == [buffer]


def test_the_bytes_of_a_tensor_are_in_place() -> None:
    tensor = torch.zeros(4)
    bytes_of(tensor)[:] = torch.arange(4.0).numpy().tobytes()
    assert tensor.tolist() == [0, 1, 2, 3]
