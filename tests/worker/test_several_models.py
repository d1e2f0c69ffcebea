"""Several models, and several backward passes of one micro-batch: what a loop may do, and the sentences that refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import rallypoint as rp
from rallypoint.codec.spec import Bf16
from rallypoint.config import resolve
from rallypoint.core.order import SampleOrder
from rallypoint.errors import ConfigError, ModelError, RallypointError, UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.models import one_model
from rallypoint.worker.tensors import weights_hash

VALUES = torch.linspace(-1, 1, 96).view(32, 3)
DATA = torch.utils.data.TensorDataset(VALUES)
BOTH: dict[str, Any] = {"optimizer": {"a": rp.SGD(lr=0.1), "b": rp.Adam(lr=0.01)}, "alternate": ("a", "b")}
Body = Callable[[rp.Micro, nn.Module], None]


def two() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {"a": nn.Linear(3, 4), "b": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))}


def train(models: dict[str, nn.Module], **settings: Any) -> tuple[str, list[tuple[int, tuple[str, ...], int]]]:
    """Return the weights' hash, and of each micro-batch its step, whom it updates and its iteration."""
    seen = []
    stop = settings.pop("stop", -1)
    with EmbeddedJob(servers=2) as job:
        run = job.train(models, DATA, **{"batch": 4, "steps": 6, "shard_bytes": 64, **BOTH, **settings})
        for micro in run:
            with micro:
                seen.append((micro.step, micro.updates, micro.iteration))
                micro.backward(models["b"](models["a"](micro.batch[0])).square().mean())
            if micro.step == stop:
                run.stop()
        assert run.lead
    return weights_hash(nn.ModuleDict(models)), seen


def test_a_micro_batch_says_which_models_its_step_updates() -> None:
    _, seen = train(two())
    assert seen == [(step, ("a", "b")[step % 2 : step % 2 + 1], step // 2) for step in range(6)]


def test_a_model_that_a_step_does_not_update_keeps_its_bytes_whatever_gradient_it_gets() -> None:
    models, before = two(), two()
    train(models, steps=2, alternate=("a", "a", "b"), batch=4)  # ends before b's first step
    assert weights_hash(models["b"][0]) == weights_hash(before["b"][0])
    assert weights_hash(models["a"]) != weights_hash(before["a"])
    assert models["a"].weight.grad is None
    assert models["b"][0].weight.grad is None


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_script_stops_the_job_with_the_step_in_progress_whichever_model_that_updates(at: int) -> None:
    assert train(two(), stop=at)[0] == train(two(), steps=at + 1)[0]


def test_the_rate_and_adam_s_steps_of_a_model_count_its_own_updates() -> None:
    models, plain = two(), two()
    cosine = rp.cosine(0.1, warmup=1)
    train(models, optimizer={"a": rp.SGD(lr=cosine), "b": rp.Adam(lr=cosine)}, alternate=("a", "b", "b"), steps=7)
    optimizers = {"a": torch.optim.SGD(plain["a"].parameters()), "b": torch.optim.Adam(plain["b"].parameters())}
    from rallypoint.core.schedule import rate_at

    order = SampleOrder(seed=0, samples=32, replicas=1, batch=4)
    done = {"a": 0, "b": 0}
    for step, name in enumerate("abbabba"):
        for model in plain.values():
            model.zero_grad()
        plain["b"](plain["a"](VALUES[order.samples(step // 3, 0)])).square().mean().backward()
        optimizers[name].param_groups[0]["lr"] = rate_at(cosine, done[name], {"a": 3, "b": 4}[name])
        done[name] += 1
        optimizers[name].step()
    assert weights_hash(nn.ModuleDict(models)) == weights_hash(nn.ModuleDict(plain))


@pytest.mark.parametrize(("models", "settings", "sentence"), [
    ({"a": nn.Linear(3, 4), "b": "b"}, BOTH, "the model 'b' is a str"),
    ({"a": nn.Linear(3, 4), "b.c": nn.Linear(4, 2)}, {}, "'b.c' cannot be the name of a model"),
    (two(), {"optimizer": {"a": rp.SGD()}}, "the model 'b' has no optimizer"),
    (two(), {"optimizer": {"a": rp.SGD(), "b": rp.SGD(), "c": rp.SGD()}}, "the model 'c' is not there, or is frozen"),
    (two(), {"optimizer": {"a": rp.SGD(), "b": torch.optim.SGD([nn.Parameter(torch.ones(1))])}}, "SGD"),
    (two(), {**BOTH, "alternate": ("a",)}, "alternate leaves out b"),
    (two(), {**BOTH, "alternate": ("a", "c")}, "alternate names 'c', which is no model of this job: there are a, b"),
    (two(), {**BOTH, "alternate": "ab"}, "alternate is 'ab': it must be a list of names, or of lists of names"),
    (two(), {**BOTH, "alternate": (), "sync": rp.LocalSteps(steps=2)}, "is not supported under rp.LocalSteps"),
    (two(), {**BOTH, "sync": rp.Async()}, r"alternate= is not supported under rp.Async\(\)"),
    (two(), {**BOTH, "down": Bf16()}, "alternate= is not supported together with a lossy down="),
    (two(), {**BOTH, "alternate": ("a", (), "b")}, "alternate has an empty entry"),
    (nn.Linear(3, 2), {"alternate": ("a", "b")}, "give job.train a dict of models"),
    (nn.Linear(3, 2), BOTH, "optimizer is a dict, and there is one model"),
], ids=lambda value: value[:40] if isinstance(value, str) else "")  # fmt: skip
def test_what_cannot_be_trained_is_refused_with_a_sentence(
    models: Any, settings: dict[str, Any], sentence: str
) -> None:
    with EmbeddedJob() as job, pytest.raises((ConfigError, ModelError), match=sentence):
        job.train(models, DATA, **{"batch": 4, "steps": 4, **settings})


def test_a_parameter_of_two_models_is_refused() -> None:
    models = two()
    models["b"][0].weight = nn.Parameter(torch.ones(4, 4))
    models["a"] = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    models["a"][1].weight = models["b"][0].weight
    with EmbeddedJob() as job, pytest.raises(ModelError, match="is one of the model 'a' too"):
        job.train(models, DATA, batch=4, **BOTH)


def test_a_setting_of_one_optimizer_is_refused_where_each_model_has_its_own() -> None:
    _, settings = one_model(two(), BOTH)
    with pytest.raises(ConfigError, match=r"optimizer\.lr is set, and each model has .* set optimizers\.a\.lr"):
        resolve(settings, {"optimizer": {"lr": 0.5}})
    assert resolve(settings, json.loads(msgspec.json.encode(resolve(settings)))) == resolve(settings)
    changed = resolve(settings, {"optimizers": {"b": {"lr": 0.5}}})
    assert changed.optimizers == {"a": rp.SGD(lr=0.1), "b": rp.Adam(lr=0.5)}


# ---- several backward passes ----


def parts(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = model(batch)
    return out.square().mean(), model(batch * 2).abs().mean(), out.sum() * 0.1


def loop(body: Body, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    with EmbeddedJob() as job:
        for micro in job.train(model, DATA, **{"batch": 4, "steps": 3, "optimizer": rp.SGD(lr=0.1), **settings}):
            with micro:
                body(micro, model)
    return model


@pytest.mark.parametrize("settings", [
    {}, {"accumulate": 2}, {"replicas": 2}, {"sync": rp.LocalSteps(steps=3, outer=rp.SGD(lr=1.0))},
    {"sync": rp.AllReduce()},
], ids=["one", "accumulated", "two replicas", "local steps", "all-reduce"])  # fmt: skip
def test_several_backward_passes_add_up_as_in_plain_pytorch(settings: dict[str, Any]) -> None:
    def several(micro: rp.Micro, model: nn.Module) -> None:
        first, second, third = parts(model, micro.batch[0])
        micro.backward(first, more=True, retain_graph=True)
        micro.backward(second, more=True)
        micro.backward(third)

    found = loop(several, **settings)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    replicas, cuts = settings.get("replicas", 1), settings.get("accumulate", 1)
    order = SampleOrder(seed=0, samples=32, replicas=replicas, batch=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        gradients = []
        for replica in range(replicas):
            model.zero_grad()
            for batch in VALUES[order.samples(step, replica)].chunk(cuts):
                first, second, third = parts(model, batch)
                (first / cuts).backward(retain_graph=True)
                (second / cuts).backward()
                (third / cuts).backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, of in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = (of[0] + of[1]) * 0.5 if replicas == 2 else of[0]
        optimizer.step()
    close = torch.allclose if "sync" in settings and isinstance(settings["sync"], rp.LocalSteps) else torch.equal
    assert all(close(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


def test_the_loss_of_several_passes_is_their_sum() -> None:
    losses = []

    def several(micro: rp.Micro, model: nn.Module) -> None:
        first, second, _ = parts(model, micro.batch[0])
        micro.backward(first, more=True)
        micro.backward(second)
        losses.append((first.item(), second.item(), micro.losses.item()))  # type: ignore[union-attr]

    loop(several)
    assert all(both == pytest.approx(first + second) for first, second, both in losses)


def its_own_backward(micro: rp.Micro, model: nn.Module) -> None:
    first, second, _ = parts(model, micro.batch[0])
    first.backward()
    micro.backward(second)


def nothing_after_more(micro: rp.Micro, model: nn.Module) -> None:
    micro.backward(parts(model, micro.batch[0])[0], more=True)


def more_after_the_last(micro: rp.Micro, model: nn.Module) -> None:
    first, second, _ = parts(model, micro.batch[0])
    micro.backward(first)
    micro.backward(second, more=True)


def another_weight(micro: rp.Micro, model: nn.Module) -> None:
    first, second, _ = parts(model, micro.batch[0])
    micro.backward(first, weight=3.0, more=True, retain_graph=True)
    micro.backward(second)


def more_of_what_is_streamed(micro: rp.Micro, model: nn.Module) -> None:
    nothing_after_more(micro, model)


@pytest.mark.parametrize(("body", "settings", "sentence"), [
    (its_own_backward, {}, "the script has called backward.* more=True"),
    (nothing_after_more, {}, "ended without micro.backward.loss.: the last backward pass has no more=True"),
    (more_after_the_last, {}, "came twice"),
    (another_weight, {}, r"its backward passes weigh 3\.0 and 1\.0: pass one to each"),
    (more_of_what_is_streamed, {"parameters": "streamed"}, 'with parameters="streamed" is not supported'),
])  # fmt: skip
def test_passes_that_cannot_work_are_refused_with_a_sentence(
    body: Body, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RallypointError, match=sentence) as raised:
        loop(body, **settings)
    assert isinstance(raised.value, UsageError)


def test_a_hidden_state_of_the_only_replica_may_be_a_buffer() -> None:
    """As docs/loops.md says: a buffer belongs to the version, so whoever computes the next step begins with it."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.cell = nn.GRUCell(3, 5)
            self.register_buffer("state", torch.zeros(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            out = self.cell(x, self.state.clone())
            self.state.copy_(out.detach())
            return out

    model, plain = Recurrent(), Recurrent()
    with EmbeddedJob() as job:
        for micro in job.train(
            model, DATA, batch=4, steps=6, order="sequential", optimizer=rp.SGD(lr=0.1), decay_1d=True
        ):
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        plain(VALUES[4 * step : 4 * step + 4]).square().mean().backward()
        optimizer.step()
    assert weights_hash(model) == weights_hash(plain)
    assert bool(model.state.any())


def test_torch_autograd_grad_leaves_nothing_behind() -> None:
    """A gradient penalty, and a product with the Hessian: backward passes through backward passes."""

    def twice(micro: rp.Micro, model: nn.Module) -> None:
        batch = micro.batch[0].clone().requires_grad_()
        loss = model(batch).square().mean()
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        own = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        micro.backward(loss + slope.square().sum() + sum((g.square().sum() for g in own), torch.zeros(())))

    found = loop(twice)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    order, optimizer = SampleOrder(seed=0, samples=32, replicas=1, batch=4), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        batch = VALUES[order.samples(step, 0)].clone().requires_grad_()
        loss = model(batch).square().mean()
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        own = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + slope.square().sum() + sum((g.square().sum() for g in own), torch.zeros(()))).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


def test_evaluations_decide_when_a_job_of_several_models_ends() -> None:
    def ended(**settings: Any) -> str:
        models = two()
        with EmbeddedJob(servers=2) as job:
            run = job.train(models, DATA, **{"batch": 4, "steps": 12, "shard_bytes": 64, **BOTH, **settings})
            if "steps" not in settings:
                run.stop_when("value", above=3.0)

            @run.every(2)
            def value(step: int) -> dict[str, float]:
                return {"value": float(step)}

            for micro in run:
                with micro:
                    micro.backward(models["b"](models["a"](micro.batch[0])).square().mean())
        return weights_hash(nn.ModuleDict(models))

    assert ended() == ended(steps=6), "step 4 decides, and counts from step 6 on"
