"""What should run, what has died, what to start: decisions without a process, with time as a number."""

from __future__ import annotations

import pytest

from rallypoint.launch.engines.cluster import Exit
from rallypoint.launch.supervisor import (
    HOLD_S,
    DrainProcess,
    Fail,
    RestartLimits,
    RunOver,
    StartProcess,
    Supervisor,
    Warn,
)

KILLED, WELL, ERROR = Exit(137, "SIGKILL"), Exit(0), Exit(1)


def again(name: str, pause: str = "") -> list[Warn]:
    return [Warn(f"{name} was killed (SIGKILL): starting another{pause}")]


def begun(workers: int = 1, *, limits: RestartLimits | None = None, **others: int) -> Supervisor:
    """A run whose coordinator has been started at time 0."""
    supervisor = Supervisor({"worker": workers, "server": 1, **others}, limits or RestartLimits())
    supervisor.begin(0.0)
    return supervisor


def running(workers: int = 2, servers: int = 1, *, limits: RestartLimits | None = None, **others: int) -> Supervisor:
    """One whose processes have all been started at time 0."""
    supervisor = begun(workers, server=servers, limits=limits, **others)
    supervisor.listening(0.0)
    supervisor.members(supervisor.running)
    return supervisor


def test_the_coordinator_is_started_first_and_the_others_once_it_listens() -> None:
    supervisor = Supervisor({"worker": 2, "server": 1})
    assert supervisor.begin(0.0) == [StartProcess("coordinator", "coordinator")]
    assert supervisor.due(1.0) == []
    assert supervisor.listening(2.0) == [StartProcess("server0", "server"), StartProcess("worker0", "worker"),
                                         StartProcess("worker1", "worker")]  # fmt: skip
    assert supervisor.listening(3.0) == []


def test_a_dead_worker_is_replaced_under_a_new_name() -> None:
    supervisor = running()
    assert supervisor.ended("worker1", KILLED, 20.0) == again("worker1")
    assert supervisor.due(20.0) == [StartProcess("worker2", "worker")]
    assert supervisor.due(20.0) == []


def test_status_75_means_another_one_only_from_a_process_that_has_asked_for_it() -> None:
    temporary = Exit(75)
    assert not temporary.died
    assert not temporary.having_asked(False).died
    assert temporary.having_asked(True).died
    assert not Exit(0).having_asked(True).died  # the job was over before it had to go
    assert running().ended("worker1", temporary.having_asked(True), 20.0) == [
        Warn("worker1 ended with status 75: starting another")
    ]


def test_a_coordinator_that_dies_before_it_listens_is_started_again_like_any_other() -> None:
    supervisor = begun()
    assert supervisor.ended("coordinator", KILLED, 0.1) == again("coordinator")
    assert supervisor.due(0.1) == [StartProcess("coordinator", "coordinator")]
    assert len(supervisor.listening(1.0)) == 2


def test_a_coordinator_that_cannot_be_started_in_the_place_of_another_is_tried_again() -> None:
    """For want of processes or file descriptors, say."""
    supervisor, not_started = running(), Exit(1, reason="Resource temporarily unavailable", started=False)
    supervisor.ended("coordinator", KILLED, 20.0)
    assert supervisor.due(20.0) == [StartProcess("coordinator", "coordinator")]
    said = "coordinator could not be started: Resource temporarily unavailable: starting another"
    assert supervisor.ended("coordinator", not_started, 20.0) == [Warn(f"{said} in 0.2 s")]
    assert supervisor.due(20.2) == [StartProcess("coordinator", "coordinator")]
    now = 20.2
    while not isinstance((decisions := supervisor.ended("coordinator", not_started, now))[0], Fail):
        now += 3.0
        assert supervisor.due(now) == [StartProcess("coordinator", "coordinator")]
    assert now > 50.0  # almost as long as members wait for one
    assert "it is not started again: 13 times in a row the coordinator died soon" in decisions[0].reason


def test_the_first_coordinator_that_cannot_be_started_fails_the_run() -> None:
    supervisor = begun()
    supervisor.ended("coordinator", Exit(127, reason="no such program", started=False), 0.0)
    assert supervisor.due(10.0) == [Fail("coordinator could not be started: no such program")]


def test_a_coordinator_that_dies_quickly_again_and_again_is_given_up_with_the_cause() -> None:
    supervisor = running(limits=RestartLimits(quick_deaths=2))
    now = 0.0
    for _ in range(2):
        supervisor.ended("coordinator", KILLED, now)
        now += 5.0
        assert supervisor.due(now) == [StartProcess("coordinator", "coordinator")]
    assert supervisor.ended("coordinator", KILLED, now) == [
        Fail("coordinator was killed (SIGKILL); it is not started again: 3 times in a row the coordinator died soon")
    ]


def test_the_pause_before_a_restart_is_said() -> None:
    supervisor = running(workers=1)
    said = []
    for n in range(5):
        said += supervisor.ended(f"worker{n}", KILLED, 10.0 * n)
        supervisor.due(10.0 * n + 3.0)
    pauses = ("", " in 0.2 s", " in 1 s", " in 3 s", " in 3 s")
    assert said == [warning for n, pause in enumerate(pauses) for warning in again(f"worker{n}", pause)]


def test_many_that_die_at_once_have_died_once() -> None:
    """An OOM killer or a switch takes all of them: that is no reason to give up at the first time."""
    supervisor = running(workers=40)
    for n in range(40):
        assert supervisor.ended(f"worker{n}", KILLED, 5.0) == again(f"worker{n}")
    assert len(supervisor.due(5.0)) == 40
    for n in range(40, 80):
        assert supervisor.ended(f"worker{n}", KILLED, 6.0) == again(f"worker{n}", " in 0.2 s")
    assert supervisor.due(6.1) == []
    assert len(supervisor.due(6.2)) == 40


def test_a_death_after_a_long_life_is_no_quick_one() -> None:
    supervisor = running(workers=1, limits=RestartLimits(quick_deaths=1))
    for n in range(5):
        assert supervisor.ended(f"worker{n}", KILLED, 100.0 * (n + 1)) == again(f"worker{n}")
        assert supervisor.due(100.0 * (n + 1)) == [StartProcess(f"worker{n + 1}", "worker")]


def test_a_coordinator_that_never_listens_fails_the_run() -> None:
    supervisor = begun(limits=RestartLimits(listen_s=10.0))
    assert supervisor.due(10.0) == []
    assert supervisor.due(10.1) == [Fail("the coordinator has not begun to listen within 10 s")]


def test_a_member_that_ends_in_an_error_fails_the_run_once_its_own_words_had_time_to_come() -> None:
    supervisor = running()
    assert supervisor.ended("worker0", ERROR, 5.0) == []
    assert supervisor.due(5.1) == []
    assert supervisor.due(5.5) == [Fail("worker0 ended with status 1")]


def test_a_script_that_fails_before_it_joins_fails_the_run_at_once() -> None:
    supervisor = begun(workers=2)
    supervisor.listening(0.0)
    supervisor.ended("worker1", ERROR, 1.0)
    assert supervisor.due(1.5) == [Fail("worker1 ended with status 1")]


WITHOUT_IT = "before it took part; the job goes on without it; others are tried now and then"


@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_replacement_that_cannot_join_does_not_end_a_job_that_runs_well(role: str) -> None:
    """It is tried again, less and less often, and said once."""
    supervisor = running(workers=2, servers=2)
    supervisor.ended(f"{role}1", KILLED, 20.0)
    assert supervisor.due(20.0) == [StartProcess(f"{role}2", role)]
    now, said, starts = 21.0, [], []
    for n in range(2, 30):
        said += supervisor.ended(f"{role}{n}", ERROR, now)
        began = now
        while not (decisions := supervisor.due(now)):
            now += 0.5
        assert decisions == [StartProcess(f"{role}{n + 1}", role)]
        starts.append(now - began)
    assert said == [Warn(f"{role}2 ended with status 1 {WITHOUT_IT}")]
    assert starts[:6] == [1.0, 2.0, 5.0, 10.0, 20.0, 60.0]
    assert max(starts) == 60.0
    supervisor.members([f"{role}30"])
    supervisor.ended(f"{role}30", KILLED, now + 100.0)
    assert supervisor.due(now + 100.0) == [StartProcess(f"{role}31", role)]
    assert supervisor.ended(f"{role}31", ERROR, now + 101.0), "another time is said again"


def test_a_server_that_dies_again_and_again_before_it_joins_does_not_end_a_job_that_runs_well() -> None:
    supervisor = running(servers=2, limits=RestartLimits(quick_deaths=2))
    now, name = 20.0, "server1"
    for n in range(2, 12):
        assert not any(isinstance(d, Fail) for d in supervisor.ended(name, KILLED, now))
        while not (decisions := supervisor.due(now)):
            now += 0.5
        name = f"server{n}"
        assert decisions == [StartProcess(name, "server")]


def test_an_aggregator_that_fails_does_not_end_the_job_which_does_not_need_it() -> None:
    supervisor = running(limits=RestartLimits(quick_deaths=1), aggregator=1)
    assert supervisor.ended("aggregator0", ERROR, 20.0) == [
        Warn("aggregator0 ended with status 1; the job goes on without it; others are tried now and then")
    ]
    assert supervisor.due(20.5) == []
    assert supervisor.due(21.0) == [StartProcess("aggregator1", "aggregator")]
    supervisor.members(["aggregator1"])
    now = 21.0
    for n in range(1, 9):  # and however often one is killed
        assert not any(isinstance(decision, Fail) for decision in supervisor.ended(f"aggregator{n}", KILLED, now))
        while not (decisions := supervisor.due(now)):
            now += 0.5
        assert decisions == [StartProcess(f"aggregator{n + 1}", "aggregator")]
        supervisor.members([f"aggregator{n + 1}"])


def test_who_cannot_join_again_and_again_fails_a_run_in_which_nobody_computes() -> None:
    supervisor = running(workers=1, limits=RestartLimits(quick_deaths=2))
    supervisor.ended("worker0", KILLED, 20.0)
    now, decisions = 20.0, supervisor.due(20.0)
    for n in range(1, 3):
        assert decisions == [StartProcess(f"worker{n}", "worker")]
        supervisor.ended(f"worker{n}", ERROR, now)
        while not (decisions := supervisor.due(now)):
            now += 0.5
    assert supervisor.ended("worker3", ERROR, now) == [
        Fail("worker3 ended with status 1: 3 workers in a row could not join, and no worker computes")
    ]


def test_one_that_is_to_be_tried_later_is_not_started_by_a_new_size() -> None:
    supervisor = running(workers=2)
    supervisor.resized({"worker": 3}, 20.0)
    supervisor.ended("worker2", ERROR, 21.0)
    assert supervisor.resized({"worker": 4}, 21.5) == [StartProcess("worker3", "worker")]
    assert supervisor.resized({"worker": 3}, 21.6) == []
    assert supervisor.due(22.0) == [], "three are wanted, and three run"


def test_a_run_without_workers_fails_unless_one_is_to_come() -> None:
    supervisor = running(workers=1)
    supervisor.ended("worker0", WELL, 1.0)
    assert supervisor.due(1.0) == []
    (failure,) = supervisor.due(1.6)
    assert isinstance(failure, Fail)
    assert failure.reason.startswith("every worker ended before the job was over")


def test_a_coordinator_that_ends_well_means_that_the_job_is_over() -> None:
    assert running().ended("coordinator", WELL, 9.0) == [RunOver()]


def test_growing_starts_what_is_missing_and_shrinking_drains_the_newest() -> None:
    supervisor = running(workers=2, servers=2)
    assert supervisor.resized({"worker": 3, "server": 3}, 5.0) == [StartProcess("server2", "server"),
                                                                   StartProcess("worker2", "worker")]  # fmt: skip
    assert supervisor.resized({"worker": 1, "server": 2}, 6.0) == [DrainProcess("server2"), DrainProcess("worker1"),
                                                                   DrainProcess("worker2")]  # fmt: skip
    for name in ("worker1", "worker2", "server2"):
        assert supervisor.ended(name, WELL, 7.0) == []
    assert supervisor.due(8.0) == []


def test_a_worker_that_is_killed_while_it_drains_is_not_replaced() -> None:
    supervisor = running(workers=2)
    supervisor.resized({"worker": 1}, 5.0)
    assert supervisor.ended("worker1", KILLED, 6.0) == []
    assert supervisor.due(7.0) == []


def test_without_restart_the_first_death_fails_the_run() -> None:
    supervisor = running(limits=RestartLimits(restart=False))
    supervisor.ended("server0", KILLED, 1.0)
    assert supervisor.due(2.0) == [Fail("server0 was killed (SIGKILL)")]


def test_a_server_that_has_handed_over_takes_no_other_with_it_that_is_to_be_started_again() -> None:
    supervisor = running(servers=3)
    assert supervisor.resized({"server": 2}, 20.0) == [DrainProcess("server2")]
    supervisor.ended("server0", KILLED, 20.1)
    assert supervisor.ended("server2", WELL, 20.1) == []
    assert supervisor.due(20.1) == [StartProcess("server3", "server")]


def test_a_worker_that_never_took_part_takes_no_other_with_it_that_is_to_be_started_again() -> None:
    supervisor = running(workers=2)
    supervisor.resized({"worker": 3}, 20.0)
    supervisor.ended("worker0", KILLED, 21.0)
    assert supervisor.ended("worker2", ERROR, 21.0) == [Warn(f"worker2 ended with status 1 {WITHOUT_IT}")]
    assert supervisor.due(21.0) == [StartProcess("worker3", "worker")]


def holding(supervisor: Supervisor, now: float) -> None:
    """worker0 ends with an error while the coordinator stores the newest version."""
    supervisor.held(now)
    assert supervisor.ended("worker0", ERROR, now) == []


def test_while_the_coordinator_ends_the_job_itself_a_failure_waits_and_what_dies_is_started_again() -> None:
    supervisor = running()
    holding(supervisor, 20.0)
    assert supervisor.due(21.0) == []
    assert supervisor.ended("server0", KILLED, 21.0) == again("server0")
    assert supervisor.ended("coordinator", KILLED, 21.0) == again("coordinator")
    assert supervisor.due(21.0) == [StartProcess("server1", "server"), StartProcess("coordinator", "coordinator")]
    assert supervisor.due(22.0) == []


def test_a_coordinator_that_ends_the_job_itself_is_waited_for_as_long_as_it_speaks() -> None:
    supervisor = running()
    holding(supervisor, 20.0)
    for now in (40.0, 60.0, 80.0):
        assert supervisor.due(now) == []
        supervisor.held(now)
    assert supervisor.due(79.0 + HOLD_S) == []
    assert supervisor.due(80.0 + HOLD_S) == [Fail("worker0 ended with status 1")], "it hangs: say the first reason"


def test_the_next_coordinator_may_find_out_for_itself_whether_it_holds_something() -> None:
    supervisor = running()
    holding(supervisor, 20.0)
    now = 19.0 + HOLD_S
    supervisor.ended("coordinator", KILLED, now)
    assert supervisor.due(now) == [StartProcess("coordinator", "coordinator")]
    assert supervisor.due(now + HOLD_S - 1.0) == []
    assert supervisor.due(now + HOLD_S) == [Fail("worker0 ended with status 1")]


def test_a_coordinator_that_is_not_started_again_ends_no_job() -> None:
    supervisor = running(limits=RestartLimits(quick_deaths=0))
    holding(supervisor, 5.0)
    assert supervisor.ended("coordinator", KILLED, 6.0) == [Fail("worker0 ended with status 1")]
    supervisor = running()
    holding(supervisor, 20.0)
    assert supervisor.ended("coordinator", ERROR, 21.0) == [], "its last word may still be on its way"
    assert supervisor.due(21.5) == [Fail("worker0 ended with status 1")]


def test_who_dies_again_and_again_fails_the_run_once_nothing_is_held() -> None:
    supervisor = running(limits=RestartLimits(quick_deaths=0))
    supervisor.held(5.0)
    assert supervisor.ended("server0", KILLED, 6.0) == []
    assert supervisor.due(4.0 + HOLD_S) == []
    assert supervisor.due(5.0 + HOLD_S) == [
        Fail("server0 was killed (SIGKILL); it is not started again: 1 servers in a row died soon")
    ]


def test_a_job_whose_workers_have_all_ended_does_not_fail_while_its_last_version_is_held() -> None:
    supervisor = running(workers=1)
    supervisor.held(20.0)
    supervisor.ended("worker0", WELL, 20.0)
    assert [supervisor.due(now) for now in (20.0, 25.0, 19.0 + HOLD_S)] == [[], [], []]
    (failure,) = supervisor.due(20.0 + HOLD_S)
    assert isinstance(failure, Fail)
