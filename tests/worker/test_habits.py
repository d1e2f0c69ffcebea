"""Calls of a plain PyTorch loop inside a job's loop: each is an error that names its line, and torch is left as it was.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_  # by name, as scripts do

import rallypoint as rp
from rallypoint.errors import UsageError
from rallypoint.launch.embedded import EmbeddedJob

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).view(32, 3))
Body = Callable[[torch.nn.Module, Any, torch.Tensor], Any]


def train(body: Body, **settings: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with EmbeddedJob() as job:
        for micro in job.train(model, DATA, **{"batch": 4, "steps": 2, "optimizer": rp.SGD(lr=0.1), **settings}):
            with micro:
                body(model, micro, model(micro.batch[0]).square().mean())
    return model


def clip_inside(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
    micro.backward(loss)
    clip_grad_norm_(model.parameters(), 1.0)


def clip_values(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
    micro.backward(loss)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def scale(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
    micro.backward(torch.amp.GradScaler("cpu").scale(loss))


def backward_alone(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def backward_before(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    micro.backward(loss)


def backward_after(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
    micro.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


@pytest.mark.parametrize(("body", "line", "sentence"), [
    (clip_inside, 2, r"clip_grad_norm_ finds no gradients of the job's parameters.*clip=1\.0"),
    (clip_values, 2, "clip_grad_value_ finds no gradients"),
    (scale, 1, 'a GradScaler scales the loss, and nobody would unscale the gradients.*precision="fp16"'),
    (backward_alone, 1, "calls backward.. itself, which the job does not see"),
    (backward_before, 1, ". Give micro.backward the sum of all losses"),
    (backward_after, 2, "backward.. is called by the script, beside micro.backward"),
])  # fmt: skip
def test_a_call_that_does_nothing_or_the_wrong_is_an_error_at_its_line(body: Body, line: int, sentence: str) -> None:
    at = inspect.getsourcelines(body)[1] + line
    with pytest.raises(UsageError, match=sentence) as refused:
        train(body)
    assert re.search(rf"\btest_habits\.py:{at}\b", str(refused.value)), refused.value


def test_a_later_micro_batch_s_own_backward_is_noticed_too() -> None:
    """Its parameters have the gradients of the micro-batches before."""

    def body(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
        if micro.index == 1:
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        micro.backward(loss)

    with pytest.raises(UsageError, match=r"beside micro\.backward at step 0"):
        train(body, accumulate=2)


class ClipsInStep(torch.optim.SGD):
    """Clips its gradients before it steps, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_(self.param_groups[0]["params"], 0.01)
        return super().step(closure)


def clips_before_step(model: torch.nn.Module) -> torch.optim.Optimizer:
    def clip(*_: Any) -> None:
        clip_grad_norm_(model.parameters(), 0.01)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.parametrize("build", [lambda model: ClipsInStep(model.parameters(), lr=0.1), clips_before_step])
def test_an_own_optimizer_may_clip_where_it_steps(build: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    first = torch.cat([p.detach().clone().view(-1) for p in model.parameters()])
    with EmbeddedJob() as job:
        run = job.train(model, DATA, batch=4, steps=2, sync=rp.AllReduce(), own_optimizer=build(model))
        for micro in run:
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
    moved = float((torch.cat([p.detach().view(-1) for p in model.parameters()]) - first).norm())
    assert 0.0 < moved < 2 * 0.1 * 0.01 + 1e-6


def test_gradients_of_the_batch_alone_are_the_script_s_own() -> None:
    """Adversarial training: backward with `inputs`, by name and by place. Parameters among them are an error."""

    def body(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
        x = micro.batch[0].clone().requires_grad_()
        adverse = model(x).square().mean()
        adverse.backward(inputs=[x], retain_graph=True)
        torch.autograd.backward(adverse, None, None, False, None, x)
        micro.backward(model((x + x.grad.sign()).detach()).square().mean())
        adverse = model(x).square().mean()
        adverse.backward(inputs=x)

    train(body, accumulate=2)

    def wrong(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
        micro.backward(loss, retain_graph=True)
        loss.backward(inputs=list(model.parameters()))  # type: ignore[no-untyped-call]

    with pytest.raises(UsageError, match=r"beside micro\.backward at step 0"):
        train(wrong)


def test_a_scaler_of_another_model_is_the_script_s_own() -> None:
    def body(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
        other, scaler = torch.nn.Linear(3, 1), torch.amp.GradScaler("cpu")
        scaler.scale([other(micro.batch[0]).sum()])[0].backward()
        micro.backward(loss)

    train(body)


def test_what_is_right_goes_through_and_changes_nothing() -> None:
    """Another model's gradients and clipping, a scaler that is off, gradients that are taken and dropped again."""

    def body(model: torch.nn.Module, micro: Any, loss: torch.Tensor) -> None:
        other = torch.nn.Linear(3, 1)
        other(micro.batch[0]).sum().backward()
        clip_grad_norm_(other.parameters(), 1.0)
        assert float(torch.cat([p.grad.view(-1) for p in other.parameters() if p.grad is not None]).norm()) < 1.01
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        micro.backward(torch.amp.GradScaler("cpu", enabled=False).scale(loss))

    plain = train(lambda model, micro, loss: micro.backward(loss))
    assert all(map(torch.equal, train(body).parameters(), plain.parameters()))


def test_torch_is_as_before_when_the_last_run_has_ended_also_after_an_error() -> None:
    def functions() -> list[Any]:
        cells = [clip.__closure__[0].cell_contents for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_value_)]
        return [torch.autograd.backward, torch.amp.GradScaler.scale, torch.Tensor.backward, *cells]

    before = functions()
    with pytest.raises(UsageError):
        train(clip_inside)
    train(lambda model, micro, loss: micro.backward(loss))
    assert functions() == before
