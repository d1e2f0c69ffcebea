"""`rp.wrap`: a loop of the script's own trains as plain PyTorch does with the same batches."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import STEPS, Net, build, loss_of, train_plain, train_wrapped

import rallypoint as rp
from rallypoint.bridges.wrap import wrap_in
from rallypoint.errors import ConfigError, UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.testing.processes import ProcessCluster
from rallypoint.worker.tensors import weights_hash
from rallypoint.worker.wrapped import OwnRun

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("kind", "replicas"), [
    ("workers", 2), ("servers", 2), pytest.param("workers", 3, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_wrapped_loop_ends_with_the_bytes_of_plain_training(kind: str, replicas: int) -> None:
    with ProcessCluster(workers=replicas, servers=1) as cluster:
        results = cluster.run(train_wrapped, kind, replicas)
    assert sorted(replica for replica, _ in results) == list(range(replicas))
    assert {weights for _, weights in results} == {train_plain(kind, replicas)}


def test_buffers_are_those_of_replica_0_on_all() -> None:
    """As under DDP with ``broadcast_buffers``."""
    with ProcessCluster(workers=2, servers=2) as cluster:
        (_, first), (_, second) = cluster.run(train_wrapped, "workers", 2, True)
    assert first == second


def test_one_process_needs_no_launcher() -> None:
    with EmbeddedJob() as job:
        assert train_wrapped(job, "workers", 1) == (0, train_plain("workers", 1))


@pytest.mark.parametrize("steps_it", [True, False])
def test_a_schedule_that_the_loop_does_not_step_is_warned_of_once(
    steps_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(OwnRun, "say", lambda run, text: said.append(text))
    with EmbeddedJob() as job:
        model = Net()
        inner, schedule = build("workers", model)
        optimizer = wrap_in(job, model, inner, steps=STEPS, schedule=schedule)
        for step in range(STEPS):
            loss_of(model, step, 0).backward()
            optimizer.step()
            if steps_it:
                schedule.step()
    assert len(said) == (not steps_it)
    assert steps_it or "call the StepLR's step() after each optimizer.step()" in said[0]


@pytest.mark.parametrize(("given", "item", "number"), [({}, "batches", 1), ({"batch": 64}, "samples", 64)])
def test_without_batch_the_rate_counts_batches(given: dict[str, int], item: str, number: int) -> None:
    with EmbeddedJob() as job:
        model = Net()
        run = wrap_in(job, model, build("workers", model)[0], steps=STEPS, **given).run
        assert (run.config.reading.item, run.config.reading.items_per_sample) == (item, number)
        assert run.folder == Path.cwd(), "a job alone has no folder"


def test_without_seeds_the_random_generators_are_the_loops_alone() -> None:
    torch.manual_seed(5)
    expected = [torch.rand(()).item() for _ in range(3)]
    with EmbeddedJob() as job:
        model, optimizer = wrapped(job, seeded=False)
        torch.manual_seed(5)
        drawn = []
        for step in range(3):
            drawn.append(torch.rand(()).item())
            loss_of(model, step, 0).backward()
            optimizer.step()
        optimizer.finish()
    assert drawn == expected


def test_the_loop_may_end_early_on_all() -> None:
    with EmbeddedJob() as job:
        model, optimizer = wrapped(job)
        for step in range(5):
            loss_of(model, step, 0).backward()
            optimizer.step()
        before = weights_hash(model)
        optimizer.finish()
        optimizer.finish()
        assert (optimizer.over, optimizer.position, weights_hash(model)) == (True, 5, before)
        with pytest.raises(UsageError, match="the job has ended with step 5: let the loop end there"):
            optimizer.step()


def test_after_the_last_step_the_optimizer_says_that_the_job_has_ended() -> None:
    with EmbeddedJob() as job:
        model, optimizer = wrapped(job, steps=2)
        for step in range(2):
            assert not optimizer.over
            loss_of(model, step, 0).backward()
            optimizer.step()
        assert optimizer.over
        with pytest.raises(UsageError, match="has ended with step 2"):
            optimizer.step()


def test_a_closure_is_called_and_its_loss_returned() -> None:
    with EmbeddedJob() as job:
        model, optimizer = wrapped(job, steps=1)

        def closure() -> torch.Tensor:
            loss = loss_of(model, 0, 0)
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0


def test_random_numbers_of_a_step_follow_from_the_step() -> None:
    """So a process that is started again draws what the one before it would have drawn."""
    drawn = []
    for shift in (0, 7):
        torch.manual_seed(shift)
        with EmbeddedJob() as job:
            model, optimizer = wrapped(job, steps=3)
            for step in range(3):
                drawn.append(torch.rand(1).item())
                torch.rand(shift)
                loss_of(model, step, 0).backward()
                optimizer.step()
    assert drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3


def test_where_servers_step_the_script_cannot_set_the_rate() -> None:
    with EmbeddedJob() as job:
        model = Net()
        optimizer = wrap_in(job, model, rp.SGD(lr=rp.linear(0.5, warmup=0)), steps=2)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5]
        loss_of(model, 0, 0).backward()
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.25]
        optimizer.param_groups[0]["lr"] = 0.1
        with pytest.raises(UsageError, match="servers step: give the schedule to the optimizer"):
            optimizer.step()


def test_state_that_is_the_same_may_be_loaded_and_other_state_may_not() -> None:
    """Accelerate loads an optimizer's own state back into it."""
    with EmbeddedJob() as job:
        model, optimizer = wrapped(job, steps=2)
        loss_of(model, 0, 0).backward()
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        state["param_groups"][0]["lr"] = 0.7
        with pytest.raises(UsageError, match=r"load_state_dict after rp\.wrap"):
            optimizer.load_state_dict(state)


def test_a_setting_of_the_jobs_own_loop_is_refused() -> None:
    settings: dict[str, Any] = {"accumulate": 2}
    with EmbeddedJob() as job, pytest.raises(ConfigError, match=r"rp\.wrap has no setting accumulate"):
        wrap_in(job, Net(), rp.AdamW(), steps=1, **settings)


def test_order_own_is_refused_in_the_jobs_own_loop() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(4, 6))
    settings: dict[str, Any] = {"reading.order": "own"}
    with EmbeddedJob() as job, pytest.raises(ConfigError, match=r"set by rp\.wrap"):  # at once: nobody is waited for
        job.train(Net(), data, batch=1, steps=1, replicas=2, **settings)


def test_a_plain_loop_changes_four_lines() -> None:
    """An import, the wrap, the loop's first step; the clipping goes, because servers clip the mean."""
    names = [str(EXAMPLES / name) for name in ("plain_loop.py", "wrapped_loop.py")]
    diff = subprocess.run(["git", "diff", "--no-index", "-U0", *names], capture_output=True, text=True).stdout
    lines = [line for line in diff.splitlines()[4:] if line[1:].strip() and line[0] in "+-"]
    assert [line[0] for line in lines].count("+") == 3
    assert [line[0] for line in lines].count("-") == 2


def wrapped(job: rp.Job, steps: int = STEPS, **settings: Any) -> tuple[Net, rp.WrappedOptimizer]:
    model = Net()
    return model, wrap_in(job, model, build("workers", model)[0], steps=steps, **settings)
