"""The arithmetic of textbooks and papers on parameter servers and rings, with what each source assumes."""

from __future__ import annotations

import pytest
from closed import (
    byteps_parts,
    byteps_seconds,
    loose_ring_seconds,
    one_way_seconds,
    ring_seconds,
    scattered_seconds,
    servers_seconds,
    star_seconds,
)

from rallypoint.core.plan.peers import fsdp_bytes, ring_bytes

MB, GB, MS = 1e6, 1e9, 1e-3
GRADIENTS, PCIE = 160 * MB, 16 * GB  # d2l.ai, chapter 13.7: a server with four GPUs


def test_three_gpus_send_to_a_fourth_and_get_the_result_back_in_60_ms() -> None:
    """The source: 10 ms for each transfer, 30 ms there, 30 ms back. Loose: a link that carries both ways at once would
    need half of it, if the way back did not have to wait for the last sum."""
    assert star_seconds(GRADIENTS, 1, PCIE) == pytest.approx(2 * 10 * MS)
    assert star_seconds(GRADIENTS, 3, PCIE) == pytest.approx(60 * MS)


def test_four_gpus_send_to_the_cpu_and_get_the_result_back_in_80_ms() -> None:
    """The source: each of the four sends, over the CPU's one link. Loose in the same way as above."""
    assert star_seconds(GRADIENTS, 4, PCIE) == pytest.approx(80 * MS)


def test_cut_in_four_parts_each_summed_on_another_gpu_it_takes_15_ms() -> None:
    """The source: 7.5 ms there and as much back, because the switch carries all links at full rate. It counts each
    link's two directions as used at once: a GPU sends three parts while it receives three."""
    assert scattered_seconds(GRADIENTS, 4, PCIE) == pytest.approx(15 * MS)
    assert scattered_seconds(GRADIENTS, 4, PCIE) == pytest.approx(2 * 3 * (40 * MB) / PCIE)
    assert scattered_seconds(GRADIENTS, 4, PCIE) == ring_seconds(GRADIENTS, 4, PCIE)  # a ring moves as much


def test_a_ring_over_eight_gpus_with_nvlink_takes_about_6_ms() -> None:
    """The source rounds: it leaves out (n-1)/n, so its 5.9 ms, "about 6", are 5.2 for eight members."""
    as_printed = loose_ring_seconds(GRADIENTS, 3, 18 * GB)
    assert as_printed == pytest.approx(5.93 * MS, rel=1e-3)
    assert ring_seconds(GRADIENTS, 8, 3 * 18 * GB) == pytest.approx(as_printed * 7 / 8)


def test_one_server_takes_o_m_and_n_servers_o_m_over_n() -> None:
    one = [one_way_seconds(GRADIENTS, m, 1, PCIE) for m in (1, 2, 8)]
    assert one == pytest.approx([10 * MS, 20 * MS, 80 * MS])
    assert one_way_seconds(GRADIENTS, 8, 4, PCIE) == pytest.approx(one[2] / 4)
    matched = [one_way_seconds(GRADIENTS, m, m, PCIE) for m in (1, 8, 100)]  # "constant, however many workers"
    assert matched == pytest.approx([10 * MS] * 3)


def test_more_servers_than_workers_bring_nothing_which_the_o_does_not_say() -> None:
    assert one_way_seconds(GRADIENTS, 4, 8, PCIE) == pytest.approx(5 * MS)
    assert servers_seconds(GRADIENTS, 4, 8, PCIE) == pytest.approx(10 * MS)


def test_servers_move_k_where_a_ring_moves_nearly_twice_as_much() -> None:
    """Vertex AI's Reduction Server: a ring moves 2(n-1)/n K. "Half of that" is meant for many workers: two of them
    gain nothing."""
    assert [ring_bytes(1.0, n) for n in (2, 4, 8)] == [1.0, 1.5, 1.75]
    assert ring_bytes(1.0, 10_000) == pytest.approx(2.0, rel=1e-3)
    assert servers_seconds(GRADIENTS, 8, 8, PCIE) == pytest.approx(ring_seconds(GRADIENTS, 8, PCIE) / 1.75)
    assert servers_seconds(GRADIENTS, 2, 2, PCIE) == pytest.approx(ring_seconds(GRADIENTS, 2, PCIE))


def test_replication_carries_every_gradient_once_more() -> None:
    assert servers_seconds(GRADIENTS, 4, 4, PCIE, copies=2) == pytest.approx(1.25 * 10 * MS)
    assert servers_seconds(GRADIENTS, 4, 5, PCIE, copies=2) == pytest.approx(10 * MS)
    assert servers_seconds(GRADIENTS, 4, 4, PCIE, 1.25 * PCIE, copies=2) == pytest.approx(10 * MS)


def test_byteps_is_a_ring_without_and_servers_with_as_many_extra_machines() -> None:
    """Jiang et al., OSDI 2020, section 4.1."""
    assert byteps_seconds(GRADIENTS, 8, 0, PCIE) == pytest.approx(ring_seconds(GRADIENTS, 8, PCIE))
    assert byteps_seconds(GRADIENTS, 8, 8, PCIE) == pytest.approx(servers_seconds(GRADIENTS, 8, 8, PCIE))
    assert byteps_seconds(GRADIENTS, 8, 20, PCIE) == byteps_seconds(GRADIENTS, 8, 8, PCIE)  # no more to gain
    times = [byteps_seconds(GRADIENTS, 8, k, PCIE) for k in range(9)]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 9


@pytest.mark.parametrize(("members", "extra"), [(2, 1), (4, 1), (8, 2), (8, 8), (32, 12)])
def test_byteps_shares_the_sums_so_that_all_links_are_equally_busy(members: int, extra: int) -> None:
    """And the time follows from the shares: a GPU machine sends what others sum, and n-1 copies of what it does."""
    cpu, gpu = byteps_parts(members, extra)
    assert extra * cpu + members * gpu == pytest.approx(1.0)
    busy = (1 - gpu) + (members - 1) * gpu
    assert busy == pytest.approx(byteps_seconds(1.0, members, extra, 1.0))
    assert members * cpu == pytest.approx(busy)


def test_no_other_split_is_quicker() -> None:
    members, extra = 8, 3
    cpu, _ = byteps_parts(members, extra)
    for other in (0.5 * cpu, 0.9 * cpu, 1.1 * cpu, 1.5 * cpu):
        own = (1 - extra * other) / members
        assert max(members * other, 1 + (members - 2) * own) > byteps_seconds(1.0, members, extra, 1.0)


def test_fsdp_moves_half_as_much_again_as_a_ring() -> None:
    """Rajbhandari et al., 2020: 3 K against 2 K, for large n."""
    assert fsdp_bytes(1.0, 4) / ring_bytes(1.0, 4) == pytest.approx(1.5)
