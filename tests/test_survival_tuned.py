"""A worker, a server and the coordinator die while another value is tried: the bytes of the run that tunes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from test_survival import SCRIPT, STEPS, Cluster, cluster_of

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]

MANY = 360  # steps: trials begin with about the 25th, those of a pace with about the 110th; each death begins one anew
LONG = SCRIPT.replace(f"steps={STEPS}", f"steps={MANY}")

cluster = cluster_of(Cluster, "tuned")


def another_trial(cluster: Cluster, steps: Iterator[int], knob: str) -> None:
    """Go on, step by step, until another trial of `knob` has begun: the workers wait in a step of it."""
    trials = lambda: len(re.findall(rf"{knob} [\d.]+ \S+ is tried", cluster.output))  # noqa: E731
    before = trials()
    while trials() == before:
        cluster.until_caught_up(next(steps))


@pytest.mark.slow
@pytest.mark.parametrize("knob", ["in_flight_bytes", "pace_mbit"])
def test_whoever_dies_while_a_value_is_tried_the_bytes_are_those_of_a_run_without_tuning(
    tmp_path: Path, cluster: Cluster, knob: str
) -> None:
    (tmp_path / "plain").mkdir()
    plain = Cluster(tmp_path / "plain")
    try:
        plain.script.write_text(LONG)
        plain.open(MANY)
        plain.run("--workers", "1", "--servers", "1")
        assert plain.ended() == 0, plain.output
    finally:
        plain.close()
    assert " is tried" not in plain.output

    cluster.script.write_text(LONG)
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2", "--set", "tune=auto")
    cluster.until_caught_up(1)
    steps = count(2)
    for victim in ("worker1", "server0", "coordinator"):
        another_trial(cluster, steps, knob)
        cluster.until(lambda: cluster.members["exposed"] == 0)  # every shard is on both
        cluster.processes()[victim].kill()
        cluster.until(lambda victim=victim: f"{victim} was killed (SIGKILL): starting another" in cluster.output)
        trial = cluster.output.partition(f"{victim} was killed")[0].rpartition(" is tried")[2]
        assert "taken back" not in trial, "it was over by then"
    cluster.ends(plain.hash)
    assert f"the trial of another {knob} ended with its coordinator" in cluster.output
    assert "Traceback" not in cluster.output
