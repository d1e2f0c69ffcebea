"""A script ends its job before the last step: run.stop() in the loop and in an evaluation, break, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.errors import UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.run import Run
from rallypoint.worker.tensors import weights_hash

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).view(32, 3))
SETTINGS: dict[str, Any] = {"replicas": 2, "batch": 4, "optimizer": rp.SGD(lr=0.1)}
Leaves = Callable[[Run, Micro], bool]


def build() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def train(
    before: Leaves | None = None, after: Leaves | None = None, evaluate: Callable[[Run, int], None] | None = None,
    **settings: Any,
) -> tuple[str, int, bool, list[int]]:  # fmt: skip
    """Return the weights' hash, run.step, run.lead and the steps evaluated. `before`, `after`: leave the loop there."""
    model, seen = build(), list[int]()
    with EmbeddedJob() as job:
        run = job.train(model, DATA, **{**SETTINGS, "steps": 12, **settings})

        @run.every(4)
        def evaluation(step: int) -> None:
            seen.append(step)
            if evaluate is not None:
                evaluate(run, step)

        for micro in run:
            if before is not None and before(run, micro):
                break
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
            if after is not None and after(run, micro):
                break
        lead = run.lead
        return weights_hash(model), run.step, lead, seen


def undisturbed(steps: int, **settings: Any) -> str:
    return train(steps=steps, **settings)[0]


def stops(at: int) -> Leaves:
    def call(run: Run, micro: Micro) -> bool:
        if micro.step >= at:
            run.stop(f"at {at}")
        return False

    return call


def leaves(at: int) -> Leaves:
    return lambda run, micro: micro.step >= at


@pytest.mark.some("local")
@pytest.mark.parametrize("sync", [rp.Sync(), rp.AllReduce(), rp.LocalSteps(1)], ids=["sync", "all-reduce", "local"])
def test_the_step_at_which_the_loop_stops_it_is_the_last(sync: Any) -> None:
    hash, step, lead, seen = train(after=stops(5), sync=sync)
    assert (step, lead, seen) == (6, True, [4, 6])
    assert hash == undisturbed(6, sync=sync)


def test_the_job_makes_the_step_after_the_evaluation_that_stops_it() -> None:
    hash, step, _, seen = train(evaluate=lambda run, step: run.stop() if step == 4 else None)
    assert (step, seen) == (5, [4, 5])
    assert hash == undisturbed(5)


def test_a_round_of_local_steps_is_made_to_its_end() -> None:
    assert train(before=stops(4), sync=rp.LocalSteps(3))[1] == 6


def test_who_breaks_before_a_step_has_the_model_before_it() -> None:
    hash, step, lead, seen = train(before=leaves(5))
    assert (step, lead, seen) == (5, True, [4, 5])
    assert hash == undisturbed(5)


def test_who_breaks_after_all_of_a_step_has_the_model_after_it() -> None:
    hash, step, _, _ = train(after=lambda run, micro: (micro.step, micro.replica) == (5, 1))
    assert step == 6
    assert hash == undisturbed(6)


def test_who_breaks_in_the_middle_of_a_step_has_the_model_before_it_if_nothing_of_it_was_sent() -> None:
    """Its replicas are added up before they are sent."""
    hash, step, _, _ = train(after=leaves(5))
    assert step == 5
    assert hash == undisturbed(5)


def test_what_is_computed_after_the_loop_uses_the_final_weights() -> None:
    model = build()
    with EmbeddedJob() as job:
        run = job.train(model, DATA, **SETTINGS, steps=12)
        for micro in run:
            if micro.step >= 5:
                break
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
    assert weights_hash(model) == undisturbed(5)


def test_with_a_lossy_down_the_last_version_comes_as_it_is() -> None:
    hash, step, _, _ = train(after=stops(5), down={"type": "bf16"})
    assert step == 6
    assert hash == undisturbed(6, down={"type": "bf16"})


def test_stopping_at_the_last_step_changes_nothing() -> None:
    hash, step, _, _ = train(after=stops(11))
    assert step == 12
    assert hash == undisturbed(12)


def test_a_mode_without_a_last_version_refuses_it_with_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"run.stop or break is not supported under rp.Async\(\): .* lower steps="):
        train(after=stops(5), sync=rp.Async())


def test_an_error_in_the_loop_is_still_an_error() -> None:
    def fails(run: Run, micro: Micro) -> bool:
        raise KeyError(micro.step)

    with pytest.raises(KeyError):
        train(before=fails)
