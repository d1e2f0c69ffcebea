"""What Prometheus is told: of a job, from its announcements; of each process, in the text format."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_watch_state import PLAN, members, steps

from rallypoint.core import protocol
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.policy import Sync
from rallypoint.core.protocol import Aborted, Applied, Finished, Members, Message, Metrics, Skipped, StepDone
from rallypoint.core.shard.clip import Rule
from rallypoint.core.shard.server import ServerMachine, ServerPlan
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.observe.trace import Tracer
from rallypoint.watch.exposition import Exposition
from rallypoint.watch.metrics import MEASURES, Figure, JobFigures, Several, of_aggregator, of_server, of_worker
from rallypoint.watch.state import Histogram, HistogramCounts

TERMS = Terms(replication=2, snapshots=True, snapshot_seconds=60.0, snapshot_steps=5)


def figures(*messages: Message, every: float = 1.0) -> JobFigures:
    """A job's figures after these messages, `every` s apart; the unix time is 1000 s at the first."""
    job = JobFigures(TERMS, 990.0)
    for number, message in enumerate(messages):
        job.take(message, number * every, 1000.0 + number * every)
    return job


def values(readings: list[Figure]) -> Mapping[str, object]:
    """Name{labels' values} -> value."""
    return {one.name + "".join(f" {value}" for value in one.labels.values()): one.value for one in readings}


def test_the_figures_of_a_job_follow_its_announcements() -> None:
    told = values(figures(
        PLAN, members("worker0 worker1", "worker2"), *steps(0, 4), Metrics(4, {"val_loss": 1.5}),
        Skipped(5, (1,)), protocol.Snapshotted("s4", 4, 123, 0.5),
    ).read())  # fmt: skip
    assert told["rallypoint_job_running"] == 1.0
    assert (told["rallypoint_job_step"], told["rallypoint_job_steps"], told["rallypoint_steps"]) == (4, 10, 4)
    assert told["rallypoint_items samples"] == 32
    assert (told["rallypoint_loss"], told["rallypoint_learning_rate"]) == (2.0, 0.1)
    assert (told["rallypoint_figure accuracy"], told["rallypoint_evaluation val_loss"]) == (0.5, 1.5)
    assert told["rallypoint_last_step_timestamp_seconds"] == 1005.0
    seconds = told["rallypoint_step_seconds"]
    assert isinstance(seconds, HistogramCounts)
    assert (seconds.count, seconds.total) == (3, 3.0)
    assert dict(zip(seconds.bounds, seconds.cumulative, strict=True))[0.5] == 0
    assert dict(zip(seconds.bounds, seconds.cumulative, strict=True))[1.0] == 3
    here = [told[f"rallypoint_members {role}"] for role in ("worker", "standby", "server", "aggregator")]
    assert here == [2, 1, 1, 0]
    assert told["rallypoint_skipped steps"] == 1
    assert told["rallypoint_snapshots"] == 1
    assert told["rallypoint_snapshot_timestamp_seconds"] == 1008.0
    assert (told["rallypoint_snapshot_step"], told["rallypoint_snapshot_bytes"]) == (4, 123)
    assert (told["rallypoint_snapshot_period_seconds"], told["rallypoint_snapshot_period_steps"]) == (60.0, 5)
    assert told["rallypoint_replication"] == 2


def test_who_comes_and_goes_is_counted_by_role_and_a_standby_that_takes_over_is_neither() -> None:
    told = values(figures(
        PLAN, members("worker0 worker1", "worker2", "server0 server1"), members("worker0 worker2", "", "server0"),
        members("worker0 worker2", "worker3", "server0"),
    ).read())  # fmt: skip
    assert (told["rallypoint_members_gone worker"], told["rallypoint_members_gone server"]) == (1, 1)
    assert (told["rallypoint_members_joined worker"], told["rallypoint_members_joined server"]) == (1, 0)


def test_the_view_and_what_is_exposed_are_those_of_the_newest_view() -> None:
    told = values(figures(PLAN, Members("3.17", ("worker0",), (), ("server0",), exposed=9)).read())
    assert (told["rallypoint_view_epoch"], told["rallypoint_view_number"]) == (3, 17)
    assert told["rallypoint_exposed_shards"] == 9


def test_a_roll_back_lowers_the_step_and_no_counter() -> None:
    told = values(figures(PLAN, members(), *steps(0, 5), *steps(2, 4)).read())
    assert (told["rallypoint_job_step"], told["rallypoint_steps"]) == (4, 7)


def test_what_a_stall_was_lost_to_is_counted() -> None:
    job = JobFigures(TERMS, 0.0)
    job.take(PLAN, 0.0, 0.0)
    job.take(members("worker0 worker1"), 0.0, 0.0)
    for step in range(20):
        job.take(StepDone(step, 1.0, 8), float(step), float(step))
    job.take(members("worker0"), 20.0, 20.0)
    job.take(StepDone(20, 1.0, 8), 29.0, 29.0)
    told = values(job.read())
    assert told["rallypoint_stalls"] == 1
    assert told["rallypoint_lost_seconds members gone"] == pytest.approx(9.0, abs=0.1)
    assert told["rallypoint_goodput_ratio"] == pytest.approx(20 / 29, abs=0.01)


@pytest.mark.parametrize("word", [Finished("worker0"), Aborted("no")])
def test_a_job_that_is_over_does_not_run(word: Message) -> None:
    assert values(figures(PLAN, members(), *steps(0, 2), word).read())["rallypoint_job_running"] == 0.0


def test_before_the_first_snapshot_its_time_is_the_beginning_and_without_snapshots_there_is_none() -> None:
    assert values(figures(PLAN).read())["rallypoint_snapshot_timestamp_seconds"] == 990.0
    assert "rallypoint_snapshot_timestamp_seconds" not in values(JobFigures(Terms(), 0.0).read())


def test_the_period_of_snapshots_is_the_one_that_the_job_has_chosen() -> None:
    told = values(figures(PLAN, protocol.SnapshotEvery(7.0)).read())
    assert (told["rallypoint_snapshot_period_steps"], told["rallypoint_snapshot_period_seconds"]) == (0, 7.0)


def test_the_lateness_of_who_is_gone_is_forgotten() -> None:
    job = figures(PLAN, members(), Applied(0, 2, 0.0, {"worker0": 0.0, "worker1": 0.5, "nobody": 1.0}))
    assert "rallypoint_lateness_seconds worker1" in values(job.read())
    assert "rallypoint_lateness_seconds nobody" not in values(job.read())
    job.take(members("worker0"), 9.0, 9.0)
    assert "rallypoint_lateness_seconds worker1" not in values(job.read())


def test_a_histogram_counts_a_value_at_its_own_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 2.0, 9.0):
        histogram.add(value)
    assert histogram.read() == HistogramCounts((1.0, 2.0), [2, 3], 4, 12.5)


def test_a_server_tells_what_it_holds_and_what_has_no_backup() -> None:
    plan = ServerPlan(Sync(), (2, 2, 2), frozenset((0, 1, 2)), frozenset(), Rule())
    machine = ServerMachine("s0", plan)
    number = ViewNumber(1, 1)
    servers = (Member("s0", "h", incarnation=1), Member("s1", "h", incarnation=2))
    machine.adopt(View(
        number, number, (), servers, (), {0: "s0", 1: "s0", 2: "s1"}, {0: "s1", 2: "s0"}, {0: number, 2: number}, {},
    ))  # fmt: skip
    told = values(list(of_server(machine, 3)))
    assert (told["rallypoint_server_shards primary"], told["rallypoint_server_shards backup"]) == (2, 1)
    assert told["rallypoint_server_unprotected_shards"] == 2
    assert told["rallypoint_server_waiting_events"] == 3
    assert told["rallypoint_contributions applied"] == 0
    machine.machine(0).tally.update([0, 3, 3], skipped=False)  # type: ignore[union-attr]
    staleness = values(list(of_server(machine, 0)))["rallypoint_staleness_updates"]
    assert isinstance(staleness, HistogramCounts)
    assert (staleness.count, staleness.total) == (3, 6.0)
    assert list(of_server(None, 0)) == [Figure("rallypoint_server_waiting_events", 0)]


def test_a_worker_tells_its_step_and_its_phases() -> None:
    tracer = Tracer("w0")
    tracer.count("wait")
    with tracer.span("wait"):
        pass
    told = values(list(of_worker(7, tracer)))
    assert told["rallypoint_worker_step"] == 7
    waited = told["rallypoint_worker_phase_seconds wait"]
    assert isinstance(waited, Several)
    assert waited.count == 1


def test_the_text_is_read_as_prometheus_reads_it() -> None:
    job = figures(PLAN, members(), *steps(0, 3))
    tracer = Tracer("w0")
    tracer.count("wait")
    read = lambda: [*job.read(), *of_worker(1, tracer), *of_aggregator((5, 2))]  # noqa: E731
    text, kind = Exposition(read).text("")
    assert kind.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert families["rallypoint_items"].samples[0].name == "rallypoint_items_total"
    assert families["rallypoint_items"].samples[0].value == 24
    assert families["rallypoint_step_seconds"].type == "histogram"
    assert families["rallypoint_worker_phase_seconds"].type == "summary"
    assert families["rallypoint_aggregator_taken"].samples[0].value == 5
    assert "process_cpu_seconds" in families
    openmetrics, kind = Exposition(read).text("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")


@pytest.mark.parametrize("name", MEASURES)
def test_names_follow_the_conventions(name: str) -> None:
    assert re.fullmatch(r"rallypoint_[a-z_]+", name)
    measure = MEASURES[name]
    assert measure.help.endswith(".")
    assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
    if measure.kind in ("histogram", "summary"):
        assert name.endswith(("_seconds", "_updates"))
