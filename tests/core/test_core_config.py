"""The configuration: one precedence, unknown keys refused, and every refusal names its key."""

from __future__ import annotations

import subprocess
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.codec.spec import DGC
from rallypoint.config import (
    Group,
    GroupSettings,
    JobConfig,
    Network,
    Reading,
    Settings,
    group_of,
    overrides_from,
    record_of,
    resolve,
    settings_applied,
    settings_of,
)
from rallypoint.config.resolve import names_of
from rallypoint.core.cadence import Cadence, Period
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.optimizer import SGD, Adagrad, Adam, AdamW
from rallypoint.core.policy import Async, LocalSteps, Sync
from rallypoint.core.schedule import Constant, Cosine, cosine, linear, step_decay
from rallypoint.errors import ConfigError


def test_the_keywords_of_train_are_the_fields_of_the_configuration() -> None:
    fields = {field.name for field in msgspec.structs.fields(JobConfig)} - {"keyed"}  # `job.store` sets it
    assert typing.get_type_hints(Settings).keys() == fields
    ours, theirs = typing.get_type_hints(JobConfig), typing.get_type_hints(Settings)
    # Any sequence will do there
    assert {name for name in fields if ours[name] != theirs[name]} == {"groups"}


def test_nothing_given_is_the_defaults() -> None:
    assert resolve({}) == JobConfig()


_LRS = st.one_of(
    st.floats(1e-6, 1.0),
    st.builds(lambda peak: cosine(peak, warmup=3), st.floats(1e-6, 1.0)),
    st.builds(linear, st.floats(1e-6, 1.0)),
    st.builds(lambda peak: step_decay(peak, every=5), st.floats(1e-6, 1.0)),
)
_OPTIMIZERS = st.one_of(
    st.builds(AdamW, lr=_LRS, weight_decay=st.floats(0, 1)),
    st.builds(Adam, lr=_LRS, eps=st.floats(1e-10, 1e-3)),
    st.builds(Adagrad, lr=_LRS, lr_decay=st.floats(0, 1), initial_accumulator_value=st.floats(0, 1)),
    st.builds(SGD, lr=_LRS, momentum=st.floats(0.1, 0.99), nesterov=st.booleans()),
)
_CONFIGS = st.builds(
    JobConfig,
    replicas=st.integers(1, 64),
    batch=st.integers(1, 8).map(lambda n: n * 6),
    accumulate=st.sampled_from([1, 2, 3, 6]),
    optimizer=_OPTIMIZERS,
    clip=st.none() | st.floats(0.01, 100.0),
    seed=st.integers(0, 2**40),
    nonfinite=st.sampled_from(["stop", "skip", "continue"]),
    groups=st.lists(
        st.builds(Group, match=st.tuples(st.sampled_from(["*", "head.*"])), weight_decay=st.none() | st.floats(0, 1)),
        max_size=2,
    ).map(tuple),
    reading=st.builds(Reading, item=st.sampled_from(["samples", "tokens"])),
)


@pytest.mark.slow
@given(_CONFIGS)
def test_a_configuration_survives_the_job_record(config: JobConfig) -> None:
    tree = msgspec.to_builtins(config)
    assert msgspec.convert(tree, JobConfig) == config
    assert msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(tree)), JobConfig) == config
    given = {field: getattr(config, field) for field in config.__struct_fields__}
    assert resolve(given) == config


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"lerning_rate": 1.0}, "lerning_rate"),
        ({"optimizer": {"type": "adamw", "momentum": 0.9}}, "momentum"),
        ({"optimizer": {"type": "sgd", "lr": {"type": "cosine", "peak": 1.0, "warmpu": 3}}}, "warmpu"),
        ({"groups": [{"match": ["*"], "lr": 1.0}]}, "lr"),
        ({"sync": {"type": "sync", "staleness": 1}}, "staleness"),
    ],
)
def test_an_unknown_key_is_refused_by_name_wherever_it_is(tree: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown field `{named}`"):
        resolve({}, tree)
    with pytest.raises(ConfigError, match=f"unknown field `{named}`"):
        resolve(tree)


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"replicas": "four"}, "replicas is 'four': it must be a whole number of at least 1"),
        ({"replicas": 1.5}, "replicas is 1.5"),
        ({"replicas": True}, "replicas is true"),
        ({"clip": "1.0"}, "clip is '1.0': it must be a number above 0, or none"),
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore': it must be one of stop, skip, continue"),
        ({"optimizer": {"type": "lion"}}, "optimizer.type is 'lion': it must be one of adamw, adam, sgd, adagrad"),
        ({"optimizer": {"lr": 1.0}}, "optimizer has no type: add it, such as optimizer.type=adamw"),
        ({"sync": {"type": "local-steps"}}, "sync.steps is missing, and local-steps needs it: add it, such as --set"),
        ({"groups": [{"lr_scale": 2.0}]}, r"groups\[0\].match is missing, and groups\[0\] needs it: add it$"),
        ({"optimizer": {"type": "adamw", "betas": [0.9]}}, r"optimizer.betas is \[0.9\]: it must be a list of 2"),
        ({"groups": {"match": ["*"]}}, "groups is {.*}: it must be a list of parts"),
        ({"groups": [{"match": "*.bias"}]}, r"groups\[0\].match is .*: it must be a list of texts"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_place(tree: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        resolve(tree)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        *[({key: 0}, f"{key} is 0: it must be a whole number of at least 1")
          for key in ("replicas", "batch", "steps", "accumulate", "network.window", "reading.items_per_sample")],
        ({"steps": -3}, "steps is -3"),
        ({"batch": 32, "accumulate": 5}, "a batch of 32 cannot be cut into accumulate=5"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"clip": float("inf")}, "clip is inf"),
        ({"network.shard_bytes": 100}, "shard_bytes is 100"),
        ({"network.shard_bytes": 0}, "shard_bytes is 0"),
        ({"network.shard_bytes": 1 << 27}, "shard_bytes is 134217728"),
        ({"optimizer": SGD(nesterov=True)}, "nesterov=True needs a momentum"),
        ({"optimizer": Adagrad(lr_decay=-0.1)}, r"optimizer.lr_decay is -0.1: it must be a number of at least 0"),
        ({"optimizer": Adagrad(initial_accumulator_value=float("nan"))}, "optimizer.initial_accumulator_value is nan"),
        ({"optimizer": Adagrad(eps=0.0)}, "would divide a gradient of 0 by 0"),
        ({"sync": LocalSteps(steps=0)}, "sync.steps is 0: it must be a whole number of at least 1"),
        ({"sync": LocalSteps(steps=4, outer=SGD(nesterov=True))}, "nesterov=True needs a momentum"),
        ({"sync": LocalSteps(steps=4, outer=SGD(lr=float("nan")))}, "sync.outer.lr is nan: it must be a number"),
        ({"sync": LocalSteps(steps=4, over=Sync(quorum=9))}, "a quorum of 9 of 1 replicas"),
        ({"sync": LocalSteps(steps=8, fragments=3)}, "fragments=3: it must divide the 8 local steps"),
        ({"sync": LocalSteps(steps=8, fragments=0)}, "sync.fragments is 0"),
        ({"sync": LocalSteps(steps=8, fragments=2, keep_inner=False)}, "keep_inner=False is not supported"),
        ({"sync": LocalSteps(steps=8, fragments=2, over=Async())}, r"fragments= .* is not supported .* over=rp\.Sync"),
        ({"sync": LocalSteps(steps=8, fragments=2), "nonfinite": "skip"}, r"nonfinite=.skip. is not supported"),
        ({"sync": LocalSteps(steps=4), "codec": DGC(), "optimizer": SGD()}, "codec dgc has the momentum"),
        ({"groups": [Group(match=("head.*",), sync_every=4)]}, r"sync_every= of a group .* for sync=rp\.LocalSteps"),
        *[({"sync": LocalSteps(steps=8), "groups": [Group(match=("a",), sync_every=every, sync_offset=offset)]},
           f"group a: sync_every={every}, sync_offset={offset}: use a period of at least")
          for every, offset in ((0, 0), (None, 1), (4, 4), (4, -1))],
        *[({"sync": LocalSteps(steps=8, **more), "groups": [Group(match=("a",), sync_every=4)], **others}, sentence)
          for more, others, sentence in (
              ({"keep_inner": False}, {}, r"keep_inner=False is not supported under .* sync_every"),
              ({"over": Async()}, {}, r"sync_every= .* is not supported under .*needs over=rp\.Sync"),
              ({"delay": 4}, {}, "delay=4: the delay must be below the 4 steps from one"),
              ({"delay": -1}, {}, "sync.delay is -1"),
              ({"delay": 1, "mix": 0.0}, {}, "sync.mix is 0.0: it must be a number above 0, of at most 1"),
              ({"delay": 1, "mix": 1.5}, {}, "sync.mix is 1.5"),
              ({}, {"nonfinite": "skip"}, r"nonfinite=.skip. is not supported under .* sync_every"),
          )],
        ({"optimizer": object()}, "optimizer"),
        ({"optimizer": SGD(lr=step_decay(1.0, every=0))}, "every"),
    ],
)  # fmt: skip
def test_an_impossible_combination_is_refused_with_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(given)


def test_the_last_of_defaults_script_file_and_overrides_wins(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("steps = 30\nbatch = 3\n[optimizer]\ntype = 'adamw'\nweight_decay = 0.3\n")
    script = {"steps": 20, "batch": 2, "replicas": 2, "optimizer": AdamW(lr=0.2, weight_decay=0.2)}
    config = resolve(script, overrides_from(file, ["steps=40", "optimizer.eps=1e-4"]))
    assert (config.seed, config.replicas, config.batch, config.steps) == (0, 2, 3, 40)
    assert config.optimizer == AdamW(lr=0.2, weight_decay=0.3, eps=1e-4)


def test_what_is_said_of_a_group_is_merged_and_the_rest_are_defaults() -> None:
    bridge = {"network.overlap": False, "network.window": 2}
    config = resolve({**bridge, "network": Network(window=4, shard_bytes=64)}, {"network": {"pace_mbit": 9.0}})
    assert config.network == Network(overlap=False, window=4, shard_bytes=64, pace_mbit=9.0)
    assert names_of({"steps": 3, "network": Network(window=4)}) == {"steps", "network", "network.window"}
    assert names_of({"network": Network()}) == {"network"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"shard_bytes": 64}, r"shard_bytes is gone: it is network=rp.Network\(shard_bytes=...\) now, or --set"),
        ({"network": {"windows": 1}}, "network.windows is no setting of network: did you mean"),
        ({"network.windows": 1}, "network.windows is no setting of network: did you mean window?"),
        ({"network": 3}, r"network is 3: it must be rp.Network\(...\)"),
    ],
)
def test_a_wrong_name_in_a_group_is_answered_by_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(given)
    with pytest.raises(ConfigError, match=r"rp\.Network has no setting 'windows': did you mean window\?"):
        Network(windows=1)  # type: ignore[call-arg]


def test_a_dotted_override_reaches_into_a_schedule_and_a_later_one_wins() -> None:
    script = {"optimizer": AdamW(lr=cosine(1e-3, warmup=10))}
    config = resolve(script, overrides_from(None, ["optimizer.lr.peak=5e-4", "optimizer.lr.peak=2e-3"]))
    assert config.optimizer == AdamW(lr=Cosine(2e-3, warmup=10))
    flat = resolve(script, overrides_from(None, ["optimizer.lr=0.5"]))
    assert flat.schedule == Constant(0.5)


def test_adagrad_is_chosen_on_the_command_line() -> None:
    script = {"optimizer": AdamW(lr=1e-3)}
    config = resolve(script, overrides_from(None, ["optimizer.type=adagrad", "optimizer.lr=0.1"]))
    assert config.optimizer == Adagrad(lr=0.1), "nothing of AdamW's settings is left"


def test_override_values_are_toml_and_a_bare_word_is_a_string() -> None:
    texts = ["a=1", "b=1e-3", "c=true", "d=tokens", 'e="x=y"', "f=[1, 2]", "g.h = two words ", "i={j=1}"]
    assert overrides_from(None, texts) == {
        "a": 1, "b": 1e-3, "c": True, "d": "tokens", "e": "x=y", "f": [1, 2], "g": {"h": "two words"}, "i": {"j": 1},
    }  # fmt: skip


def test_overrides_of_one_branch_are_merged() -> None:
    assert overrides_from(None, ["a.b=1", "a.c.d=2", "a.c.e=3"]) == {"a": {"b": 1, "c": {"d": 2, "e": 3}}}


def test_an_override_without_a_value_says_how_to_write_one() -> None:
    with pytest.raises(ConfigError, match=r"--set steps: write it as key=value"):
        overrides_from(None, ["steps"])


def test_a_configuration_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        overrides_from(tmp_path / "nowhere.toml", [])
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        overrides_from(broken, [])


def test_resolving_changes_neither_the_script_s_settings_nor_the_overrides() -> None:
    script, over = {"optimizer": {"type": "sgd", "lr": 1.0}}, {"optimizer": {"lr": 2.0}}
    resolve(script, over)
    assert (script, over) == ({"optimizer": {"type": "sgd", "lr": 1.0}}, {"optimizer": {"lr": 2.0}})


@pytest.mark.parametrize(
    ("given", "decides"),
    [({}, False), ({"clip": 1.0}, True), ({"nonfinite": "skip"}, True), ({"nonfinite": "continue"}, False)],
)
def test_servers_decide_together_only_to_clip_or_to_skip(given: dict[str, Any], decides: bool) -> None:
    assert resolve(given).decides is decides


def test_norms_and_biases_are_not_decayed_unless_asked_for_and_the_first_matching_group_wins() -> None:
    groups = (Group(match=("head.*",), lr_scale=2.0), Group(match=("*.bias", "head.*"), weight_decay=0.5))
    config = JobConfig(optimizer=AdamW(weight_decay=0.1), groups=groups)
    assert group_of(config, "body.weight", 2) == 0
    assert group_of(config, "norm.weight", 1) == 1
    assert group_of(config, "head.bias", 1) == 2
    assert group_of(config, "body.bias", 1) == 3
    assert group_of(JobConfig(decay_1d=True), "norm.weight", 1) == 0
    assert [settings_of(config, group) for group in range(4)] == [
        GroupSettings(0.1, 1.0), GroupSettings(0.0, 1.0), GroupSettings(0.1, 2.0), GroupSettings(0.5, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("steps", "every", "rounds"), [(100, 16, 7), (96, 16, 6), (3, 50, 1), (10, 1, 10)])
def test_rounds_of_local_steps_cover_every_step_once(steps: int, every: int, rounds: int) -> None:
    config = JobConfig(steps=steps, sync=LocalSteps(steps=every))
    assert config.rounds == rounds
    assert [step for round in range(rounds) for step in config.steps_of(round)] == [*range(steps)]
    assert [config.steps_at(version) for version in (-1, 0, rounds)] == [-1, 0, steps]


def _layout_of(words: Sequence[int], buffers: int = 0) -> Layout:
    edges = [sum(words[:index]) for index in range(len(words) + 1)]
    shards = [Shard(i, 0, edges[i], edges[i + 1]) for i in range(len(words))]
    shards += [Shard(len(words) + i, -1, edges[-1] + 16 * i, edges[-1] + 16 * i + 16) for i in range(buffers)]
    return Layout((), tuple(shards), edges[-1] + 16 * buffers, "made up")


def test_fragments_are_runs_of_shards_of_about_as_many_bytes_and_each_round_updates_one() -> None:
    config = JobConfig(steps=100, sync=LocalSteps(steps=12, fragments=3))
    assert (config.steps_per_round, config.rounds, config.steps_at(2)) == (4, 25, 8)
    record = record_of(config, _layout_of([16, 16, 32, 16, 48, 16], buffers=1))
    turns = (Period(3, 0), Period(3, 1), Period(3, 2))
    assert record.cadence == Cadence(turns, 25, (0, 0, 1, 1, 2, 2, -1)), "buffers take no turns"
    assert (record.rounds, record.steps_per_round, record.mode.leaves_state) == (25, 4, True)
    assert record_of(JobConfig(sync=LocalSteps(steps=12)), _layout_of([16])).cadence == Cadence()


def _layout_in_groups(*groups: int) -> Layout:
    shards = tuple(Shard(i, group, 16 * i, 16 * i + 16) for i, group in enumerate(groups))
    return Layout((), shards, 16 * len(groups), "made up")


def _periods(*own: tuple[int, int]) -> tuple[Group, ...]:
    return tuple(Group(match=(f"{every}.*",), sync_every=every, sync_offset=offset) for every, offset in own)


def test_a_group_with_a_period_of_its_own_is_due_after_the_steps_that_it_names() -> None:
    groups = _periods((4, 0), (16, 4), (8, 4))
    config = JobConfig(steps=100, sync=LocalSteps(steps=16, fragments=2), groups=groups)
    assert (config.steps_per_round, config.rounds, config.staggered) == (4, 25, True)
    cadence = record_of(config, _layout_in_groups(0, 0, 1, 2, 3, 4, 4, -1)).cadence
    due = [[(tick + 1) * 4 for tick in range(24) if cadence.due(shard, tick)] for shard in range(8)]
    halves = [[*range(8, 97, 16)], [*range(16, 97, 16)]]
    assert due[:3] == [halves[0], halves[1], halves[1]]
    assert due[3] == due[7] == [*range(4, 97, 4)], "buffers too"
    assert due[4] == [*range(4, 97, 16)]
    assert due[5] == due[6] == [*range(4, 97, 8)]
    assert all(cadence.due(shard, 24) for shard in range(8))


def test_periods_of_their_own_may_be_all_that_there_is() -> None:
    config = JobConfig(steps=40, sync=LocalSteps(steps=16), groups=_periods((4, 0), (8, 0)))
    assert record_of(config, _layout_in_groups(2, 3)).cadence == Cadence((Period(1, 0), Period(2, 1)), 10, (0, 1))


@pytest.mark.parametrize(
    ("every", "own", "sentence"),
    [
        (16, (24, 0), "nothing would be synchronised after step 8, but with periods of 16, 24 steps .* sync_every=8"),
        (16, (16, 3), "nothing would be synchronised after step 1, .* sync_every=1"),
        (8191, (8190, 0), "periods of 8190, 8191 steps come together only every 67084290 steps"),
    ],
)
def test_periods_that_leave_a_round_empty_are_refused(every: int, own: tuple[int, int], sentence: str) -> None:
    config = JobConfig(steps=100, sync=LocalSteps(steps=every), groups=_periods(own))
    with pytest.raises(ConfigError, match=sentence):
        record_of(config, _layout_in_groups(0, 2))


def test_a_round_after_the_job_s_last_may_be_empty() -> None:
    config = JobConfig(steps=8, sync=LocalSteps(steps=16), groups=_periods((24, 0)))
    assert record_of(config, _layout_in_groups(0, 2)).cadence.rounds == 1


@pytest.mark.parametrize(("steps", "ahead"), [(20, [3, 3, 3, 3, 3]), (18, [3, 3, 3, 3, 1]), (17, [3, 3, 3, 3, 0])])
def test_a_short_last_round_hears_of_the_version_before_its_last_step(steps: int, ahead: list[int]) -> None:
    config = JobConfig(steps=steps, sync=LocalSteps(steps=8, fragments=2, delay=3))
    assert [config.steps_ahead(round) for round in range(config.rounds)] == ahead
    assert JobConfig(steps=20).steps_ahead(3) == 0


def test_with_a_delay_replicas_go_on_from_round_to_round_and_buffers_are_refused() -> None:
    config = JobConfig(steps=20, sync=LocalSteps(steps=8, delay=3))
    assert config.staggered
    assert record_of(config, _layout_of([16, 16])).cadence == Cadence((Period(1, 0),), 3, (0, 0))
    with pytest.raises(ConfigError, match=r"buffers .* is not supported together with delay="):
        record_of(config, _layout_of([16, 16], buffers=1))


def test_more_fragments_than_shards_are_refused() -> None:
    config = JobConfig(sync=LocalSteps(steps=12, fragments=3))
    with pytest.raises(ConfigError, match=r"fragments=3, but the parameters are only 2 shards: use fewer, or smaller"):
        record_of(config, _layout_of([16, 16], buffers=2))


def test_under_local_steps_servers_apply_the_outer_optimizer_and_groups_are_the_workers_affair() -> None:
    groups = (Group(match=("head.*",), lr_scale=2.0, weight_decay=0.5),)
    config = JobConfig(sync=LocalSteps(steps=4), groups=groups, clip=1.0)
    assert config.applied == SGD(lr=0.7, momentum=0.9, nesterov=True)
    assert config.applied_schedule == Constant(0.7)
    assert settings_applied(config, 2) == GroupSettings(0.0, 1.0) != settings_of(config, 2)
    assert not config.decides, "each replica clips its own"
    assert settings_applied(JobConfig(groups=groups), 2) == GroupSettings(0.5, 2.0)


def test_an_override_reaches_into_a_default_that_the_script_did_not_set() -> None:
    config = resolve({}, overrides_from(None, ["optimizer.lr=1e-2"]))
    assert config.optimizer == AdamW(lr=1e-2)


AT_ONCE = """
import os, sys, threading
import msgspec
from rallypoint.config import JobConfig, parse

def parse_at_once():
    sys.setswitchinterval(1e-6)
    data, all_here = msgspec.to_builtins(JobConfig()), threading.Barrier(8)
    threads = [threading.Thread(target=lambda: (all_here.wait(), parse(data))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

for _ in range(20):
    if not (child := os.fork()):
        parse_at_once()
        os._exit(0)
    if status := os.waitpid(child, 0)[1]:
        sys.exit(f"the process ended with {os.waitstatus_to_exitcode(status)}")
"""


@pytest.mark.slow
def test_the_first_proposals_may_be_parsed_by_many_threads_at_once() -> None:
    """msgspec crashes the process when two threads use a type for the first time (once in each child)."""
    tried = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False)
    assert (tried.returncode, tried.stderr) == (0, "")
