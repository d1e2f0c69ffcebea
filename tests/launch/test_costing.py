"""``rallypoint plan``: what it is asked, about a model or about a run, and what it says."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rallypoint import cli
from rallypoint.config import JobConfig, record_of, resolve
from rallypoint.coordinator.events import line_of
from rallypoint.coordinator.journal import Journal
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Members, Planned, Sampled, StepDone
from rallypoint.errors import ConfigError, RallypointError, UsageError
from rallypoint.launch.commands import costing
from rallypoint.launch.commands.costing import CostOptions, bytes_of, count_of, measured_run, question_of, rate_of
from rallypoint.launch.plan import Launch, write_plan

MODEL = ["plan", "--model", "1e8", "--gpus", "8", "--link", "1Gbit", "--compute", "1s"]


def said(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(cli.app, list(arguments))
    if isinstance(result.exception, RallypointError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


# ---- numbers with units ----


@pytest.mark.parametrize(
    ("text", "number"), [("7e9", 7e9), ("7B", 7e9), ("350M", 350e6), ("16384", 16384.0), ("1.5k", 1500.0)]
)
def test_counts(text: str, number: float) -> None:
    assert count_of(text, "--model") == pytest.approx(number)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25Gbit", 3.125e9), ("100Mbit/s", 12.5e6), ("10gbps", 1.25e9), ("10Gbps", 1.25e9), ("3GB/s", 3e9),
        ("1 Gbit", 125e6),
    ],
)
def test_rates_are_bytes_a_second_of_one_direction(text: str, rate: float) -> None:
    assert rate_of(text, "--link") == pytest.approx(rate)


def test_sizes_and_times() -> None:
    assert bytes_of("80GB", "--memory") == 80e9
    assert bytes_of("80GiB", "--memory") == 80 * 1024**3
    assert [costing.seconds_of(text, "--mtbf") for text in ("90d", "2000h", "10min", "30s", "800ms", "5")] == [
        pytest.approx(each) for each in (7_776_000, 7_200_000, 600, 30, 0.8, 5)
    ]


@pytest.mark.parametrize("text", [
    "", "fast", "-1Gbit", "0Gbit", "25G", "25Gbyte", "1e999Gbit", "nan", "٣Gbit", "25Gb/s", "25gb/s", "3GBps",
])  # fmt: skip
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--link .*as 25Gbit or 3GB/s"):
        rate_of(text, "--link")


# ---- what is asked ----


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, "what is to be trained"),
        ({"model": "1e8"}, "how long does a GPU compute"),
        ({"model": "1e8", "compute": "1s"}, "how many GPUs"),
        ({"model": "1e8", "compute": "1s", "gpus": "8"}, "how fast are the links"),
        ({"model": "1e8", "compute": "1s", "gpus": "8", "link": "1Gbit", "sets": ["replicas=4"]}, "would stand by"),
    ],
)
def test_what_is_missing_is_asked_for(options: dict[str, object], missing: str) -> None:
    with pytest.raises(UsageError, match=missing):
        question_of(CostOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["9e305B", "1e16", "100"])
def test_what_is_no_model_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="that is no model"):
        question_of(CostOptions(model=model, compute="1s", gpus="8", link="1Gbit"))


@pytest.mark.parametrize(("gpus", "hosts", "each"), [("8", 8, 1), ("4x8", 4, 8)])
def test_gpus_share_hosts(gpus: str, hosts: int, each: int) -> None:
    asked = question_of(CostOptions(model="7B", gpus=gpus, link="100Gbit", compute="1s"))
    assert (asked.machines.hosts, asked.machines.per_host) == (hosts, each)
    assert asked.workload.words == pytest.approx(7e9, rel=1e-3)
    assert len(asked.workload.layers) == 2 * 33


@pytest.mark.parametrize("gpus", ["0", "4x", "x8", "-1", "8x0", "many"])
def test_what_is_no_number_of_gpus_is_refused(gpus: str) -> None:
    with pytest.raises(ConfigError, match="4x8 for 8 on each of 4 hosts"):
        question_of(CostOptions(model="7B", gpus=gpus, link="100Gbit", compute="1s"))


def test_settings_of_the_job_count() -> None:
    sets = ["clip=1.0", "network.shard_bytes=65536", "replicas=16", "sync.type=local-steps", "sync.steps=4"]
    asked = question_of(CostOptions(model="1e8", gpus="8", link="1Gbit", compute="1s", sets=sets))
    assert (asked.workload.clip, asked.workload.shard_bytes, asked.workload.steps) == (True, 65536, 4)
    assert asked.replicas == 2
    with pytest.raises(ConfigError, match="is no setting"):
        question_of(CostOptions(model="1e8", gpus="8", link="1Gbit", compute="1s", sets=["shards=3"]))


def test_a_codec_that_the_planner_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean bf16"):
        question_of(CostOptions(model="1e8", compute="1s", gpus="8", link="1Gbit", codec=["bf61"]))


# ---- what is said ----


def test_a_table_and_a_recommendation_are_printed() -> None:
    text = said(*MODEL, "--mtbf", "30d", "--codec", "bf16")
    for word in ("8 servers", "DDP", "FSDP", "goodput", "bf16", "replication 2", "Use "):
        assert word in text
    assert text.rstrip().endswith(".")


def test_four_machines_without_gpus_are_asked_for_as_the_help_says() -> None:
    help = " ".join(said("plan", "--help").replace("│", " ").split())
    assert "4 is 4 hosts with one each" in help
    assert "1x8 is one host with 8" in help
    assert "4 machines without GPUs: rallypoint plan --model 20M --gpus 4 --link 1Gbit --compute 2s" in help
    text = said("plan", "--model", "20M", "--gpus", "4", "--link", "1Gbit", "--compute", "2s")
    assert text.startswith("20 M parameters (K = 80 MB), 4 GPUs on 4 hosts, computing 2 s a step; 1 Gbit/s")


@pytest.mark.slow
def test_ddp_and_fsdp_are_in_the_table_however_many_rows_there_are() -> None:
    text = said(*MODEL, *(word for number in range(1, 20) for word in ("--servers", str(number))))
    assert [len(re.findall(rf"(?m)^ *{name} ", text)) for name in ("DDP", "FSDP")] == [1, 1]
    assert len(re.findall(r"(?m)^ *\d+ servers? ", text)) < 15


def test_as_json_everything_is_told() -> None:
    told = json.loads(said(*MODEL, "--json"))
    assert told["servers"] is True
    assert told["best"]["name"] in {one["name"] for one in told["layouts"]}
    assert all(one["step"]["seconds"] > 0 for one in told["layouts"])
    assert told["recommendation"].startswith("Use ")


def test_a_model_of_few_shards_is_told_that_smaller_ones_would_be_quicker() -> None:
    """K = 4 MB on 8 servers: 4 of them have nothing."""
    small = ["plan", "--model", "1e6", "--gpus", "8", "--link", "100Mbit", "--compute", "100ms"]
    assert "With shards of 256 KiB" in said(*small)
    assert "With shards of" not in said(*small, "--set", "network.shard_bytes=32768")


@pytest.mark.slow
def test_a_job_that_links_hold_up_is_told_to_pace_them() -> None:
    waits = ["plan", "--model", "1e7", "--gpus", "4", "--servers", "4", "--link", "100Mbit", "--compute", "3s"]
    assert "With network.pace_mbit=97 4 servers would take" in said(*waits, "--set", "network.pacing=off")
    assert "pace_mbit" not in said(*waits, "--set", "network.pace_mbit=97")
    assert "pace_mbit" not in said(*waits)  # as many servers as workers: by itself
    assert said(*waits).splitlines()[-1] == said(*waits, "--set", "network.pace_mbit=97").splitlines()[-1]


def test_help_teaches_with_examples() -> None:
    text = said("plan", "--help")
    assert "rallypoint plan --model 7B --gpus 8x8" in " ".join(text.split())


# ---- a run ----

SPECS = [
    TensorSpec("tokens.weight", (256, 64), "float32", 0), TensorSpec("blocks.0.up.weight", (64, 256), "float32", 0),
    TensorSpec("blocks.0.up.bias", (256,), "float32", 1), TensorSpec("blocks.1.up.weight", (64, 512), "float32", 0),
    TensorSpec("blocks.1.up.bias", (512,), "float32", 1), TensorSpec("norm.mean", (64,), "float32", -1),
]  # fmt: skip


def test_modules_come_in_the_order_of_the_forward_pass_with_their_biases() -> None:
    """Weights and biases are in two optimizer groups, each in backward order; buffers are no parameters."""
    assert costing.sizes_of(build_layout(SPECS)) == (256 * 64, 65 * 256, 65 * 512)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of 3 workers and 2 servers, in which a worker was lost; a step took 2 s."""
    config = resolve({"replicas": 3, "steps": 40, "clip": 1.0, "network.shard_bytes": 65536, "down": {"type": "bf16"}})
    with closing(Journal(str(tmp_path))) as journal:
        journal.save(ClusterState(record_of(config, build_layout(SPECS)), None, (), 0, 1, False, -1, 2))
    write_plan(Launch(worker=("python", "t.py"), folder=str(tmp_path), servers=2, replication=2))
    everybody = ("worker0", "worker1", "worker2")
    events: list[tuple[float, msgspec.Struct]] = [
        (0.0, Planned(40, 3, "samples", 100, 3, everybody, ("server0", "server1"))),
        (0.0, Members("1.1", everybody, (), ("server0", "server1"))),
        *((2.0 * step, StepDone(step, 1.0, 8, computed=1.5)) for step in range(1, 20)),
        (39.0, Members("1.2", everybody[:2], (), ("server0", "server1"))),
        *((2.0 * step, StepDone(step, 1.0, 8, computed=1.5)) for step in range(20, 30)),
    ]
    with (tmp_path / "events.jsonl").open("wb") as log:
        for t, event in events:
            log.write(line_of(event, t))
    return tmp_path


def sampled(run: Path, *hosts: str, rate: float = 5e6) -> None:
    with (run / "events.jsonl").open("ab") as log:
        for number, host in enumerate(hosts):
            about = Sampled(5.0, 0.5, 1, 2, network_sent=rate, member=f"worker{number}", host=host)
            log.write(line_of(about, 58.5))


def test_a_run_tells_its_model_its_settings_and_its_times(run: Path) -> None:
    seen = measured_run(run)
    assert (seen.config["replicas"], seen.workers, seen.servers, seen.replication) == (3, 3, 2, 2)
    assert seen.step == pytest.approx(2.0, rel=0.03)
    assert seen.computed == 1.5
    assert seen.losses == 1
    assert seen.mtbf == pytest.approx(58.0 * 5)
    work = question_of(CostOptions(link="1Gbit"), seen).workload
    assert work.clip
    assert (work.shard_bytes, work.up, work.down) == (65536, 4.0, 2.0)


def test_what_a_short_run_has_lost_is_no_rate_of_failures(run: Path) -> None:
    text = " ".join(said("plan", str(run), "--link", "10Mbit").split())
    assert "Members that the run lost: 1; 58 s are too short to say how often machines fail" in text
    assert "goodput" not in text


def test_the_plan_of_a_run_says_what_the_model_makes_of_it_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.launch.commands.costing._LONG_S", 50.0)
    text = " ".join(said("plan", str(run), "--link", "10Mbit").split())
    assert "with 3 workers and 2 servers a step took 2" in text
    assert "the model says" in text
    assert "the number of lost members was 1" in text
    assert "Use " in text


def test_the_link_of_a_run_is_what_its_machines_have_sent_unless_it_ran_on_one(run: Path) -> None:
    with pytest.raises(UsageError, match="how fast are the links"):
        said("plan", str(run))
    sampled(run, "a")
    with pytest.raises(UsageError, match="how fast are the links"):
        said("plan", str(run))
    sampled(run, "a", "b")
    assert "the most that a machine" in " ".join(said("plan", str(run)).split())


def test_the_plan_of_a_run_can_be_for_other_machines(run: Path) -> None:
    sets = ["network.shard_bytes=262144"]
    asked = question_of(CostOptions(gpus="3", link="1Gbit", compute="2s", mtbf="90d", sets=sets), measured_run(run))
    assert asked.workload.compute == pytest.approx(2.0)
    assert asked.workload.shard_bytes == 256 << 10
    assert asked.machines.mtbf == 90 * 86400
    with pytest.raises(UsageError, match="is the run's own"):
        question_of(CostOptions(model="1e8"), measured_run(run))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no events\.jsonl"):
        said("plan", str(tmp_path), "--link", "1Gbit")
    (tmp_path / "events.jsonl").write_bytes(b"")
    with pytest.raises(UsageError, match="does not say what is trained"):
        said("plan", str(tmp_path), "--link", "1Gbit")


def test_a_run_that_has_not_recorded_how_long_it_computed_needs_to_be_told(run: Path) -> None:
    log = run / "events.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"computed":1.5', b'"computed":0.0'))
    with pytest.raises(UsageError, match="--compute"):
        said("plan", str(run), "--link", "1Gbit")
    assert "Use " in said("plan", str(run), "--link", "1Gbit", "--compute", "1s")


def test_all_settings_of_a_job_can_be_read_whatever_they_are(tmp_path: Path) -> None:
    """The defaults of the configuration, as the journal has them."""
    with closing(Journal(str(tmp_path))) as journal:
        journal.save(ClusterState(record_of(JobConfig(), build_layout(SPECS)), None, (), 0, 1, False, -1, 2))
    (tmp_path / "events.jsonl").write_bytes(b"")
    seen = measured_run(tmp_path)
    work = question_of(CostOptions(link="1Gbit", compute="1s"), seen).workload
    assert (work.up, work.down, work.clip, seen.replication) == (4.0, 4.0, False, 1)
