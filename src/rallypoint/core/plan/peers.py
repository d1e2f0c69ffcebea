"""A step without servers: DDP and FSDP among the workers themselves, as what a user would pick instead.

DDP (Li et al., VLDB 2020) reduces buckets of 25 MiB, in backward order, the first one of 1 MiB; the optimizer steps
when the last has come. FSDP (Zhao et al., VLDB 2023) gathers each unit before its forward and its backward pass, one
ahead, and scatters its gradients after the latter. Collectives go one at a time, as rings over the hosts' links.
"""

from __future__ import annotations

import math

import msgspec

from rallypoint.core.layout import WORD_BYTES
from rallypoint.core.plan.pipeline import StepCost
from rallypoint.core.plan.site import INSIDE_RATE, PAYLOAD, Rates, Workers
from rallypoint.core.plan.workload import Workload

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # torch's defaults, bytes of gradient


class Ring(msgspec.Struct, frozen=True):
    """All ranks in a ring: on each host it enters once and leaves once, so a host's link carries one rank's bytes."""

    members: int
    rate: float
    latency: float

    @classmethod
    def of(cls, workers: Workers, latency: float) -> Ring:
        if workers.count <= workers.per_host:
            return cls(workers.count, INSIDE_RATE, latency)
        return cls(workers.count, PAYLOAD * workers.rate, latency)

    def seconds(self, nbytes: float, passes: int = 2) -> float:
        """Reduce-scatter and all-gather of so many bytes, or only one of them (`passes` = 1)."""
        if self.members < 2:
            return 0.0
        hops = min(self.members - 1, 2 * math.ceil(math.log2(self.members)))  # NCCL: trees where there are many
        return passes * (ring_bytes(nbytes, self.members) / 2 / self.rate + hops * self.latency)


def ddp_cost(workload: Workload, workers: Workers, ring: Ring, speeds: Rates, word_bytes: float = 4.0) -> StepCost:
    """DDP's step. `word_bytes`: 2 where a communication hook sends bf16."""
    free = _replicas_before(workload, workers) + workload.forward * workers.slowness
    now = free
    size, filled, full = word_bytes, 0.0, FIRST_BUCKET / WORD_BYTES
    for layer in reversed(workload.layers):
        now += layer.backward * workers.slowness
        filled += layer.words
        while filled >= full:
            free, filled, full = max(free, now) + ring.seconds(size * full), filled - full, BUCKET / WORD_BYTES
    if filled:
        free = max(free, now) + ring.seconds(size * filled)
    seconds = max(free, now) + speeds.step * workload.nbytes
    return StepCost(seconds, seconds - _busy(workload, workers))


def fsdp_cost(workload: Workload, workers: Workers, ring: Ring, speeds: Rates, word_bytes: float = 4.0) -> StepCost:
    """FSDP's step, parameters gathered twice; each layer of the workload is a unit."""
    layers, now, free = workload.layers, 0.0, 0.0
    here = [0.0] * len(layers)  # when a unit has been gathered

    def gather(index: int) -> None:
        nonlocal free
        if 0 <= index < len(layers):
            free = max(free, now) + ring.seconds(word_bytes * layers[index].words, 1)
            here[index] = free

    gather(0)
    for index, layer in enumerate(layers):
        gather(index + 1)
        now = max(now, here[index]) + layer.forward * workers.slowness
    now += _replicas_before(workload, workers)
    gather(len(layers) - 1)
    for index in reversed(range(len(layers))):
        gather(index - 1)
        now = max(now, here[index]) + layers[index].backward * workers.slowness
        free = max(free, now) + ring.seconds(word_bytes * layers[index].words, 1)
    seconds = max(free, now) + speeds.step * workload.nbytes / ring.members
    return StepCost(seconds, seconds - _busy(workload, workers))


def _replicas_before(workload: Workload, workers: Workers) -> float:
    """Seconds of the replicas that a worker adds up without sending (`no_sync`), before the last one."""
    return (workers.replicas - 1) * workload.compute * workers.slowness


def _busy(workload: Workload, workers: Workers) -> float:
    return workers.replicas * workload.compute * workers.slowness


def ring_bytes(nbytes: float, members: int) -> float:
    """What each member of a ring sends, and receives: 2(n-1)/n K. Example: 4 members send 1.5 K each.

    Patarasuk and Yuan, 2009: a reduce-scatter and an all-gather, each of n-1 rounds of K/n. No all-reduce among the
    members alone sends less. (Google's page on Vertex AI's Reduction Server calls this "twice the data", which it is
    for large n only: for n = 2 it is K.)
    """
    return 2 * (members - 1) / members * nbytes


# Bytes that each role holds for a model, fp32 with AdamW: the table of docs/memory.md as functions.
#
# Activations are in none of them: they are the same in every layout.


_PARAMETER, _GRADIENT, _MOMENTS = 4, 4, 8


class Footprint(msgspec.Struct, frozen=True):
    """Bytes on a worker's device, in the memory of its host (for each worker), on each server; 0: nothing there."""

    device: float
    host: float = 0.0
    server: float = 0.0


def ddp_memory(words: float) -> Footprint:
    """DDP with `gradient_as_bucket_view`: 16 bytes a parameter on every device."""
    return Footprint((_PARAMETER + _GRADIENT + _MOMENTS) * words)


def fsdp_memory(words: float, ranks: int, largest: float) -> Footprint:
    """FSDP2: 16 bytes over the ranks, and the largest unit (words) gathered."""
    return Footprint((_PARAMETER + _GRADIENT + _MOMENTS) * words / ranks + _PARAMETER * largest)


def servers_memory(
    words: float, servers: int, *, replication: int = 1, ranks: int = 1, largest: float = 0.0
) -> Footprint:  # fmt: skip
    """Through servers: parameters, a layer's gradients, a buffer on the host; there masters, moments, two versions.

    `ranks`: of each worker, which shards the model among them by FSDP2; its buffer is on the host of rank 0.
    """
    here = (_PARAMETER + _GRADIENT) / ranks * words if ranks > 1 else _PARAMETER * words
    there = (_PARAMETER + _MOMENTS + 2 * _PARAMETER) * replication * words / servers
    return Footprint(here + _GRADIENT * largest, _PARAMETER * words / ranks, there)
