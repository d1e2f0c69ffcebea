"""Several models in a job's settings: groups, cadence, batches, and what may change when the job goes on."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.config import (
    Group,
    JobConfig,
    batch_at,
    cadence_of,
    group_of,
    iteration_of,
    of_group,
    record_of,
    resolve,
    settings_of,
    updated_at,
)
from rallypoint.config.changes import changed_record
from rallypoint.config.models import shown
from rallypoint.core.layout import Layout, TensorSpec, build_layout
from rallypoint.core.optimizer import SGD, Adam
from rallypoint.core.schedule import cosine
from rallypoint.errors import ConfigError

BOTH = {"generator": Adam(lr=cosine(1e-3), weight_decay=0.1), "critic": SGD(lr=0.1, weight_decay=0.2)}
WGAN: dict[str, Any] = {"optimizer": BOTH, "alternate": ("critic", "critic", "generator"), "steps": 8}
NAMES = ("critic.a.weight", "critic.a.bias", "generator.b.weight", "generator.b.bias")


def layout_of(config: JobConfig) -> Layout:
    specs = [
        TensorSpec(name, (8, 8) if name.endswith("weight") else (8,), "float32", group_of(config, name, 2 - (
            name.endswith("bias")
        ))) for name in NAMES
    ]  # fmt: skip
    return build_layout([*specs, TensorSpec("generator.b.mean", (8,), "float32", -1)], shard_bytes=128)


def test_each_model_has_groups_of_its_own_with_its_optimizer_s_settings() -> None:
    config = resolve({**WGAN, "groups": (Group(match=("*.b.bias",), weight_decay=0.5),)})
    groups = {name: group_of(config, name, 1 + name.endswith("weight")) for name in NAMES}
    assert groups == dict(zip(NAMES, (0, 1, 3, 5), strict=True))
    assert [settings_of(config, groups[name]).weight_decay for name in NAMES] == [0.2, 0.0, 0.1, 0.5]
    assert [of_group(config, groups[name]).optimizer for name in NAMES] == [
        BOTH["critic"], BOTH["critic"], BOTH["generator"], BOTH["generator"],
    ]  # fmt: skip


def test_a_shard_is_due_in_its_model_s_steps_and_buffers_in_all() -> None:
    config = resolve(WGAN)
    layout = layout_of(config)
    cadence = cadence_of(config, layout.shards)
    steps = {"critic": [0, 1, 3, 4, 6, 7], "generator": [2, 5]}
    for shard in layout.shards:
        due = [step for step in range(8) if cadence.due(shard.index, step)]
        name = layout.name_at(shard.index, 0).partition(".")[0]
        assert due == (list(range(8)) if shard.group < 0 else steps[name])
        assert shard.group < 0 or of_group(config, shard.group).steps == len(steps[name])
    record = record_of(config, layout)
    assert {record.version_at(s.index, 6) for s in layout.shards if s.group in (2, 3)} == {2}


def test_the_steps_of_an_iteration_share_their_batch_unless_told_otherwise() -> None:
    config, each = resolve(WGAN), resolve({**WGAN, "batch_for": "step"})
    assert [updated_at(config, step)[0][0] for step in range(8)] == list("ccgccgcc")
    assert [iteration_of(config, step) for step in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [batch_at(config, step) for step in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [batch_at(each, step) for step in range(8)] == list(range(8))
    assert [batch_at(JobConfig(), step) for step in range(3)] == [0, 1, 2]


def test_the_rate_shown_is_of_the_model_that_is_updated() -> None:
    config = resolve(WGAN)
    assert [(type(own.optimizer).__name__, update) for own, update in (shown(config, step) for step in range(6))] == [
        ("SGD", 0), ("SGD", 1), ("Adam", 0), ("SGD", 2), ("SGD", 3), ("Adam", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("overrides", "sentence"), [
    ({"optimizers": {"critic": {"lr": 0.5}}}, ""),
    ({"steps": 20}, ""),
    ({"optimizers": {"critic": {"type": "adam"}}}, "optimizers.critic.type .* the snapshot holds the state"),
    ({"optimizers": {"third": {"type": "adam"}}}, "optimizers.third .* the snapshot holds these models|leaves out"),
    ({"alternate": ["generator", "critic"]}, "alternate .* the versions of each model's shards"),
    ({"batch_for": "step"}, "batch_for .* which samples"),
])  # fmt: skip
def test_a_job_of_several_models_goes_on_with_other_rates_and_the_same_models(
    overrides: dict[str, Any], sentence: str
) -> None:
    config = resolve(WGAN)
    record = record_of(config, layout_of(config))
    if not sentence:
        changed, changes = changed_record(record, overrides, 3)
        assert [change.key for change in changes] == (["steps"] if "steps" in overrides else ["optimizers.critic.lr"])
        assert changed.cadence.period_of == record.cadence.period_of
        return
    with pytest.raises(ConfigError, match=sentence):
        changed_record(record, overrides, 3)
