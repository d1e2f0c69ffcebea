"""Local steps as a user meets them: what the loop sees, what a disturbance changes (nothing), what they cost."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import JobConfig, resolve
from rallypoint.errors import NonFiniteLoss
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.net.transport import InprocConnection, InprocLender
from rallypoint.testing.reference import train_reference
from rallypoint.worker.sources.local import _Inner
from rallypoint.worker.tensors import weights_hash
from support.reference_local import train_local_reference
from support.rewinds import Cluster, Once, build, cluster, cut_the_link, loss_of
from support.rewinds import train as train_disturbed
from support.training import finish, train

__all__ = ["cluster"]  # the fixture
SETTINGS: dict[str, Any] = {
    "replicas": 2, "batch": 8, "steps": 10, "accumulate": 2, "clip": 0.5, "network.shard_bytes": 256,
    "optimizer": rp.AdamW(lr=1e-2),
}  # fmt: skip
FRESH, KEPT = rp.LocalSteps(steps=4, keep_inner=False), rp.LocalSteps(steps=4)


def undisturbed(sync: rp.LocalSteps, **settings: Any) -> str:
    model, data = build()
    train_local_reference(model, data, loss_of, resolve({**SETTINGS, **settings, "sync": sync}))
    return weights_hash(model)


# ---- the loop ----


def test_every_replica_makes_every_step_in_order_and_evaluations_come_with_versions() -> None:
    model, data = build()
    seen: list[tuple[int, int, int]] = []
    evaluated: list[tuple[int, int]] = []
    with EmbeddedJob() as job:
        run = job.train(model, data, **{**SETTINGS, "sync": FRESH})

        @run.every(3)
        def evaluate(step: int) -> None:
            evaluated.append((step, run.step))

        finish(run, model, loss_of, before=lambda micro: seen.append((micro.step, micro.replica, micro.index)))
    rounds = [range(4), range(4, 8), range(8, 10)]
    assert seen == [(s, r, i) for steps in rounds for r in range(2) for s in steps for i in range(2)]
    assert evaluated == [(4, 4), (8, 8), (10, 10)]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_told_of_a_run_is_in_steps_of_training(tmp_path: Path) -> None:
    train(*build(), loss_of, servers=2, folder=tmp_path, **SETTINGS, sync=FRESH, **{"reading.items_per_sample": 3})
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    done = [event for event in events if event["type"] == "StepDone"]
    assert [event["step"] for event in done] == [3, 7, 9]
    assert [event["items"] for event in done] == [2 * 8 * 3 * steps for steps in (4, 4, 2)]
    planned = next(event for event in events if event["type"] == "Planned")
    assert (planned["steps"], planned["steps_per_round"]) == (10, 4)


# ---- disturbances ----


@pytest.mark.some("a round's first-kept")
@pytest.mark.parametrize("sync", [FRESH, KEPT], ids=["fresh", "kept"])
@pytest.mark.parametrize("at", [(4, 0, 0), (6, 1, 1), (9, 1, 0)], ids=["a round's first", "its middle", "the last"])
def test_a_roll_back_in_the_middle_of_a_round_begins_it_once_more(
    cluster: Cluster, at: tuple[int, int, int], sync: rp.LocalSteps
) -> None:
    model, data = build()
    disturb = Once(at, cluster.lose_the_server)
    yielded = train_disturbed(cluster.job, model, data, disturb, **SETTINGS, sync=sync)
    assert [where for where, abandoned in yielded if abandoned] == [at]
    first = (at[0] // 4 * 4, 0, 0)
    assert Counter(where for where, _ in yielded)[first] == 2, "the whole round is made again"
    if sync is FRESH:  # what the inner optimizers had kept is void with the past that it was of
        assert weights_hash(model) == undisturbed(FRESH)


@pytest.mark.parametrize(
    ("sync", "at", "version"), [(FRESH, 5, 1), (KEPT, 5, 1), (rp.LocalSteps(steps=6, fragments=3), 9, 4)],
    ids=["fresh", "kept", "fragments"],
)  # fmt: skip
def test_a_replica_that_has_to_be_computed_twice_in_a_round_contributes_the_same(
    cluster: Cluster, sync: rp.LocalSteps, at: int, version: int
) -> None:
    """What was under way to a server is lost with the link to it: replica 0 is computed again, and its state too.

    While replica 2 is missing the round cannot end: there is always somebody who still wants it.
    """
    model, data = build()
    disturb = Once((at, 1, 0), lambda: cut_the_link(cluster.job, version))  # in the second step of a round
    more = {"replicas": 3, "steps": 16, "network.presum_bytes": 0, "sync": sync}
    yielded = train_disturbed(cluster.job, model, data, disturb, "before", **{**SETTINGS, **more})
    times = Counter(where for where, _ in yielded)
    assert times[(at, 0, 0)] == 2
    assert weights_hash(model) == undisturbed(sync, replicas=3, steps=16)


def test_a_round_that_is_made_again_in_bf16_begins_with_the_same_numbers() -> None:
    """NAdam's `mu_product`, fp32 beside parameters of any type: in bf16 it would have three digits."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5000, dtype=torch.bfloat16))
    inner = _Inner(torch.optim.NAdam([parameter], lr=0.1, foreach=False), round=0)

    def steps(*seeds: int) -> torch.Tensor:
        for seed in seeds:
            parameter.grad = torch.randn(5000, generator=torch.Generator().manual_seed(seed)).bfloat16()
            inner.optimizer.step()
        return parameter.detach().clone()

    start = steps(0)
    inner.begin(1)
    first = steps(1, 2)
    inner.go_back()
    parameter.data.copy_(start)
    assert torch.equal(steps(1, 2), first)


# ---- what it is equal to ----


def plain() -> tuple[torch.nn.Module, torch.utils.data.TensorDataset]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    return model, torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randn(40, 3))


def both_ways(**settings: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The start, and where Sync and local steps of one step each, both with plain SGD, come from there: vectors."""
    settings = {"batch": 8, "optimizer": rp.SGD(lr=0.05), "network.shard_bytes": 256, **settings}
    model, data = plain()
    start = flat(model)
    train_reference(model, data, loss_of, resolve(settings))
    local, data = plain()
    train(local, data, loss_of, servers=2, **settings, sync=rp.LocalSteps(steps=1, outer=rp.SGD(lr=1.0)))
    return start, flat(model), flat(local)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_one_local_step_of_one_replica_is_plain_sgd_but_for_the_rounding_of_the_difference() -> None:
    start, sync, local = both_ways(steps=1)
    assert torch.equal(local, start - (start - sync)), "what is sent is the difference, and it is rounded"
    near = (sync / start >= 0.5) & (sync / start <= 2.0)  # there it is exact (Sterbenz, 1974)
    assert near.float().mean() > 0.9
    assert torch.equal(local[near], sync[near])


def test_local_steps_of_one_step_agree_with_sync() -> None:
    start, sync, local = both_ways(steps=20, replicas=3)
    assert (sync - start).abs().max() > 0.05
    # Per step: the rounding of three differences and their mean, each half a unit in the last place of at most 0.5.
    torch.testing.assert_close(local, sync, rtol=0.0, atol=20 * 4 * 2.0**-25)


# ---- losses that are not finite ----


def train_with_a_nan(model: torch.nn.Sequential, data: Any, where: str, **settings: Any) -> list[int]:
    """At step 5 the loss, the gradient or the input of replica 0, whose buffers are kept, is not finite; its steps."""
    steps = []
    with EmbeddedJob(servers=2) as job:
        for micro in job.train(model, data, **settings):
            struck = (micro.step, micro.replica) == (5, 0)
            with micro:
                inputs, targets = micro.batch
                if struck and where == "input":
                    inputs = inputs * math.nan
                outputs = model(inputs)
                if struck and where == "gradient":
                    outputs.register_hook(lambda gradient: gradient * math.inf)
                loss = torch.nn.functional.mse_loss(outputs, targets)
                micro.backward(loss * math.nan if struck and where == "loss" else loss)
            steps += [micro.step] if micro.replica == 0 and micro.index == 0 else []
    return steps


def test_a_step_that_is_not_finite_is_left_out_by_its_replica_alone() -> None:
    hashes = set()
    for where in ("loss", "gradient", "input"):
        model, data = build()
        assert train_with_a_nan(model, data, where, **SETTINGS, sync=KEPT, nonfinite="skip") == [*range(10)]
        assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
        hashes.add(weights_hash(model))
    assert len(hashes) == 1
    assert hashes != {undisturbed(KEPT)}


def test_a_loss_that_is_not_finite_stops_the_job_before_its_round_is_applied() -> None:
    with pytest.raises(NonFiniteLoss, match=r"replica 0 at step 5 is nan: nothing of that round was applied"):
        train_with_a_nan(*build(), "loss", **SETTINGS, sync=FRESH)


def test_a_job_may_go_on_with_what_is_not_finite_as_plain_pytorch_would() -> None:
    model, data = build()
    train_with_a_nan(model, data, "loss", **SETTINGS, sync=FRESH, nonfinite="continue")
    assert bool(model[0].weight.isnan().all())


# ---- memory and bytes ----


def test_half_precision_parameters_that_have_not_moved_contribute_nothing() -> None:
    """The masters are fp32: what a worker rounds away when it takes a version over must not come back as a delta."""
    model = torch.nn.Linear(6, 3).to(torch.bfloat16)
    data = torch.utils.data.TensorDataset(torch.randn(40, 6).bfloat16(), torch.randn(40, 3).bfloat16())
    optimizer = rp.SGD(lr=rp.step_decay(0.1, every=3, factor=0.0))  # after the first round the rate is 0
    masters = []
    with EmbeddedJob() as job:
        sync = rp.LocalSteps(steps=3, outer=rp.SGD(lr=0.3))
        run = job.train(model, data, steps=12, batch=4, optimizer=optimizer, sync=sync)
        server: Any = job._servers[0]
        for micro in run:
            with micro:
                micro.backward(loss_of(model, micro.batch))
            if micro.step % 3 == 0:  # here the server has published, so it knows the job and has a reducer
                masters.append(torch.cat([shard.master for shard in server._reducer._owned.values()]))
    assert not torch.equal(masters[0], masters[1])
    assert not torch.equal(masters[1], masters[1].bfloat16().float())
    assert torch.equal(masters[1], masters[3])


@pytest.mark.slow
def test_sixteen_local_steps_move_a_fifteenth_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that anybody sends or lends is counted, first weights and beats too."""
    send, lend = InprocConnection.send, InprocLender.lend

    def counting(self: InprocConnection, head: bytes, payload: memoryview | None = None) -> None:
        nonlocal bytes_sent
        bytes_sent += len(head) + (len(payload) if payload is not None else 0)
        send(self, head, payload)

    def counting_lent(self: InprocLender, payload: memoryview) -> int | None:
        nonlocal bytes_sent
        number = lend(self, payload)
        bytes_sent += len(payload) if number is not None else 0
        return number

    monkeypatch.setattr(InprocLender, "lend", counting_lent)
    monkeypatch.setattr(InprocConnection, "send", counting)
    counts = []
    for sync in (rp.Sync(), rp.LocalSteps(steps=16)):
        bytes_sent = 0
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 3))
        data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randn(40, 3))
        train(model, data, loss_of, servers=2, steps=480, batch=1, sync=sync)
        counts.append(bytes_sent)
    assert counts[0] >= 15 * counts[1], counts


def test_the_worker_holds_one_vector_more_and_two_states_for_each_replica() -> None:
    model, data = build()
    config: JobConfig = resolve({**SETTINGS, "sync": KEPT})
    run = train(model, data, loss_of, **SETTINGS, sync=KEPT)
    source: Any = run._source
    parameters = sum(p.numel() for p in model.parameters())
    assert source._start.numel() == run._parts.tensors.layout.words
    assert sorted(source._inner.kept) == list(range(config.replicas))
    for inner in source._inner.kept.values():
        kept = inner.optimizer.state_dict()["state"].values()
        for states in (kept, inner.before.values()):
            moments = sum(t.numel() for state in states for name, t in state.items() if name != "step")
            assert moments == 2 * parameters
