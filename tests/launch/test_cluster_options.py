"""An option of a cluster stands in one place: from there it comes into the plan, the terms, and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rallypoint.core.cluster.terms import Terms
from rallypoint.errors import ConfigError
from rallypoint.launch.options import RunOptions, arguments_of, options_of
from rallypoint.launch.plan import LAUNCHER, PRIVATE, ClusterConfig, Launch, read_plan, terms_of, write_plan

OTHERS: dict[str, Any] = {
    "servers": 3, "replication": 2, "heartbeat": 5.0, "hang_after": 7.0, "backup_tasks": True, "measure_links": True,
    "threads": 2, "bind": "10.0.0.7:0", "advertise": "host", "aggregators": 1, "standby": 1, "ranks": 2,
    "engine": "ray", "address": "auto", "gpus": 1.0, "snapshot_seconds": 9.0,
    "snapshot_steps": 4, "snapshots": "memory://x", "compression": "zstd", "watch": False,
}  # fmt: skip


def test_every_option_that_is_kept_as_it_is_comes_into_the_plan_and_its_file(tmp_path: Path) -> None:
    given = {**OTHERS, "folder": str(tmp_path), "trace": str(tmp_path / "trace")}
    plan = RunOptions(**given).run(["true"])
    assert {name: getattr(plan, name) for name in given} == given
    assert given.keys() | {"tls", "metrics"} == set(ClusterConfig.__struct_fields__), "a new one belongs into OTHERS"
    write_plan(plan)
    assert read_plan(tmp_path) == plan


def test_the_coordinator_is_told_all_that_its_terms_have_under_the_same_name() -> None:
    plan = RunOptions(**OTHERS, folder="x").run(["true"])
    terms = terms_of(plan)
    same = set(Terms.__struct_fields__) & set(ClusterConfig.__struct_fields__) - {"snapshots"}
    assert {name: getattr(terms, name) for name in same} == {name: OTHERS[name] for name in same}


def test_a_command_line_that_is_written_means_the_same_options() -> None:
    words = arguments_of(RunOptions(**OTHERS))
    assert len([word for word in words if word.startswith("--")]) == len(OTHERS)


def test_a_coordinator_by_hand_has_no_options_of_a_launcher() -> None:
    by_hand, all_of_them = options_of(RunOptions, without=LAUNCHER), options_of(RunOptions)
    assert {"engine", "standby", "watch", "or_resume"} <= all_of_them.keys() - by_hand.keys()
    assert {"workers", "heartbeat", "snapshots", "sets"} <= by_hand.keys()


def test_a_report_does_not_tell_where_things_are() -> None:
    private = set(ClusterConfig.__struct_fields__) - set(options_of(ClusterConfig, without=PRIVATE))
    assert private == {"bind", "advertise", "address", "tls", "folder", "metrics", "trace"}


@pytest.mark.parametrize("replication", [3, -1])
def test_there_are_one_or_two_copies(replication: int) -> None:
    with pytest.raises(ConfigError, match="every shard is on 1 server or on 2"):
        RunOptions(replication=replication, servers=4).plan([], folder="x")
    assert Launch(worker=()).replication == 0
