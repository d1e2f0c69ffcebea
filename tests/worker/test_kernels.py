"""The probe of a process's kernels: the same bytes each time, other bytes from other kernels."""

from __future__ import annotations

import torch

from rallypoint.worker.kernels import kernels_of


def test_a_probe_gives_the_same_bytes_each_time_and_moves_nothing() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        first = kernels_of()
    assert len(first) == 16
    assert kernels_of() == first
    assert torch.equal(torch.get_rng_state(), before)


def test_kernels_that_add_up_in_another_way_are_told_apart() -> None:
    """Another number of threads cuts sums in another way."""
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            found.append(kernels_of())
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[2] != found[1]
