"""Buffers come back when their last holder lets go, and only then."""

from __future__ import annotations

import psutil
import pytest
import torch

from rallypoint.net.pool import PERIOD, BufferPool, bytes_of


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


def test_a_pool_gives_back_what_it_has_not_needed_for_long() -> None:
    """After a crowd (workers that join, a slow link) the memory is the system's again."""
    pool = BufferPool(4)
    for buffer in [pool.take() for _ in range(100)]:
        buffer.release()
    assert (pool.made, len(pool.free)) == (100, 100), "it may be needed again soon"
    for _ in range(PERIOD):
        for buffer in [pool.take() for _ in range(3)]:
            buffer.release()
    assert (pool.made, len(pool.free)) == (3, 3)


def test_large_buffers_are_given_back_to_the_system() -> None:
    process, pool = psutil.Process(), BufferPool(1 << 18, keeps=False)
    held = [pool.take() for _ in range(64)]
    for buffer in held:
        buffer.tensor.zero_()
    used = process.memory_info().rss
    for buffer in held[1::2]:  # not only those at the end of the heap
        buffer.release()
    del held[1::2], buffer
    assert used - process.memory_info().rss > 24 << 20
    for buffer in held:
        buffer.release()


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
