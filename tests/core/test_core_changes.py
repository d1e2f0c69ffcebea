"""Settings that change when a job goes on from a snapshot: which may, which may not, and what the record says then."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rallypoint.config import JobConfig, overrides_from, record_of, resolve
from rallypoint.config.changes import Change, changed_record, kept_record
from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.optimizer import SGD, AdamW
from rallypoint.core.policy import AllReduce, LocalSteps
from rallypoint.core.schedule import Cosine
from rallypoint.errors import ConfigError

SPECS = [TensorSpec("w", (40,), "float32", 0)]


def record(**settings: Any) -> JobRecord:
    """A job's record as it comes from a snapshot."""
    made = record_of(resolve({"steps": 100, **settings}), build_layout(SPECS, 64))
    return msgspec.convert(msgspec.json.decode(msgspec.json.encode(made)), JobRecord)


def change(before: JobRecord, *dotted: str, version: int = 10) -> tuple[JobRecord, list[Change]]:
    return changed_record(before, overrides_from(None, dotted), version)


@pytest.mark.parametrize(
    ("settings", "dotted", "changes"),
    [
        ({}, "optimizer.lr=1e-4", [Change("optimizer.lr", 0.001, 0.0001)]),
        ({}, "clip=1.0", [Change("clip", None, 1.0)]),
        ({"clip": 1.0}, "clip=none", [Change("clip", 1.0, None)]),
        ({}, "nonfinite=skip", [Change("nonfinite", "stop", "skip")]),
        ({}, "steps=500", [Change("steps", 100, 500)]),
        ({}, "steps=11", [Change("steps", 100, 11)]),
        ({}, "accumulate=2", [Change("accumulate", 1, 2)]),
        ({}, "down.type=bf16", [Change("down.type", "raw", "bf16")]),
        ({"optimizer": SGD(lr=0.1)}, "optimizer.momentum=0.9", [Change("optimizer.momentum", 0.0, 0.9)]),
        (
            {"optimizer": AdamW(lr=Cosine(1e-3, 10))}, "optimizer.lr.peak=1e-4",
            [Change("optimizer.lr.peak", 0.001, 0.0001)],
        ),
        (
            {"optimizer": AdamW(lr=Cosine(1e-3, 10))}, "optimizer.lr=1e-4",
            [Change("optimizer.lr", {"type": "cosine", "peak": 0.001, "warmup": 10, "floor": 0.0}, 0.0001)],
        ),
        ({"sync": LocalSteps(steps=4)}, "sync.outer.lr=0.5", [Change("sync.outer.lr", 0.7, 0.5)]),
        ({"sync": LocalSteps(steps=10)}, "steps=105", [Change("steps", 100, 105)]),
        ({"sync": LocalSteps(steps=9)}, "steps=200", [Change("steps", 100, 200)]),
        ({}, "steps=100", []),
        ({"optimizer": AdamW(betas=(0.9, 0.99))}, "optimizer.betas=[0.9, 0.99]", []),
    ],
)  # fmt: skip
def test_a_setting_that_the_snapshot_does_not_depend_on_may_change(
    settings: dict[str, Any], dotted: str, changes: list[Change]
) -> None:
    before = record(**settings)
    after, found = change(before, dotted)
    assert found == changes
    # A worker whose script says what it said before, with the same override, agrees with the new record.
    own = record_of(resolve({"steps": 100, **settings}, overrides_from(None, [dotted])), before.layout)
    worker = msgspec.msgpack.decode(msgspec.msgpack.encode(own), type=JobRecord)
    assert disagreement(after, worker) is None
    assert after == (worker if changes else before)


@pytest.mark.parametrize(
    ("settings", "dotted", "sentence"),
    [
        ({}, "replicas=2", "replicas is 1 and cannot become 2: it decides which samples every step takes"),
        ({}, "batch=64", "batch is 32 and cannot become 64: it decides which samples"),
        ({}, "seed=1", "seed is 0 and cannot become 1: it decides which samples"),
        (
            {}, "network.shard_bytes=128",
            "shard_bytes is 1048576 and cannot become 128: the snapshot's shards are cut by it"
        ),
        ({}, "decay_1d=true", "decay_1d is False and cannot become True: the snapshot's shards"),
        ({}, "codec.type=bf16", "codec.type is raw and cannot become bf16: what workers have not sent yet"),
        ({}, "sync.type=async", "sync.type is sync and cannot become async: a snapshot can only go on in the mode"),
        ({"sync": LocalSteps(steps=4)}, "sync.steps=8", "sync.steps is 4 and cannot become 8: a snapshot can only go"),
        ({}, "optimizer.type=sgd", "optimizer.type is adamw and cannot become sgd: the snapshot holds the state of"),
        ({}, "table_std=0.1", "table_std is 1.0 and cannot become 0.1: it is for the tables' first values"),
        ({}, "steps=10", "steps is 10, but the job has made 10 already: use a higher number"),
        ({}, "steps=4", "steps is 4, but the job has made 10 already: use a higher number"),
        ({"sync": LocalSteps(steps=11)}, "steps=200", "steps is 100 and cannot become 200: .* after 1 of 11 steps"),
        ({"sync": AllReduce(own="torch.optim.SGD")}, "optimizer.lr=0.5", "step the script's own optimizer, so this"),
        ({"sync": LocalSteps(steps=4, fragments=2)}, "steps=200", "rounds are staggered"),
        ({}, "clip=-1", "clip is -1: it must be a number above 0, or none"),
        ({}, "accumulate=5", "a batch of 32 cannot be cut into accumulate=5 equal parts"),
    ],
)
def test_a_setting_that_the_snapshot_depends_on_cannot_change(
    settings: dict[str, Any], dotted: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        change(record(**settings), dotted)


def test_changes_that_an_older_snapshot_does_not_have_yet_are_made_again() -> None:
    first, _ = change(record(), "optimizer.lr=1e-4")
    assert change(record(), "optimizer.lr=1e-4")[0] == first
    assert change(first, "optimizer.lr=1e-4") == (first, [])


def test_every_setting_that_cannot_change_is_one() -> None:
    from rallypoint.config.changes import _FIXED

    assert {key.partition(".")[0] for key in _FIXED} <= set(JobConfig.__struct_fields__)


def test_a_job_from_before_some_settings_existed_goes_on_with_workers_that_know_them() -> None:
    now = record()
    plain = msgspec.to_builtins(now)
    before = {**plain, "config": {k: v for k, v in plain["config"].items() if k not in ("average", "precision")}}
    before["config"]["optimizer"] = {k: v for k, v in plain["config"]["optimizer"].items() if k != "weight_decay"}
    going_on, changes = change(kept_record(before, "snapshot step-00000003-1"))
    assert disagreement(going_on, now) is None
    assert changes == []


def test_a_job_that_knows_all_settings_goes_on_with_the_record_that_it_has() -> None:
    now = record()
    assert change(now)[0] is now
