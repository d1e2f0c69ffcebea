"""A script ends its job before the last step: run.stop() in the loop and in an evaluation, break, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.core.protocol import Stop
from rallypoint.core.view import EarlyEnd, StandingOrders, ViewNumber
from rallypoint.errors import UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.run import Run
from rallypoint.worker.membership import Stopping
from rallypoint.worker.tensors import weights_hash
from support.training import small

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).view(32, 3))
SETTINGS: dict[str, Any] = {"replicas": 2, "batch": 4, "optimizer": rp.SGD(lr=0.1)}
Leaves = Callable[[Run, Micro], bool]


def train(
    before: Leaves | None = None, after: Leaves | None = None, evaluate: Callable[[Run, int], None] | None = None,
    **settings: Any,
) -> tuple[str, int, bool, list[int]]:  # fmt: skip
    """Return the weights' hash, run.step, run.lead and the steps evaluated. `before`, `after`: leave the loop there."""
    model, seen = small(), list[int]()
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


def stops_at_4(run: Run, step: int) -> None:
    if step == 4:
        run.stop()


def stops_at_the_end_of_5(run: Run, micro: Micro) -> bool:
    """Most shards have left by then, and servers publish them as those of any version."""
    if (micro.step, micro.replica) == (5, 1):
        run.stop()
    return False


BF16_DOWN = {"down": {"type": "bf16"}}
IN_SHARDS: dict[str, Any] = {**BF16_DOWN, "network.shard_bytes": 64}
HELD = {"network.shard_bytes": 64, "precision": "bf16", "memory.hold": "bf16"}


@pytest.mark.parametrize(("how", "settings", "end", "evaluated"), [
    pytest.param({"after": stops(5)}, {}, 6, [4, 6], id="a stop makes its step the last", marks=pytest.mark.slow),
    pytest.param({"after": stops(5)}, {"sync": rp.AllReduce()}, 6, [4, 6], id="all-reduce", marks=pytest.mark.slow),
    pytest.param({"after": stops(5)}, {"sync": rp.LocalSteps(1)}, 6, [4, 6], id="local steps"),
    pytest.param({"after": stops(5)}, BF16_DOWN, 6, [4, 6], id="a lossy down: the last version comes as it is"),
    pytest.param({"after": stops_at_the_end_of_5}, IN_SHARDS, 6, [4, 6], id="so do shards that were published before"),
    pytest.param({"after": stops_at_the_end_of_5}, HELD, 6, [4, 6], id="and what workers hold in bf16"),
    pytest.param({"after": stops_at_the_end_of_5}, {**IN_SHARDS, "sync": rp.AllReduce()}, 6, [4, 6], id="and means"),
    pytest.param({"after": lambda run, micro: (micro.step, micro.replica) == (5, 1)},
                 {**IN_SHARDS, "sync": rp.AllReduce()}, 6, [4, 6], id="and means, before a break"),
    pytest.param({"before": leaves(5)}, IN_SHARDS, 5, [4, 5], id="and a version that was here before a break"),
    pytest.param({"after": stops(11)}, {}, 12, [4, 8, 12], id="at the last step it changes nothing"),
    pytest.param({"evaluate": stops_at_4}, {}, 5, [4, 5], id="in an evaluation it is the step after"),
    pytest.param({"before": leaves(5)}, {}, 5, [4, 5], id="a break before a step"),
    pytest.param({"after": lambda run, micro: (micro.step, micro.replica) == (5, 1)}, {}, 6, [4, 6],
                 id="a break after all of a step"),
    # its replicas are added up before they are sent, so nothing of it was
    pytest.param({"after": leaves(5)}, {}, 5, [4, 5], id="a break in the middle of a step"),
])  # fmt: skip
def test_a_job_that_its_loop_ends_has_the_model_of_that_step(
    how: dict[str, Any], settings: dict[str, Any], end: int, evaluated: list[int]
) -> None:
    hash, step, lead, seen = train(**how, **settings)
    assert (step, lead, seen) == (end, True, evaluated)
    assert hash == undisturbed(end, **settings)


def test_a_round_of_local_steps_is_made_to_its_end() -> None:
    assert train(before=stops(4), sync=rp.LocalSteps(3))[1] == 6


def test_what_is_computed_after_the_loop_uses_the_final_weights() -> None:
    model = small()
    with EmbeddedJob() as job:
        run = job.train(model, DATA, **SETTINGS, steps=12)
        for micro in run:
            if micro.step >= 5:
                break
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
    assert weights_hash(model) == undisturbed(5)


def test_a_mode_without_a_last_version_refuses_it_with_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"run.stop or break is not supported under rp.Async\(\): .* lower steps="):
        train(after=stops(5), sync=rp.Async())


def test_an_error_in_the_loop_is_still_an_error() -> None:
    def fails(run: Run, micro: Micro) -> bool:
        raise KeyError(micro.step)

    with pytest.raises(KeyError):
        train(before=fails)


# ---- When a worker's wish to end the job counts ----


def exchange(step: int) -> Any:
    end = SimpleNamespace(is_early=False, last=10_000, generation=ViewNumber(1, 1), wait_until_known=lambda: None)
    return SimpleNamespace(step=step, end=end)


def test_the_end_of_a_stream_counts_at_its_step_and_not_where_a_roll_back_has_led() -> None:
    said: list[Any] = []
    stopping = Stopping(said.append)
    stopping.wish("the stream has no full batch after step 500", step=500)
    stopping.heed(exchange(300))  # a roll-back came before the wish was told
    assert said == []
    stopping.heed(exchange(500))
    assert said == [Stop(501, "the stream has no full batch after step 500", -1, ViewNumber(1, 1))]


def view(stop: int | None) -> Any:
    return SimpleNamespace(generation=ViewNumber(1, 1), orders=StandingOrders(None if stop is None else EarlyEnd(stop)))


def test_an_earlier_end_than_the_view_says_is_said_again_to_another_coordinator() -> None:
    said: list[Any] = []
    stopping = Stopping(said.append)
    stopping.wish("the stream is over", step=6)
    stopping.heed(exchange(6))
    for known in (8, 7, None):
        stopping.repeat(view(known))
    assert [stop.version for stop in said] == [7, 7, 7]


def test_what_the_script_wants_counts_at_once_also_when_the_stream_has_an_end() -> None:
    said: list[Any] = []
    stopping = Stopping(said.append)
    stopping.wish("the stream ends", step=500)
    stopping.wish("good enough")
    stopping.wish("too late")
    stopping.heed(exchange(300))
    assert [(stop.version, stop.reason) for stop in said] == [(301, "good enough")]
