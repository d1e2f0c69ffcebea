"""A job that an earlier version has begun goes on in its own mode, or is refused with a sentence."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.config import record_of
from rallypoint.config.keys import GROUPS, MOVED
from rallypoint.coordinator.journal import JOURNAL, Journal
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.modes import ModeName
from rallypoint.errors import ConfigError
from rallypoint.store.manifest import Manifest

sys.path.insert(0, str(Path(__file__).parent))

from cell_jobs import CellJob

LAYOUT = build_layout([TensorSpec("w", (30, 3), "float32", 0), TensorSpec("b", (3,), "float32", 1)], shard_bytes=128)
NEW_FIELDS = ("mode", "features", "data", "tied")


def record(mode: ModeName) -> JobRecord:
    """A job's record, as from the wire."""
    made = record_of(CellJob(mode).config, LAYOUT, {"frozen": "00ff"})
    return msgspec.json.decode(msgspec.json.encode(made), type=JobRecord)


def before_the_description(job: JobRecord, **changes: Any) -> dict[str, Any]:
    """The record as a version wrote it whose modes had no description."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(job))
    return {name: value for name, value in (plain | changes).items() if name not in NEW_FIELDS}


def manifest(kept: dict[str, Any]) -> Manifest:
    return Manifest("step-00000002-1", 2, kept, 0.0, {}, "none", {}, {})


@pytest.mark.parametrize("mode", ModeName)
def test_an_old_snapshot_is_of_the_mode_that_its_settings_say(mode: ModeName) -> None:
    assert manifest(before_the_description(record(mode))).job == record(mode)


@pytest.mark.parametrize("kept", ["plateau=", "fragments=", "sync_every= of a group"])
def test_features_of_two_names_are_one_feature_now(kept: str) -> None:
    plain = msgspec.json.decode(msgspec.json.encode(record(ModeName.SYNC)))
    (feature,) = manifest(plain | {"features": [kept]}).job.features
    assert kept in feature.value


PLACES = [(flat, *place.split(".")) for flat, place in MOVED.items()]
GONE_UNUSED = {"alternate": [], "batch_for": "iteration", "optimizers": {}, "offload": "none", "base_batch": 0}


def test_settings_that_are_gone_and_were_not_used_are_forgotten() -> None:
    job = record(ModeName.SYNC)
    plain = msgspec.json.decode(msgspec.json.encode(job))
    plain["config"] |= {**GONE_UNUSED, "scale_lr": "none", "audit_servers": 0}
    assert manifest(plain).job == job


def test_settings_of_before_the_groups_are_found_in_them() -> None:
    job = record(ModeName.SYNC)
    plain = msgspec.json.decode(msgspec.json.encode(job))
    for group in GROUPS:
        del plain["config"][group]
    plain["config"] |= {flat: job.config[group][name] for flat, group, name in PLACES}
    assert manifest(plain).job == job


def test_a_job_that_used_a_setting_that_is_gone_is_refused_with_what_to_do() -> None:
    plain = msgspec.json.decode(msgspec.json.encode(record(ModeName.SYNC)))
    plain["config"] |= {"offload": "activations"}
    with pytest.raises(ConfigError, match=r"step-00000002-1 is of a job with offload, which is gone: .*save_on_cpu"):
        _ = manifest(plain).job


@pytest.mark.parametrize("mode", ModeName)
def test_an_old_journal_is_of_the_mode_that_its_settings_say(mode: ModeName, tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.save(ClusterState(record(mode), None, (), 0, 1, True, -1, 2))
    journal.close()
    _rewrite(tmp_path / JOURNAL, before_the_description(record(mode)))
    again = Journal(str(tmp_path))
    state = again.load()
    again.close()
    assert state.record == record(mode)


def test_an_old_job_that_its_mode_does_not_support_any_more_is_refused_with_the_table_s_sentence() -> None:
    job = record(ModeName.STAGGERED)
    old = before_the_description(job, config=job.config | {"nonfinite": "skip"})
    with pytest.raises(ConfigError, match='step-00000002-1 is of a job that cannot go on: nonfinite="skip" is not'):
        _ = manifest(old).job


def test_an_old_job_of_other_rounds_is_refused() -> None:
    old = before_the_description(record(ModeName.LOCAL), rounds=5)
    with pytest.raises(ConfigError, match="of a job of 5 rounds, and this version of Rallypoint makes 6"):
        _ = manifest(old).job


def _rewrite(path: Path, kept: dict[str, Any]) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("update record set body = ?", (msgspec.msgpack.encode(kept),))
    database.close()
