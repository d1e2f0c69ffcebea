"""tune="auto": from step times to views with another pace."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from rallypoint.config import record_of, resolve
from rallypoint.config.keys import check_settings
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.plan.tuning import Tuning
from rallypoint.core.view import Assignment, Member, StandingOrders, Tried, View, ViewNumber
from rallypoint.errors import ConfigError

RATE = 100.0  # Mbit/s; a step of K = 12.5 MB takes 1 s at that rate


def record(tune: str) -> JobRecord:
    config = resolve({"replicas": 2, "steps": 1000, "tune": tune})
    return record_of(config, build_layout([TensorSpec("w", (3_125_000,), "float32", 0)], config.network.shard_bytes))


def view(**more: object) -> View:
    number = ViewNumber(1, 1)
    first = View(
        number=number, generation=number, workers=(Member("w0", "a"), Member("w1", "b")),
        servers=(Member("s0", "c"), Member("s1", "d")), assignments=(Assignment(0, {"w0": (0,), "w1": (1,)}),),
        primary={n: f"s{n % 2}" for n in range(12)},
    )  # fmt: skip
    return msgspec.structs.replace(first, **more)


def paced(seen: View) -> float:
    """Seconds of a step: 1.5 without a pace; with one below the rate as long as it says, beyond it as without."""
    pace = seen.paced(0.0)
    return 1.5 if not pace or pace > RATE else RATE / pace


def limited(seen: View) -> float:
    """Seconds of a step: 1.5 without a limit to what is on its way, or with too much; 1.1 with less; with little 2."""
    kib = seen.in_flight(0) / 1024
    return 1.5 if not kib or kib > 256 else 1.1 if kib >= 64 else 2.0


def play(
    tuning: Tuning, job: JobRecord, steps: int = 600, cost: Callable[[View], float] = paced
) -> tuple[View, list[str]]:
    now, seen, said = 0.0, view(), list[str]()
    for step in range(steps):
        now += cost(seen)
        tuning.reached(step, now)
        if (decided := tuning.look(seen, job)) is not None:
            seen = msgspec.structs.replace(seen, orders=StandingOrders(tuned=decided.values))
            said += [decided.said] * bool(decided.said)
    return seen, said


def test_a_job_that_is_tuned_ends_with_a_pace_just_below_its_links_rate() -> None:
    seen, said = play(Tuning(), record("auto"))
    pace = seen.orders.tuned["pace_mbit"]
    assert 0.9 * RATE <= pace.value == pace.kept <= RATE
    assert any(", kept" in line for line in said)
    assert said[-1].endswith(f"tuning has ended: no in_flight_bytes, pace_mbit {pace.kept:g} Mbit/s")


def test_what_may_be_in_flight_is_tuned_first_and_a_pace_after_it_from_there() -> None:
    seen, said = play(Tuning(), record("auto"), cost=limited)
    kept = seen.orders.tuned["in_flight_bytes"]
    assert 64 << 10 <= kept.value == kept.kept <= 256 << 10
    begun = [line for line in said if " is tuned: " in line]
    assert [line.partition(" ")[0] for line in begun] == ["in_flight_bytes", "pace_mbit"]
    assert "a step takes 1.5 s with no in_flight_bytes" in begun[0]
    assert "a step takes 1.1 s with no pace_mbit" in begun[1]
    assert said[-1].endswith(f"tuning has ended: in_flight_bytes {kept.kept / 1024:g} KiB, no pace_mbit")
    assert seen.orders.tuned["pace_mbit"] == Tried(0.0, 0.0)


def test_a_job_that_is_not_tuned_keeps_its_settings() -> None:
    assert play(Tuning(), record("off"), 60) == (view(), [])


def until(tuning: Tuning, job: JobRecord, there: Callable[[View], float]) -> View:
    """The first view in which `there` is not 0, in a job whose steps take 1.5 s."""
    now, seen = 0.0, view()
    for step in range(600):
        now += 1.5
        tuning.reached(step, now)
        if (decided := tuning.look(seen, job)) is not None:
            seen = msgspec.structs.replace(seen, orders=StandingOrders(tuned=decided.values))
        if there(seen):
            return seen
    raise AssertionError("it was never tried")


@pytest.mark.parametrize("name", ["in_flight_bytes", "pace_mbit"])
def test_a_member_that_comes_takes_the_trial_back(name: str) -> None:
    tuning, job = Tuning(), record("auto")
    seen = until(tuning, job, lambda seen: seen.setting(name, 0.0))
    more = msgspec.structs.replace(seen, workers=(*seen.workers, Member("w2", "e")))
    decided = tuning.look(more, job)
    assert decided.values[name] == Tried(0.0, 0.0)


def test_a_coordinator_that_goes_on_from_a_trial_goes_back_to_the_kept_values_and_tries_from_there() -> None:
    on_trial = view(orders=StandingOrders(
        tuned={"in_flight_bytes": Tried(65536.0, 65536.0), "pace_mbit": Tried(300.0, 80.0)}
    ))  # fmt: skip
    tuning = Tuning()
    decided = tuning.look(on_trial, record("auto"))
    assert decided.values == {"in_flight_bytes": Tried(65536.0, 65536.0), "pace_mbit": Tried(80.0, 80.0)}
    assert decided.said == "the trial of another pace_mbit ended with its coordinator"
    seen, now = msgspec.structs.replace(on_trial, orders=StandingOrders(tuned=decided.values)), 0.0
    for step in range(10):
        now += 1.25
        tuning.reached(step, now)
    begun = tuning.look(seen, record("auto"))
    assert (begun.values, begun.said.partition(":")[0]) == (seen.orders.tuned, "in_flight_bytes is tuned")
    assert tuning.tuner.best == 65536.0


def test_a_given_value_is_where_tuning_begins_and_none_is_among_what_is_tried() -> None:
    given = {"pace_mbit": 70.0, "in_flight_bytes": 1000}
    config = resolve({"replicas": 2, "steps": 1000, "tune": "auto", "network": given})
    job = record_of(config, record("auto").layout)
    for name, value in (("in_flight_bytes", 1000.0), ("pace_mbit", 70.0)):
        tuning = Tuning()
        until(tuning, job, lambda seen, name=name: name in seen.orders.tuned)
        assert tuning.tuner.best == value
        assert 0.0 in tuning.tuner.knob.candidates


def test_the_time_of_a_pause_is_no_steps_time() -> None:
    tuning, job = Tuning(), record("auto")
    tuning.look(view(), job)
    tuning.reached(1, 10.0)
    tuning.look(view(orders=StandingOrders(paused=2)), job)
    tuning.reached(2, 500.0)
    tuning.look(view(), job)
    for step in range(3, 11):
        tuning.reached(step, 500.0 + step)
    tuning.look(view(), job)
    assert max(tuning.tuner.knob.candidates) == 512 << 10  # 40 ms of a rate at which a step takes a second


def test_with_aggregators_nobody_is_paced() -> None:
    tuned = {"pace_mbit": Tried(80.0, 80.0)}
    assert view(orders=StandingOrders(tuned=tuned)).paced(70.0) == 80.0
    assert view().paced(70.0) == 70.0
    assert view(orders=StandingOrders(tuned=tuned), aggregators=(Member("a0", "e"),)).paced(70.0) == 0.0


def test_candidates_follow_from_the_links_of_servers_where_all_are_told() -> None:
    servers = (Member("s0", "c", link_mbit=1000.0), Member("s1", "d", link_mbit=400.0))
    tuning = Tuning()
    tuning.look(view(servers=servers), record("auto"))
    for step in range(10):
        tuning.reached(step, step * 1.5)
    tuning.look(view(servers=servers), record("auto"))
    assert tuning.tuner.knob.candidates[0] == 512 << 10  # 10 ms of 400 Mbit/s


def test_a_run_that_is_resumed_without_tuning_has_the_values_of_its_settings() -> None:
    decided = Tuning().look(view(orders=StandingOrders(tuned={"pace_mbit": Tried(300.0, 80.0)})), record("off"))
    assert decided.values == {}


@pytest.mark.parametrize("value", ["codec", ["codec"], True])
def test_what_changes_results_is_not_tuned_and_the_refusal_says_so(value: object) -> None:
    with pytest.raises(ConfigError, match=r"tune is .*one of off, auto\. What changes a job's results .* set it your"):
        resolve({"tune": value})
    with pytest.raises(ConfigError, match="never tried"):
        check_settings({"tune": value})


def test_after_tuning_has_ended_other_numbers_of_members_are_tuned_anew_from_the_setting() -> None:
    tuning, job = Tuning(), record("auto")
    seen, said = play(tuning, job)
    assert "tuning has ended" in said[-1]
    fewer = msgspec.structs.replace(seen, servers=seen.servers[:1], primary=dict.fromkeys(seen.primary, "s0"))
    first = tuning.look(fewer, job)
    assert first is None, "the first look notes the view"
    decided = tuning.look(fewer, job)
    assert (decided.values, tuning.tuner) == ({}, None)
    assert decided.said == "there are other numbers of members now: in_flight_bytes and pace_mbit are tuned anew"
    assert tuning.look(msgspec.structs.replace(fewer, orders=StandingOrders()), job) is None
