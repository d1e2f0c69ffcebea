"""The rate of a port is found from what connections send, and nothing is found where there is none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.plan.port import AGAIN_S, ENOUGH, GIVE_UP_S, LEAST, PACE, SAMPLE_S, PortMeter, PortPacer, Sent
from rallypoint.core.view import Member, View, ViewNumber

PORT = 25e6  # bytes a second


class Sending:
    """Two connections that together send at `rate(second)` bytes a second, held back by the network for that part of
    the time that `held(second)` says; bytes wait if `waits(second)`. Of these, "a" alone sends if `alone(second)`."""

    def __init__(
        self, rate: Callable[[float], float] = lambda _: PORT, held: Callable[[float], float] = lambda _: 1.0,
        waits: Callable[[float], bool] = lambda _: True, alone: Callable[[float], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        self.rate, self.held, self.waits, self.alone = rate, held, waits, alone
        self.now, self.links = 100.0, {"a": Sent(0, 0.0, True, 0.5), "b": Sent(7 << 30, 55.0, True, 0.5)}

    def goes_on(self, seconds: float = SAMPLE_S) -> dict[str, Sent]:
        """What they have sent after so many seconds more."""
        alone, nbytes = self.alone(self.now), self.rate(self.now) * seconds
        self.links = {
            name: Sent(
                sent.acknowledged + (round(nbytes / (1 if alone else 2)) if name == "a" or not alone else 0),
                sent.held_back + self.held(self.now) * seconds,
                self.waits(self.now) and (name == "a" or not alone), 0.5,
            )
            for name, sent in self.links.items()
        }  # fmt: skip
        self.now += seconds
        return self.links


def measured(sending: Sending, seconds: float = 10.0) -> float:
    meter = PortMeter()
    for _ in range(round(seconds / SAMPLE_S)):
        meter.sampled(sending.now, sending.goes_on())
    return meter.rate


def test_a_full_port_shows_its_rate() -> None:
    assert measured(Sending()) == pytest.approx(PORT, rel=0.001)


def test_before_enough_windows_nothing_is_known() -> None:
    assert measured(Sending(), seconds=ENOUGH * SAMPLE_S) == 0.0


def test_the_pauses_of_a_step_do_not_count() -> None:
    """0.6 s of sending, 0.9 s of computing."""
    sends = lambda second: float(second % 1.5 < 0.6)  # noqa: E731
    found = measured(Sending(lambda second: PORT * sends(second), sends), seconds=30.0)
    assert found == pytest.approx(PORT, rel=0.02)


@pytest.mark.parametrize("sending", [
    # a third of the time: as a rate over all of the time that would be a third of what a port carries
    Sending(lambda _: PORT / 3, lambda _: 0.33),
    Sending(held=lambda _: 0.5),
    # 1 MB each 55 ms, acknowledged after 50: some bytes are on their way nearly always
    Sending(lambda _: 20e6, waits=lambda second: second % 0.055 < 0.003),
], ids=["short steps", "the peer's window", "messages on a long way while none waits"])  # fmt: skip
def test_this_says_nothing_of_the_port(sending: Sending) -> None:
    assert measured(sending, seconds=30.0) == 0.0


def test_links_to_members_that_only_stand_by_change_nothing() -> None:
    sending, meter = Sending(), PortMeter()
    for _ in range(200):
        meter.sampled(sending.now, {**sending.goes_on(), "c": Sent(9, 0.0, False, 0.5), "d": Sent(9, 0.0, False, 0.5)})
    assert meter.rate == pytest.approx(PORT, rel=0.001)


@pytest.mark.parametrize("begins", [0.0, 1.0, 3.0, 6.0])
def test_a_slow_link_that_sends_alone_for_seconds_is_not_taken_for_the_port(begins: float) -> None:
    """Steps of 8 s, in 1.5 s of which all links send; then one of them goes on, at a fortieth of what the port carries.
    """
    full = lambda second: (second + begins) % 8.0 < 1.5  # noqa: E731
    sending = Sending(lambda second: PORT if full(second) else PORT / 40, alone=lambda second: not full(second))
    assert measured(sending, seconds=40.0) == pytest.approx(PORT, rel=0.03)


@pytest.mark.parametrize("period", [1.5, 2.4, 3.0])
def test_where_rates_have_no_plateau_nothing_is_known(period: float) -> None:
    """They rise from a tenth to the whole, and again."""
    sending = Sending(lambda second: PORT * (0.1 + 0.9 * (second % period) / period))
    assert measured(sending, seconds=40.0) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_flows_that_lose_some_time_show_the_rate_of_the_times_in_which_the_port_is_full(seed: int) -> None:
    """A third of the time a flow waits for another worker, so the sum is lower."""
    chance = random.Random(seed)
    parts = [chance.choice([1.0, 1.0, chance.uniform(0.3, 0.9)]) for _ in range(400)]
    found = measured(Sending(lambda second: PORT * parts[int(second / 0.4) % 400]), seconds=60.0)
    assert 0.93 * PORT <= found <= 1.001 * PORT


def test_connections_that_end_and_begin_change_nothing() -> None:
    sending, meter = Sending(), PortMeter()
    for sample in range(200):
        links = sending.goes_on()
        if sample % 10 == 3:
            links = {**links, f"new{sample}": Sent(5 << 30, 40.0, True, 0.01)}
        meter.sampled(sending.now, links)
    assert meter.rate == pytest.approx(PORT, rel=0.001)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60), st.floats(1e3, 1e10))
def test_what_is_found_is_never_more_than_what_was_sent_in_any_window(parts: list[float], port: float) -> None:
    found = measured(Sending(lambda second: port * parts[int(second * 3) % len(parts)]), seconds=20.0)
    assert found <= port * max(parts) * 1.001 + 100  # (whole bytes)


# ---- when to measure, and the pace ----


def played(pacer: PortPacer, sending: Sending, seconds: float) -> list[tuple[float, float]]:
    """The pace from when on: (second, bytes a second) for each change."""
    ends, found = sending.now + seconds, [(sending.now, pacer.rate)]
    while sending.now < ends:
        wait = pacer.look(sending.now, sending.links)
        if pacer.rate != found[-1][1]:
            found.append((sending.now, pacer.rate))
        sending.goes_on(min(wait, ends - sending.now))
    return found


def test_nothing_is_paced_until_the_rate_is_known_and_then_a_little_more_than_is_found() -> None:
    (_, before), (when, rate) = played(PortPacer(), Sending(), 20.0)
    assert before == 0.0
    assert when - 100.0 < 5.0
    assert rate == pytest.approx(PACE * PORT, rel=0.001)


def test_it_measures_again_unpaced_and_a_faster_link_is_found() -> None:
    pacer = PortPacer()
    sending = Sending(lambda second: 2 * PORT if second > 150.0 else PORT)
    first, *_, last = played(pacer, sending, AGAIN_S + 20.0)
    assert first == (100.0, 0.0)
    assert last[1] == pytest.approx(2 * PACE * PORT, rel=0.001)
    assert last[0] > 100.0 + AGAIN_S


def test_a_port_that_shows_no_rate_any_more_is_not_paced() -> None:
    """Else a rate from a busy time would stay for ever, where steps are too short to show another."""
    pacer = PortPacer()
    sending = Sending(held=lambda second: float(second < 150.0))
    _, (_, rate), *later = played(pacer, sending, AGAIN_S + GIVE_UP_S + 20.0)
    assert rate == pytest.approx(PACE * PORT, rel=0.001)
    assert [found for _, found in later] == [0.0]
    assert pacer.rate == 0.0


def test_a_very_slow_port_is_not_paced() -> None:
    assert played(PortPacer(), Sending(lambda _: 0.9 * LEAST), 40.0) == [(100.0, 0.0)]


def test_what_was_found_counts_at_once_when_somebody_sends_again() -> None:
    pacer, sending = PortPacer(), Sending()
    played(pacer, sending, 20.0)
    pacer.rest()
    sending.goes_on(30.0)
    (_, rate), *more = played(pacer, sending, 20.0)
    assert rate == pytest.approx(PACE * PORT, rel=0.001)
    assert not more


def test_a_rest_in_the_middle_of_measuring_forgets_what_was_measured() -> None:
    pacer, sending = PortPacer(), Sending()
    played(pacer, sending, 1.0)
    pacer.rest()
    assert pacer.rate == 0.0
    (_, before), (when, _) = played(pacer, sending, 20.0)
    assert before == 0.0
    assert when - 101.0 > ENOUGH * SAMPLE_S


# ---- Which part of a worker's port each of its links gets ----


SERVERS = tuple(Member(f"s{number}", "h", f"h:{number}") for number in range(4))


def parts(homes: list[int]) -> list[float]:
    """The parts of s0 to s3, where shard i is on server `homes[i]`."""
    primary = {shard: f"s{home}" for shard, home in enumerate(homes)}
    found = View(ViewNumber(1, 1), ViewNumber(1, 1), (), SERVERS, (), primary).port_parts()
    return [found[server.id] for server in SERVERS]


def test_servers_with_equally_many_shards_get_equal_parts() -> None:
    assert parts([0, 1, 2, 3] * 3) == [0.25] * 4


def test_a_server_with_more_shards_gets_more_and_one_with_fewer_not_less_than_an_equal_part() -> None:
    """Its link may have become faster: at its part of the shards it could not show that."""
    assert parts([0] * 4 + [1] * 2 + [2] + [3]) == [0.5, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("homes", [[], [0, 0]])
def test_a_server_without_shards_gets_an_equal_part(homes: list[int]) -> None:
    assert parts(homes)[3] == 0.25
