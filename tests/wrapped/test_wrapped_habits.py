"""Calls of a plain loop that mean something else after `rp.wrap`: each is an error with wrap's own sentence."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from own_loops import Net, loss_of
from torch.nn.utils import clip_grad_norm_

import rallypoint as rp
from rallypoint.bridges.wrap import wrap, wrap_in
from rallypoint.errors import UsageError
from rallypoint.launch.embedded import EmbeddedJob

Body = Callable[[Net, torch.optim.Optimizer, torch.Tensor], None]


def loop(body: Body, *, servers_step: bool = False) -> None:
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with EmbeddedJob() as job:
        optimizer = wrap_in(job, model, rp.SGD(lr=0.1) if servers_step else inner, steps=2)
        for step in range(2):
            body(model, inner, loss_of(model, step, 0))
            optimizer.step()
            optimizer.zero_grad()


def clip(model: Net, inner: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)


def clip_values(model: Net, inner: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def scale(model: Net, inner: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    torch.amp.GradScaler("cpu").scale(loss).backward()


def step_inner(model: Net, inner: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    inner.step()


CALLS = [
    (clip, 2, r"clip_grad_norm_ clips the gradient of this process alone.*give rp\.wrap clip=1\.0"),
    (clip_values, 2, "clip_grad_value_ clips the gradient of this process alone"),
    (scale, 1, "a GradScaler scales the loss, and optimizer.step.. of rp.wrap would push the scaled"),
    (step_inner, 2, r"calls SGD\.step\(\) on the model that rp\.wrap has got.*optimizer that rp\.wrap has returned"),
]


@pytest.mark.parametrize("servers_step", [False, True])
@pytest.mark.parametrize(("body", "line", "sentence"), CALLS)
def test_a_call_that_means_something_else_is_an_error_at_its_line(
    body: Body, line: int, sentence: str, servers_step: bool
) -> None:
    at = inspect.getsourcelines(body)[1] + line
    with pytest.raises(UsageError, match=sentence) as refused:
        loop(body, servers_step=servers_step)
    assert re.search(rf"\btest_wrapped_habits\.py:{at}\b", str(refused.value)), refused.value
    assert "job.train" not in str(refused.value)


def harmless(model: Net, inner: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    torch.amp.GradScaler("cpu", enabled=False).scale(loss / 2).backward(retain_graph=True)
    (loss / 2).backward()  # accumulation
    other = torch.nn.Linear(2, 2)
    torch.amp.GradScaler("cpu").scale(other(torch.ones(2)).sum()).backward()
    clip_grad_norm_(other.parameters(), 1.0)
    torch.optim.SGD(other.parameters()).step()


def test_what_is_right_goes_through() -> None:
    loop(harmless)


def test_an_optimizer_may_clip_where_it_steps() -> None:
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def clips(*_: object) -> None:
        clip_grad_norm_(model.parameters(), 0.01)

    inner.register_step_pre_hook(clips)
    with EmbeddedJob() as job:
        optimizer = wrap_in(job, model, inner, steps=1)
        loss_of(model, 0, 0).backward()
        optimizer.step()


def test_a_parameter_that_the_script_writes_to_is_named_with_what_a_wrapped_loop_can_do() -> None:
    def write(model: Net, inner: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        loss.backward()
        with torch.no_grad():
            model.first.weight.mul_(2)

    with pytest.raises(UsageError, match=r"first\.weight was changed at step 0 .* the optimizer that rp\.wrap has got"):
        loop(write)


def test_a_model_is_wrapped_once() -> None:
    with EmbeddedJob() as job, EmbeddedJob() as another:
        model = Net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap_in(job, model, inner, steps=2)
        for given in (inner, optimizer):
            for again in (lambda g=given: wrap(model, g, steps=2), lambda g=given: wrap_in(another, model, g, steps=2)):
                with pytest.raises(UsageError, match=r"rp\.wrap is called a second time for one model"):
                    again()
        optimizer.finish()
        assert wrap_in(another, model, inner, steps=1).position == 0  # another stage, when the first one is over


def test_gradients_of_before_are_named() -> None:
    model = Net()
    loss_of(model, 0, 0).backward()
    with EmbeddedJob() as job, pytest.raises(UsageError, match=r"first\.weight has a gradient before rp\.wrap"):
        wrap_in(job, model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
