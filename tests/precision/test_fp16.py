"""precision="fp16": overflows at known steps give the skipped steps, scales and bytes of plain PyTorch's GradScaler."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rallypoint.codec.spec import Bf16, Fp16, Int8
from rallypoint.config import resolve
from rallypoint.config.changes import changed_record
from rallypoint.config.resolve import record_of
from rallypoint.core.optimizer import ENTRY, SGD, LossScaling, is_power_of_two
from rallypoint.core.policy import Async
from rallypoint.core.protocol import Finished, Skipped
from rallypoint.core.shard.clip import Measure, Rule
from rallypoint.core.view import ViewNumber
from rallypoint.errors import ConfigError, JobAborted, NonFiniteLoss
from rallypoint.store.export import model_state
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.testing.reference import loss_scales
from rallypoint.worker.tensors import ModelTensors, weights_hash
from support.beside import until
from support.gathering import DATA, SETTINGS, Gathering, Once, build, gathering, loss_of

SCALING = LossScaling(init_scale=1024.0, growth_interval=3)
FP16: dict[str, Any] = {"precision": "fp16", "loss_scale": SCALING, "steps": 14}
OVERFLOWS = {1: 2, 2: 0, 9: 3}  # step -> the replica whose gradients overflow there
# 512 after step 1, 256 after step 2; doubled after three steps that were applied: after steps 5, 8, 12
SCALES = [1024.0, 1024.0, 512.0, 256.0, 256.0, 256.0, 512.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")


class _Overflow(torch.autograd.Function):
    """The value as it is, and its gradient times 1e37: too much for fp32 if the loss is scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * 1e37


class Loss:
    """One worker's loss, whose gradients overflow at `OVERFLOWS`; it notes where, and every step's loss scale."""

    def __init__(self, overflows: dict[int, int]) -> None:
        self._overflows, self._at = overflows, (-1, -1)

    def at(self, step: int, replica: int) -> None:
        self._at = (step, replica)

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        step, replica = self._at
        overflows = self._overflows.get(step) == replica
        return _Overflow.apply(loss) if overflows else loss  # type: ignore[no-any-return, no-untyped-call]


def reference(overflows: dict[int, int] = OVERFLOWS, **settings: Any) -> tuple[str, list[float]]:
    """Plain PyTorch with torch.amp.GradScaler: the weights' hash, and the scales."""
    config, loss, calls = resolve({**SETTINGS, **FP16, **settings}), Loss(overflows), itertools.count()

    def called(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss.at(*divmod(next(calls) // config.accumulate, config.replicas))
        return loss(model, batch)

    model = build()
    scales = loss_scales(model, DATA, called, config)
    return weights_hash(model), scales


# ---- the rule ----


def test_the_rule_is_that_of_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scale, applied = SCALING.init_scale, 0
    generator = torch.Generator().manual_seed(0)
    for skipped in (torch.rand(200, generator=generator) < 0.2).tolist():
        parameter.grad = torch.full((1,), math.inf if skipped else 1.0) * scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        scale, applied = SCALING.after(scale, applied, skipped=skipped)
        assert scale == scaler.get_scale()


def test_the_scale_stays_a_number_that_fp32_holds() -> None:
    scale = 1.0
    for _ in range(300):
        scale, _ = SCALING.after(scale, 0, skipped=True)
    assert is_power_of_two(scale)
    for _ in range(300):
        scale, _ = LossScaling(growth_interval=1).after(scale, 0, skipped=False)
    assert is_power_of_two(scale)
    assert not any(map(is_power_of_two, (0.0, -2.0, 3.0, 2.0**128, math.inf, math.nan)))


def _verdict(rule: Rule, *measures: Measure) -> tuple[float | None, bool]:
    verdict = rule.verdict(3, measures, ViewNumber())
    return verdict.scale, verdict.stops


def test_servers_divide_by_the_scale_that_one_of_them_tells_and_clip_what_is_unscaled() -> None:
    rule = Rule(clip=1.0, stops=True, scaled=True)
    scale = Measure(2, (0.0,), loss_scale=1024.0)
    small, large = Measure(0, (512.0,)), Measure(0, (4096.0,))
    assert _verdict(rule, small, scale) == (1 / 1024.0, False)
    assert _verdict(rule, large, scale) == (1.0 / (4.0 + 1e-6) / 1024.0, False)
    assert rule.verdict(3, [large, scale], ViewNumber()).norm == 4.0


@pytest.mark.parametrize(("stops", "scale", "found", "stopped"), [
    (True, 1024.0, {"at": 5}, False),
    (True, 1.0, {"at": 5}, True),  # a lower scale cannot help
    (False, 1.0, {"at": 5}, False),
    (True, 1024.0, {"not_finite": (1,)}, True),  # nor with a loss that is not finite
    (False, 1024.0, {"not_finite": (1,)}, False),
    (True, 1024.0, {"gradients": (0,)}, False),
])  # fmt: skip
def test_a_step_that_overflows_is_skipped_and_what_no_scale_can_help_is_left_to_nonfinite(
    stops: bool, scale: float, found: dict[str, Any], stopped: bool
) -> None:
    rule = Rule(skips=not stops, stops=stops, scaled=True)
    assert _verdict(rule, Measure(0, (0.0,), **found), Measure(1, (0.0,), loss_scale=scale)) == (None, stopped)


# ---- jobs ----


def _scales_seen(seen: dict[int, set[float]]) -> list[float]:
    assert all(len(of_step) == 1 for of_step in seen.values()), f"replicas of one step had several scales: {seen}"
    return [seen[step].copy().pop() for step in sorted(seen)]


@pytest.mark.some("clip-2")
@pytest.mark.parametrize("replication", [1, 2])
@pytest.mark.parametrize("settings", [
    {}, {"clip": None}, {"batch": 4, "accumulate": 2, "nonfinite": "skip", "network.presum_bytes": 0},
], ids=["clip", "no clip", "accumulate"])  # fmt: skip
def test_forced_overflows_give_the_steps_scales_and_bytes_of_grad_scaler(
    settings: dict[str, Any], replication: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, scales = reference(**settings)
    assert scales == SCALES
    seen: dict[int, set[float]] = {}
    tensors: list[ModelTensors] = []
    init = ModelTensors.__init__

    def kept(self: ModelTensors, *args: Any) -> None:
        init(self, *args)
        tensors.append(self)

    monkeypatch.setattr(ModelTensors, "__init__", kept)
    with gathering(3, replication=replication, workers_start=2, workers_max=2) as cluster:
        for _ in range(2):
            loss = Loss(OVERFLOWS)

            def at(step: int, replica: int, loss: Loss = loss, index: int = len(cluster.workers)) -> None:
                scale = tensors[index].loss_scale
                seen.setdefault(step, set()).add(float(scale[0]))
                loss.at(step, replica)

            cluster.add_worker(at, loss=loss, **{**FP16, **settings})
            until(lambda: len(tensors) == len(cluster.workers))
        assert [worker.result() for worker in cluster.workers] == [expected] * 2
        until(lambda: bool(cluster.heard(Finished)))
        skipped = {message.step: message for message in cluster.heard(Skipped)}
    assert _scales_seen(seen) == SCALES[:-1]
    assert sorted(skipped) == sorted(OVERFLOWS)
    assert {step: message.gradients for step, message in skipped.items()} == {s: (r,) for s, r in OVERFLOWS.items()}
    assert [skipped[step].loss_scale for step in sorted(skipped)] == [512.0, 256.0, 512.0]


def _train(cluster: Gathering, *ats: Callable[[int, int], None], **settings: Any) -> list[str]:
    """One worker for each `at`."""
    for at in ats:
        loss = Loss(OVERFLOWS)

        def both(step: int, replica: int, loss: Loss = loss, at: Callable[[int, int], None] = at) -> None:
            at(step, replica)
            loss.at(step, replica)

        cluster.add_worker(both, loss=loss, **{**FP16, **settings})
    return [worker.result() for worker in cluster.workers]


def _nothing(step: int, replica: int) -> None:
    """Nothing happens."""


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.some("1")
def test_a_backup_goes_on_with_the_scale(victim: int) -> None:
    with gathering(3, replication=2, workers_start=2, workers_max=2) as cluster:

        def lose() -> None:
            until(lambda: cluster.coordinator._shell.machine.exposed == 0)
            cluster.servers[victim].close()

        at = Once(9, 1, lose)
        assert _train(cluster, at, at) == [reference()[0]] * 2
        assert at.done
        assert not [said for said in cluster.sentences() if "going back" in said]


def test_a_roll_back_to_a_snapshot_goes_on_with_the_scale_of_that_version(tmp_path: Path) -> None:
    """From version 5 on, in the middle of the steps after which the scale grows."""
    with gathering(1, tmp_path, snapshot_steps=5) as cluster:

        def lose() -> None:
            until(lambda: any(m.version == 5 for m in SnapshotStore(str(tmp_path)).manifests()))
            cluster.servers[0].close()
            cluster.add_servers(1)

        at = Once(8, 3, lose)
        assert _train(cluster, at) == [reference()[0]]
        assert [said for said in cluster.sentences() if said.startswith("going on from snapshot step-00000005-")]


def test_a_snapshot_holds_the_scale_and_an_export_does_not(tmp_path: Path) -> None:
    with gathering(2, tmp_path, snapshot_steps=5) as cluster:
        _train(cluster, _nothing)
    store = SnapshotStore(str(tmp_path))
    manifest = store.manifests()[0]
    (entry,) = [entry for entry in manifest.job.layout.entries if entry.spec.name == ENTRY]
    (shard,) = [s for s in manifest.job.layout.shards if s.start <= entry.start < s.stop]
    (record,) = store.read(manifest, [shard.index])
    scale, applied = SCALING.init_scale, 0
    for step in range(manifest.version):
        scale, applied = SCALING.after(scale, applied, skipped=step in OVERFLOWS)
    assert record.arrays["master"][entry.start - shard.start :][:2].tolist() == [scale, applied]
    assert scale == SCALES[manifest.version]
    assert model_state(store, manifest).keys() == build().state_dict().keys()


@pytest.mark.some("{'codec': Fp16(), 'network.presum_bytes': 0}")
@pytest.mark.parametrize("settings", [
    {"codec": Fp16(), "network.presum_bytes": 0}, {"down": Bf16()},
    {"batch": 4, "accumulate": 2, "network.window": 1, "network.hold_bytes": 0},
    {"network.shard_bytes": 64}, {"optimizer": SGD(lr=0.1, momentum=0.9)}, {"network.overlap": False},
], ids=str)  # fmt: skip
def test_with_other_settings_all_workers_end_with_the_same_bytes(settings: dict[str, Any]) -> None:
    (alone,) = _ended(1, 1, settings)
    assert _ended(2, 3, settings) == {alone}
    lossy = {"codec", "down"} & settings.keys()
    assert lossy or alone == reference(**settings)[0]


def _ended(workers: int, servers: int, settings: dict[str, Any]) -> set[str]:
    with gathering(servers, workers_start=workers, workers_max=workers) as cluster:
        return set(_train(cluster, *[_nothing] * workers, **settings))


def test_a_loss_that_is_not_finite_stops_the_job_before_anything_of_it_is_sent() -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch) * math.inf

    with gathering(1) as cluster, pytest.raises(NonFiniteLoss, match="loss of replica 0 at step 0 is inf"):
        cluster.add_worker(loss=loss, **FP16).result()


def test_a_gradient_that_no_scale_makes_finite_stops_the_job() -> None:
    """A scale of 8 backs off three times."""

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        found = loss_of(model, batch)
        found.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
        return found

    with gathering(1) as cluster:
        worker = cluster.add_worker(loss=loss, **{**FP16, "loss_scale": LossScaling(init_scale=8.0)})
        with pytest.raises(JobAborted, match=r"step 3: the gradient of replicas 0, 1, 2 and 3 is not finite"):
            worker.result()
        assert sorted(message.step for message in cluster.heard(Skipped)) == [0, 1, 2]


# ---- settings ----


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"sync": Async()}, "decisions that servers take once for all replicas"),
    ({"nonfinite": "continue"}, 'set nonfinite to "stop" or "skip"'),
    ({"codec": Int8()}, "scaled by that step's loss scale"),
    ({"loss_scale": {"init_scale": 1000.0}}, "loss_scale.init_scale is 1000.0: it must be a number that is a power"),
    ({"loss_scale": {"growth_factor": 0.5}}, "loss_scale.growth_factor is 0.5"),
    ({"loss_scale": {"backoff_factor": 2.0}}, "loss_scale.backoff_factor is 2.0"),
    ({"loss_scale": {"growth_interval": 0}}, "loss_scale.growth_interval is 0"),
])  # fmt: skip
def test_what_cannot_be_scaled_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve({"precision": "fp16", **settings})


def test_a_job_goes_on_in_another_precision_unless_the_loss_scale_is_or_would_be_missing() -> None:
    settings = {"replicas": 2, "batch": 4}
    fp32 = record_of(resolve(settings), ModelTensors(build(), resolve(settings)).layout)
    changed, (change,) = changed_record(fp32, {"precision": "bf16"}, 3)
    assert (change.key, changed.config["precision"]) == ("precision", "bf16")
    with pytest.raises(ConfigError, match="precision is fp32 and cannot become fp16: the loss scale"):
        changed_record(fp32, {"precision": "fp16"}, 3)
    scaled = resolve({**settings, "precision": "fp16"})
    fp16 = record_of(scaled, ModelTensors(build(), scaled).layout)
    with pytest.raises(ConfigError, match="precision is fp16 and cannot become bf16"):
        changed_record(fp16, {"precision": "bf16"}, 3)
    changed, _ = changed_record(fp16, {"loss_scale": {"growth_interval": 100}}, 3)
    assert changed.config["loss_scale"]["growth_interval"] == 100
