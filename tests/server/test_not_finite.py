"""A gradient that is not finite, although the loss is: servers look at each finished sum before they apply it."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rallypoint.config import resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Sync
from rallypoint.core.protocol import Accounted, Finished, Skipped
from rallypoint.errors import JobAborted
from rallypoint.server.shard import FloatRange, OwnedShard, first_not_finite, first_that_became, float_ranges, norm_of
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.testing.reference import train_reference
from rallypoint.worker.tensors import weights_hash
from support.beside import until
from support.gathering import DATA, SETTINGS, build, gathering, loss_of

STEP, REPLICA = 3, 2
LAST = SETTINGS["steps"] - 1
NAMED = (
    rf"step {STEP}: the gradient of replica {REPLICA} is not finite, "
    r"first in [03]\.(weight|bias): nothing of it was applied"
)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")


@pytest.fixture(autouse=True)
def masters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Was every master finite after each update, on every server? Looked at after each test."""
    whole: list[bool] = []
    real = OwnedShard.apply

    def apply(self: OwnedShard, *args: Any) -> Any:
        applied = real(self, *args)
        if self.measured:
            whole.append(bool(torch.isfinite(self.master).all()))
        return applied

    monkeypatch.setattr(OwnedShard, "apply", apply)
    yield whole
    assert all(whole), "values that are not finite were applied"


class _Scale(torch.autograd.Function):
    """The value as it is, and its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


class Poison:
    """One worker's loss, whose gradient is multiplied by `factor` for (STEP, REPLICA), or another place."""

    def __init__(self, factor: float = math.nan, place: tuple[int, int] = (STEP, REPLICA)) -> None:
        self._factor, self._place, self._at = factor, place, (-1, -1)

    def at(self, step: int, replica: int) -> None:
        self._at = (step, replica)

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        poisoned = self._at == self._place
        return _Scale.apply(loss, self._factor) if poisoned else loss  # type: ignore[no-any-return, no-untyped-call]


def reference(factor: float = math.nan, **settings: Any) -> str:
    """Plain PyTorch, with the same step poisoned."""
    poison, calls = Poison(factor), itertools.count()
    config = resolve({**SETTINGS, **settings})

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        poison.at(*divmod(next(calls), config.replicas))
        return poison(model, batch)

    model = build()
    train_reference(model, DATA, loss, config)
    return weights_hash(model)


def snapshots_are_finite(folder: Path) -> bool:
    store = SnapshotStore(str(folder))
    records = [record for manifest in store.manifests() for record in store.read(manifest, manifest.shards)]
    assert records
    return all(bool(torch.from_numpy(array).isfinite().all()) for r in records for array in r.arrays.values())


CLIP = pytest.mark.parametrize("clip", [None, 0.5])
REPLICATION = pytest.mark.parametrize("replication", [1, 2])


@pytest.mark.some("3-1-None")
@CLIP
@REPLICATION
@pytest.mark.parametrize("step", [STEP, LAST])
def test_stop_ends_the_job_before_anything_of_it_is_applied_and_names_replica_step_and_parameter(
    tmp_path: Path, clip: float | None, replication: int, step: int
) -> None:
    with gathering(2, tmp_path, replication=replication, workers_start=2, workers_max=2, snapshot_steps=1) as cluster:
        for poison in (Poison(place=(step, REPLICA)), Poison(place=(step, REPLICA))):
            cluster.add_worker(poison.at, loss=poison, clip=clip)
        for worker in cluster.workers:
            with pytest.raises(JobAborted, match=NAMED.replace(f"step {STEP}", f"step {step}")):
                worker.result()
        assert not cluster.heard(Finished)
    assert snapshots_are_finite(tmp_path)
    if clip is not None:  # all servers are at one version
        assert max(m.version for m in SnapshotStore(str(tmp_path)).manifests()) == step


@pytest.mark.some("2-None")
@CLIP
@REPLICATION
def test_skip_leaves_the_step_out_in_every_shard_and_the_bytes_are_those_of_plain_pytorch(
    clip: float | None, replication: int
) -> None:
    expected = reference(clip=clip, nonfinite="skip")
    with gathering(2, replication=replication, workers_start=2, workers_max=2) as cluster:
        for poison in (Poison(), Poison()):
            cluster.add_worker(poison.at, loss=poison, clip=clip, nonfinite="skip")
        assert [worker.result() for worker in cluster.workers] == [expected] * 2
        until(lambda: bool(cluster.heard(Finished)))
        (skipped,) = cluster.heard(Skipped)
    assert (skipped.step, skipped.gradients, skipped.parameter) == (STEP, (REPLICA,), "3.weight")
    assert (skipped.replicas, skipped.alone) == ((), False)


@pytest.mark.parametrize("mute", [0, 1])
def test_a_skipped_step_is_said_once_whichever_server_dies_before_it_has_said_so(
    mute: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gathering(2) as cluster:
        link = cluster.servers[mute]._link
        says = link.send
        monkeypatch.setattr(link, "send", lambda message: isinstance(message, Skipped) or says(message))
        poison = Poison()
        assert cluster.add_worker(poison.at, loss=poison, nonfinite="skip").result()
        until(lambda: bool(cluster.heard(Finished)))
        assert [skipped.step for skipped in cluster.heard(Skipped)] == [STEP]


@pytest.mark.some("Async(scale_by_staleness=False, delay_compensation=0.0, fold=3)")
@pytest.mark.parametrize("sync", [
    AllReduce(), Sync(quorum=4), BoundedStaleness(1), Async(), Async(fold=3), Async(delay_compensation=0.1)
], ids=repr)  # fmt: skip
def test_stop_ends_the_job_in_every_mode_in_which_servers_apply_gradients(sync: Any) -> None:
    with gathering(2) as cluster:
        poison = Poison()
        worker = cluster.add_worker(poison.at, loss=poison, clip=None, sync=sync)
        with pytest.raises(JobAborted, match=NAMED):
            worker.result()


def test_stop_names_the_steps_of_a_round_of_local_steps() -> None:
    with gathering(2) as cluster:
        poison = Poison()
        worker = cluster.add_worker(poison.at, loss=poison, clip=None, sync=LocalSteps(2))
        with pytest.raises(JobAborted, match=r"the loss of replica 2 at step|steps 2 to 3: the gradient of replica 2"):
            worker.result()


@pytest.mark.some("Async(scale_by_staleness=False, delay_compensation=0.0, fold=1)")
@pytest.mark.parametrize("sync", [BoundedStaleness(1), Async(), Async(fold=3)], ids=repr)
def test_where_replicas_have_their_own_clocks_only_that_contribution_is_dropped(sync: Any) -> None:
    with gathering(2) as cluster:
        poison = Poison()
        assert cluster.add_worker(poison.at, loss=poison, clip=None, sync=sync, nonfinite="skip").result()
        until(lambda: bool(cluster.heard(Finished)))
        skipped = cluster.heard(Skipped)
        assert {(s.step, s.gradients, s.alone) for s in skipped} == {(STEP, (REPLICA,), True)}
        assert len(skipped) == 1, "said once, whatever the number of shards and servers"
        until(lambda: cluster.heard(Accounted)[-1].dropped == 1)  # the last account may come after the job's end


def test_skip_goes_on_under_all_reduce_with_the_same_bytes() -> None:
    with gathering(2) as cluster:
        poison = Poison()
        settings: dict[str, Any] = {"clip": None, "nonfinite": "skip"}
        worker = cluster.add_worker(poison.at, loss=poison, sync=AllReduce(), **settings)
        assert worker.result() == reference(**settings)


@pytest.mark.some("stop")
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_large_finite_gradients_are_clipped_by_their_true_norm_and_are_no_error(nonfinite: str) -> None:
    """Their squares overflow fp32: the norm of a shard looks infinite."""
    expected = reference(1e25, nonfinite=nonfinite)
    with gathering(2) as cluster:
        poison = Poison(1e25)
        assert cluster.add_worker(poison.at, loss=poison, nonfinite=nonfinite).result() == expected
        assert not cluster.heard(Skipped)


# ---- what is looked at -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 700, 999])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(value: float, at: int) -> None:
    values = torch.randn(1000)
    values[at] = value
    assert first_not_finite(values) == at
    assert not math.isfinite(norm_of(values))


@pytest.mark.parametrize("size", [1e30, 3.4e38])
def test_finite_values_whose_sum_overflows_are_finite(size: float) -> None:
    values = torch.full((1000,), size)
    assert first_not_finite(values) == -1
    assert norm_of(values) == pytest.approx(size * math.sqrt(1000))


def test_infinities_that_add_up_to_nothing_are_found() -> None:
    assert first_not_finite(torch.tensor([1.0, math.inf, -math.inf])) == 1


def test_a_buffer_may_keep_an_infinity_and_may_not_get_one() -> None:
    mask = torch.tensor([0.0, -math.inf, 1.0])
    floats = [FloatRange(0, 3, torch.float32)]
    assert first_that_became(floats, mask.clone(), mask) == -1
    assert first_that_became(floats, torch.tensor([math.nan, -math.inf, 1.0]), mask) == 0
    assert first_that_became(floats, torch.tensor([0.0, -math.inf, math.inf]), mask) == 2


def test_only_words_of_floating_point_numbers_are_looked_at() -> None:
    specs = [
        TensorSpec("w", (4,), "float32", 0), TensorSpec("half", (3,), "float16", -1),
        TensorSpec("count", (), "int64", -1), TensorSpec("double", (5,), "float64", -1),
        TensorSpec("mean", (7,), "float32", -1),
    ]  # fmt: skip
    layout = build_layout(specs, 12)
    found = set[int]()
    for shard in layout.shards[1:]:
        for start, stop, dtype in float_ranges(shard, layout.entries):
            assert (stop - start) * 4 % dtype.itemsize == 0
            found |= {*range(shard.start + start, shard.start + stop)}
    of = {entry.spec.name: (entry.start, entry.spec) for entry in layout.entries}
    assert not found & {*range(of["count"][0], of["count"][0] + 2)}
    assert {*range(of["mean"][0], of["mean"][0] + 7)} <= found
    whole = build_layout(specs, 4096)
    (buffers,) = [shard for shard in whole.shards if shard.role == "buffers"]
    words = {dtype: stop - start for start, stop, dtype in float_ranges(buffers, whole.entries)}
    assert words == {torch.float16: 2, torch.float64: 10, torch.float32: 7}
