"""Samples of members' machines and links: rates from counters, bounded, and under the members' own names."""

from __future__ import annotations

import math

import msgspec
import pytest

from rallypoint.coordinator.announcer import Samples
from rallypoint.core.protocol import MOST_LINKS, GpuSample, LinkSample, Sampled, decode, encode
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.errors import ProtocolError
from rallypoint.net.sampling import EVERY_S, Sampler, sampler_for
from rallypoint.net.tcp import TcpTransport
from rallypoint.observe.usage import LinkUsage, Usage, usage

LINKS = {"10.0.0.8:1": LinkSample(0.001, 100.0, 200.0), "10.0.0.9:1": LinkSample(0, 1, 1)}
SAMPLE = Sampled(5.0, 0.5, 6, 8, links=LINKS)


def reading(
    busy: float, links: dict[str, LinkUsage], waited: float = 0.0, gpus: tuple[GpuSample, ...] = ()
) -> list[object]:
    return [Usage(busy, 2 * busy, 6, 8, 0, int(100 * busy), 10, 20, busy, 5, gpus), links, waited]


def sampler(*readings: list[object]) -> Sampler:
    usages, links, waits = [list(column) for column in zip(*readings, strict=True)]
    return Sampler(*(lambda values=values: values.pop(0) for values in (usages, links, waits)))  # type: ignore[arg-type, misc]


def test_a_sample_has_the_rates_since_the_last_one() -> None:
    one = sampler(
        reading(0.0, {"a:1": LinkUsage(0, 0)}),
        reading(10.0, {"a:1": LinkUsage(1000, 500, 0.002), "b:1": LinkUsage(10, 0)}, 2.5, (GpuSample(0.75, 1, 2),)),
    )
    assert one.sample(100.0) is None
    assert one.sample(100.0 + EVERY_S - 0.1) is None
    sample = one.sample(105.0)
    assert (sample.seconds, sample.cpu, sample.own_cpu, sample.waited_for_data) == (5.0, 0.5, 2.0, 0.5)
    assert (sample.disk_written, sample.network_sent, sample.memory, sample.memory_total) == (200.0, 0.0, 6, 8)
    assert sample.links == {"a:1": LinkSample(0.002, 200.0, 100.0), "b:1": LinkSample(0.0, 2.0, 0.0)}
    assert sample.gpus[0].busy == 0.75
    assert decode(encode(sample)) == sample


def test_a_link_that_was_made_anew_counts_from_its_beginning() -> None:
    one = sampler(reading(0.0, {"a:1": LinkUsage(9000, 9000)}), reading(1.0, {"a:1": LinkUsage(500, 50)}))
    one.sample(0.0)
    sample = one.sample(5.0)
    assert sample.links == {"a:1": LinkSample(0.0, 100.0, 10.0)}


def test_only_the_busiest_links_are_told() -> None:
    many = {f"h{i}:1": LinkUsage(1000 * i, 0) for i in range(3 * MOST_LINKS)}
    one = sampler(reading(0.0, {}), reading(1.0, many))
    one.sample(0.0)
    sample = one.sample(5.0)
    assert len(sample.links) == MOST_LINKS
    assert f"h{3 * MOST_LINKS - 1}:1" in sample.links


def test_this_machine_and_its_links_can_be_read() -> None:
    here, there = TcpTransport(), TcpTransport()
    listener = there.listen("127.0.0.1:0")
    connection = here.connect(listener.address, 10.0)
    accepted = listener.accept()
    try:
        one = sampler_for(here, lambda: 0.0)
        assert one.sample(0.0) is None
        connection.send(bytes(1000))
        accepted.recv_into(memoryview(bytearray(1000)))
        sample = one.sample(5.0)
    finally:
        connection.close()
        accepted.close()
        listener.close()
    assert sample.links[listener.address].sent == 200.0
    assert 0.0 < sample.links[listener.address].round_trip < 1.0
    assert 0.0 <= sample.cpu <= 1.0
    assert 0 < sample.memory < sample.memory_total
    assert here.traffic.links() == there.traffic.links() == {}  # closed; and it is the dialing side that tells
    decode(encode(sample))


class FakeNvml:
    """What `usage` asks of pynvml."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, count: int, *, fails: bool = False) -> None:
        self.nvmlDeviceGetCount, self._fails = lambda: count, fails

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return msgspec.defstruct("Memory", [("used", int), ("total", int)])(handle, 100)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:
        if self._fails:
            raise self.NVMLError
        return msgspec.defstruct("Rates", [("gpu", int)])(50)


def test_gpus_are_read_where_something_reads_them() -> None:
    assert usage(FakeNvml(2)).gpus == (GpuSample(0.5, 0, 100), GpuSample(0.5, 1, 100))
    assert usage(FakeNvml(2, fails=True)).gpus == ()
    assert len(usage(FakeNvml(100)).gpus) == 16


@pytest.mark.parametrize("wrong", [
    {"cpu": 1.5}, {"cpu": math.nan}, {"memory": -1}, {"disk_read": math.inf}, {"own_cpu": -1.0}, {"member": "\x1b[2J"},
    {"links": {f"h{i}": LinkSample(0, 0, 0) for i in range(MOST_LINKS + 1)}}, {"seconds": -1.0},
])  # fmt: skip
def test_a_sample_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(msgspec.structs.replace(SAMPLE, **wrong)))


def view(members: int = 2) -> View:
    workers = tuple(Member(f"worker{i}", "here") for i in range(members))
    servers = (Member("server0", "there", "10.0.0.8:1"),)
    return View(ViewNumber(1, 1), ViewNumber(), workers, servers, (), {})


def test_a_sample_is_kept_under_its_sender_s_name_with_links_by_member() -> None:
    kept = Samples().take("worker1", msgspec.structs.replace(SAMPLE, member="worker0", host="elsewhere"), view(), 1.0)
    assert (kept.member, kept.host) == ("worker1", "here")
    assert kept.links == {"server0": LinkSample(0.001, 100.0, 200.0)}


def test_who_says_too_much_or_has_no_part_is_not_kept() -> None:
    samples = Samples()
    assert samples.take("worker0", SAMPLE, None, 0.0) is None
    assert samples.take("stranger", SAMPLE, view(), 0.0) is None
    assert sum(samples.take("worker0", SAMPLE, view(), t / 10) is not None for t in range(100)) == 3
    many, large = Samples(), view(1000)
    said = [many.take(f"worker{i}", SAMPLE, large, float(t)) for t in range(0, 100, 5) for i in range(0, 1000, 10)]
    assert sum(one is not None for one in said) == 200  # each of them once in 50 s
