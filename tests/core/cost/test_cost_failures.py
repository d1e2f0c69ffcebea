"""How often to take snapshots, and what failures leave of the time."""

from __future__ import annotations

import math

import pytest

from rallypoint.core.plan.failures import NEVER, daly_period, elastic_goodput, goodput

HOUR, DAY = 3600.0, 86400.0


def test_dalys_period_comes_near_to_youngs_for_cheap_snapshots_and_never_exceeds_the_mtbf() -> None:
    assert daly_period(1.0, DAY) == pytest.approx(math.sqrt(2 * DAY), rel=5e-3)
    assert daly_period(3 * HOUR, HOUR) == HOUR
    assert daly_period(1.0, NEVER) == NEVER


@pytest.mark.parametrize("cost", [1.0, 30.0, 300.0])
def test_dalys_period_is_where_the_goodput_is_best(cost: float) -> None:
    """To a percent of the best: it is an approximation of that optimum (Daly, 2006, section 4)."""
    mtbf, restart = 3 * HOUR, 120.0
    best = daly_period(cost, mtbf)
    reached = goodput(best, cost, restart, mtbf)
    for other in (0.5 * best, 0.8 * best, 1.25 * best, 2 * best):
        assert goodput(other, cost, restart, mtbf) < reached
    found = max(goodput(best * factor / 100, cost, restart, mtbf) for factor in range(60, 160))
    assert reached == pytest.approx(found, rel=1e-2)


def test_goodput_for_rare_failures_is_what_the_first_order_says() -> None:
    """Lost: the snapshots, half a period and a restart for each failure."""
    period, cost, restart, mtbf = 600.0, 2.0, 60.0, 10 * DAY
    lost = cost / period + (period / 2 + restart) / mtbf
    assert goodput(period, cost, restart, mtbf) == pytest.approx(1 - lost, abs=1e-4)


def test_llama_3s_failures_leave_more_than_nine_tenths() -> None:
    """419 unexpected interruptions in 54 days on 16,384 GPUs; "higher than 90 % effective training time" (Grattafiori
    et al., 2024, section 3.3.4). Their snapshot's cost and restart are not told: 1 minute and 10 are assumed here."""
    mtbf = 54 * DAY / 419
    assert mtbf == pytest.approx(3.1 * HOUR, rel=0.01)
    assert 0.80 < goodput(daly_period(60.0, mtbf), 60.0, 600.0, mtbf) < 0.95


def test_without_failures_nothing_is_lost_and_without_snapshots_all_is() -> None:
    assert goodput(NEVER, 1.0, 1.0, NEVER) == 1.0
    assert goodput(100.0, 1.0, 1.0, NEVER) == pytest.approx(100 / 101)
    assert goodput(NEVER, 1.0, 1.0, HOUR) == 0.0
    assert goodput(1e9, 1.0, 1.0, 1.0) == 0.0  # and no overflow
    assert elastic_goodput(1.0, NEVER) == 1.0


def test_a_job_that_goes_back_nowhere_loses_its_stalls_only() -> None:
    assert elastic_goodput(10.0, 90.0) == pytest.approx(0.9)
    assert math.isclose(1 - elastic_goodput(0.2, DAY), 0.2 / DAY, rel_tol=1e-3)
