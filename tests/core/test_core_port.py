"""The rate of a port is found from what connections send, and nothing is found where there is none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.tuning.port import AGAIN_S, ENOUGH, GIVE_UP_S, PACED, SAMPLE_S, PortMeter, PortPacer, Sent

PORT = 25e6  # bytes a second


class Sending:
    """Connections that together send at `rate(second)` bytes a second, held back by the network for that part of the
    time that `held(second)` says."""

    def __init__(
        self, rate: Callable[[float], float] = lambda _: PORT, held: Callable[[float], float] = lambda _: 1.0
    ) -> None:
        self.rate, self.held = rate, held
        self.now, self.links = 100.0, {"a": Sent(0, 0.0), "b": Sent(7 << 30, 55.0)}

    def goes_on(self, seconds: float = SAMPLE_S) -> dict[str, Sent]:
        """What they have sent after so many seconds more."""
        nbytes, held_back = round(self.rate(self.now) * seconds / 2), self.held(self.now) * seconds
        self.links = {name: Sent(s.acknowledged + nbytes, s.held_back + held_back) for name, s in self.links.items()}
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


def test_short_steps_say_nothing_of_the_port() -> None:
    """A third of the time is spent sending: as a rate over all of the time that would be a third of what a port
    carries."""
    assert measured(Sending(lambda _: PORT / 3, lambda _: 0.33), seconds=30.0) == 0.0


def test_the_peers_window_is_not_the_network() -> None:
    assert measured(Sending(held=lambda _: 0.5), seconds=30.0) == 0.0


def test_where_rates_have_no_plateau_nothing_is_known() -> None:
    """They rise for 3 s, from a tenth to the whole, and again."""
    assert measured(Sending(lambda second: PORT * (0.1 + 0.3 * (second % 3.0))), seconds=40.0) == 0.0


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
            links = {**links, f"new{sample}": Sent(5 << 30, 40.0)}
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
    assert rate == pytest.approx(PACED * PORT, rel=0.001)


def test_it_measures_again_unpaced_and_a_faster_link_is_found() -> None:
    pacer = PortPacer()
    sending = Sending(lambda second: 2 * PORT if second > 150.0 else PORT)
    first, *_, last = played(pacer, sending, AGAIN_S + 20.0)
    assert first == (100.0, 0.0)
    assert last[1] == pytest.approx(2 * PACED * PORT, rel=0.001)
    assert last[0] > 100.0 + AGAIN_S


def test_a_port_that_shows_no_rate_any_more_keeps_the_one_from_before() -> None:
    pacer = PortPacer()
    sending = Sending(held=lambda second: float(second < 150.0))
    *_, (lifted, nothing), (when, rate) = played(pacer, sending, AGAIN_S + GIVE_UP_S + 20.0)
    assert nothing == 0.0
    assert rate == pytest.approx(PACED * PORT, rel=0.001)
    assert when - lifted == pytest.approx(GIVE_UP_S, abs=1.0)


def test_what_was_found_counts_at_once_when_somebody_sends_again() -> None:
    pacer, sending = PortPacer(), Sending()
    played(pacer, sending, 20.0)
    pacer.rest()
    sending.goes_on(30.0)
    (_, rate), *more = played(pacer, sending, 20.0)
    assert rate == pytest.approx(PACED * PORT, rel=0.001)
    assert not more


def test_a_rest_in_the_middle_of_measuring_forgets_what_was_measured() -> None:
    pacer, sending = PortPacer(), Sending()
    played(pacer, sending, 1.0)
    pacer.rest()
    assert pacer.rate == 0.0
    (_, before), (when, _) = played(pacer, sending, 20.0)
    assert before == 0.0
    assert when - 101.0 > ENOUGH * SAMPLE_S
