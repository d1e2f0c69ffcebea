"""Closed forms: how long a synchronisation of K bytes takes, whatever else happens at the time.

The model is held to them. They are the arithmetic of textbooks and papers. Each function says its source, what the
source assumes, and where it is loose. All sizes are in bytes, rates in bytes a second of one direction
of a link, times in seconds.
"""

from __future__ import annotations

from rallypoint.core.plan.peers import ring_bytes


def ring_seconds(nbytes: float, members: int, rate: float, latency: float = 0.0) -> float:
    """A ring all-reduce over links of one rate, both directions in use; `latency` for each of its 2(n-1) rounds."""
    return ring_bytes(nbytes, members) / rate + 2 * (members - 1) * latency


def star_seconds(nbytes: float, senders: int, rate: float) -> float:
    """One place sums, over one link: all senders' gradients in, then as many results out. Source: d2l.ai, chapter 13.7.

    Example: 160 MB, 3 GPUs send to a fourth at 16 GB/s: 30 ms there and 30 ms back; 4 GPUs send to the CPU: 80 ms.

    Assumes that the way back begins when all has come (a link has two directions: pipelined it takes half as long),
    that the sums cost nothing, and that GPUs reach each other without the CPU's link (a PCIe switch).
    """
    return 2 * senders * nbytes / rate


def scattered_seconds(nbytes: float, members: int, rate: float) -> float:
    """Each member sums one n-th: a direct reduce-scatter, then an all-gather. Source: d2l.ai, chapter 13.7.

    Example: 160 MB, 4 GPUs, 16 GB/s: each gets 3 parts of 40 MB, 7.5 ms, and 7.5 ms back. It moves what a ring does.
    Assumes a switch that carries all links at full rate, both directions at once: each sends while it receives.
    """
    return ring_bytes(nbytes, members) / rate


def loose_ring_seconds(nbytes: float, links: int, rate: float) -> float:
    """A ring with several parallel links, as d2l.ai (chapter 13.7) counts it: 2 K / (links x rate).

    Example: 160 MB among 8 V100s, each with 6 NVLinks of 18 GB/s, three of them each way round: 5.9 ms, "about 6 ms".
    Loose: it leaves out (n-1)/n, with which it is 5.2 ms, and takes 18 GB/s where NVLink 2 has 25 in each direction.
    """
    return 2 * nbytes / (links * rate)


def one_way_seconds(nbytes: float, workers: int, servers: int, rate: float) -> float:
    """m workers' gradients into n servers' links, evenly: m K / (n B). So one server is O(m), n servers O(m/n).

    Source: d2l.ai, chapter 13.7; Li et al., OSDI 2014. Loose: with more servers than workers, the workers' own links
    are what is left, K/B: see `servers_seconds`.
    """
    return workers * nbytes / (servers * rate)


def servers_seconds(
    nbytes: float, workers: int, servers: int, rate: float, server_rate: float = 0.0, copies: int = 1
) -> float:
    """Servers on links of their own: the busiest link carries its bytes up, and as many down at the same time.

    A worker's link carries K each way, a server's m K / n; with `copies` = 2 (replication) each server also sends its
    gradients to a backup and receives as many: (m + 1) K / n. `server_rate`: of a server's link, if it is another.
    """
    there = (workers + copies - 1) * nbytes / (servers * (server_rate or rate))
    return max(nbytes / rate, there)


def byteps_parts(members: int, extra: int) -> tuple[float, float]:
    """The share of K that each of `extra` CPU machines sums, and that each of the n GPU machines sums.

    Jiang et al., OSDI 2020 (BytePS), section 4.1: the split at which all links are equally busy, for 0 <= k <= n. With
    k = 0 it is an all-reduce, 1/n each; with k = n the CPU machines sum all of it, 1/n each.

    Assumes one rate for all links, both directions at once, summing for nothing, and n >= 2. It counts bytes between
    machines only: a GPU machine sends what it sums itself over no link.
    """
    whole = members**2 + extra * members - 2 * extra
    return 2 * (members - 1) / whole, (members - extra) / whole


def byteps_seconds(nbytes: float, members: int, extra: int, rate: float) -> float:
    """The time at that split: 2n(n-1) / (n^2 + kn - 2k) K/B. It is 2(n-1)/n K/B for k = 0, and K/B for k = n.

    Beyond k = n more machines bring nothing: a GPU machine's own link carries K each way, so K/B is the least.
    """
    extra = min(extra, members)
    return 2 * members * (members - 1) / (members**2 + extra * members - 2 * extra) * nbytes / rate
