"""What a script does to its model behind the job's back: refused at the step at which it shows, or made right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
from torch.nn.utils import parametrizations, prune

import rallypoint as rp
from rallypoint.errors import ModelError, UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.tensors import weights_hash
from support import training
from support.training import DATA, finish, small, square

Body = Callable[[Any, rp.Micro], None]


build: Callable[[], Any] = small


def train(model: Any, after: Body | None = None, *, inside: Body | None = None, **settings: Any) -> str:
    looks = {"after": after, "inside": inside}
    given = {name: partial(look, model) for name, look in looks.items() if look is not None}
    training.train(model, **{"replicas": 2, "steps": 8, **given, **settings})
    return weights_hash(model)


def at(step: int, call: Callable[[Any], Any]) -> Body:
    def body(model: Any, micro: rp.Micro) -> None:
        if micro.step == step and micro.replica == 0:
            call(model)

    return body


def adds_a_layer(model: Any) -> None:
    model.append(torch.nn.Linear(2, 2))


def replaces_a_layer(model: Any) -> None:
    model[2] = torch.nn.Linear(4, 2)


def freezes(model: Any) -> None:
    model[0].requires_grad_(False)


def clamps(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.clamp_(-0.01, 0.01)


def loads_weights(model: Any) -> None:
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})


def steps_an_optimizer(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def steps_an_optimizer_of_some(model: Any) -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(2)), model[2].bias], lr=0.1).step()


@pytest.mark.some("*-Sync(*", "adds_a_layer-*", "freezes--Async*")
@pytest.mark.parametrize("sync", [rp.Sync(), rp.AllReduce(), rp.LocalSteps(steps=4), rp.Async()], ids=repr)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (adds_a_layer, r"parameter 3\.weight came into the model after job\.train \(seen at step 5\).*before job"),
        (replaces_a_layer, r"parameter 2\.weight came into the model after job\.train"),
        (freezes, r"parameter 0\.\w+ was frozen \(requires_grad=False\) at step 5, after job\.train.*lr_scale"),
        (clamps, r"parameter 0\.weight was changed at step 5 by the script.*parametrize"),
        (loads_weights, r"parameter \S+ was changed at step 5 by the script"),
        (steps_an_optimizer, r"the script calls SGD\.step\(\) on the model's parameters: the job steps.*clip=") ,
        (steps_an_optimizer_of_some, r"the script calls AdamW\.step\(\) on the model's parameters"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_change_that_would_do_nothing_is_refused_at_its_step(
    change: Callable[[Any], Any], sentence: str, sync: Any
) -> None:
    with pytest.raises(UsageError, match=sentence):
        train(build(), at(5, change), sync=sync)


@pytest.mark.parametrize("servers", [1, 2])
def test_where_the_model_is_stepped_in_place_a_change_is_not_said_to_be_replaced(servers: int) -> None:
    here, elsewhere = "by the script: on a cluster the next version would", "by the script: the next version would"
    with pytest.raises(UsageError, match=here if servers == 1 else elsewhere):
        train(build(), lambda model, micro: clamps(model), servers=servers)


def test_a_layer_that_thaws_is_refused() -> None:
    model = build()
    model[0].requires_grad_(False)
    with pytest.raises(UsageError, match=r"parameter 0\.weight was unfrozen \(requires_grad=True\) at step 5"):
        train(model, at(5, lambda m: m[0].requires_grad_(True)))


def test_a_frozen_parameter_that_changes_is_refused() -> None:
    model = build()
    model[0].requires_grad_(False)

    def moves(m: Any) -> None:
        m[0].weight.mul_(0.9)

    with pytest.raises(UsageError, match=r"the frozen parameter 0\.weight was changed at step 5.*Make it a buffer"):
        train(model, at(5, moves))


@pytest.mark.parametrize("step", [0, 1, 4])
def test_an_edit_through_data_is_found_at_the_first_steps_and_at_powers_of_two(step: int) -> None:
    def clamps_each(model: Any, micro: rp.Micro) -> None:
        if micro.step >= step:
            model[0].weight.data.clamp_(-0.01, 0.01)

    with pytest.raises(UsageError, match=rf"parameter 0\.weight was changed at step {step} by the script"):
        train(build(), clamps_each)


def test_a_table_of_embeddings_with_a_largest_norm_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 3, max_norm=0.1), torch.nn.Flatten(), torch.nn.Linear(9, 2))
    data = [torch.arange(3) + i % 5 for i in range(32)]
    with pytest.raises(UsageError, match=r"parameter 0\.weight was changed at step 0.*not max_norm"):
        training.train(model, data, lambda model, batch: model(batch).square().mean())


def test_a_model_that_moves_after_the_job_has_begun_is_refused() -> None:
    model = build()

    def trained() -> None:
        with EmbeddedJob() as job:
            run = job.train(model, DATA, batch=4, steps=2)
            model.double()
            finish(run, model, lambda model, batch: square(model, [batch[0].double()]))

    with pytest.raises(UsageError, match=r"parameter \S+ was moved or cast to cpu, torch\.float64 after job"):
        trained()


def test_backward_by_hand_is_refused() -> None:
    def by_hand(model: Any, micro: rp.Micro) -> None:
        square(model, micro.batch).backward()

    with pytest.raises(UsageError, match=r"has a gradient before micro\.backward at step 0.*the sum of all losses"):
        train(build(), inside=by_hand)


def test_a_micro_batch_without_with_is_refused() -> None:
    model = build()

    def trained() -> None:
        with EmbeddedJob() as job:
            for micro in job.train(model, DATA, batch=4, steps=2):
                micro.backward(square(model, micro.batch))

    with pytest.raises(UsageError, match=r"step 0, replica 0: micro\.backward was called outside of `with micro:`"):
        trained()


# ---- what is right ---------------------------------------------------------------------------------------------


def test_gradients_from_before_the_run_are_no_part_of_it() -> None:
    model = build()
    model(torch.ones(4, 3)).sum().backward()
    assert train(model, replicas=1) == train(copy.deepcopy(build_after_a_forward()), replicas=1)


def build_after_a_forward() -> Any:
    model = build()
    with torch.no_grad():
        model(torch.ones(4, 3))
    return model


def test_freezing_for_a_moment_is_fine() -> None:
    def toggles(model: Any, micro: rp.Micro) -> None:
        freezes(model)
        model[0].requires_grad_(True)

    assert train(build(), toggles) == train(build())


def test_an_optimizer_of_something_else_is_fine() -> None:
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def steps(model: Any, micro: rp.Micro) -> None:
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert train(build(), steps) == train(build())


def test_an_average_on_a_copy_is_fine() -> None:
    averages: list[Any] = []

    def averaged(model: Any, micro: rp.Micro) -> None:
        if not averages:
            averages.append(torch.optim.swa_utils.AveragedModel(model))
        averages[0].update_parameters(model)

    assert train(build(), averaged) == train(build())


class Recurs(torch.nn.Module):
    """Puts a new tensor in its buffer's place at every forward, as many scripts do."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer, self._in_place = torch.nn.Linear(3, 2), in_place
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        new = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        if self._in_place:
            self.mean.copy_(new)
        else:
            self.mean = new
        return y - new


def test_a_buffer_that_is_replaced_counts_like_one_that_is_written() -> None:
    assert train(Recurs(in_place=False)) == train(Recurs(in_place=True))


def test_a_buffer_of_another_shape_is_refused() -> None:
    def reshapes(model: Any) -> None:
        model.mean = torch.zeros(5)

    with pytest.raises(UsageError, match="buffer mean of Recurs was replaced by one of another shape"):
        train(Recurs(in_place=True), at(0, reshapes))


MODELS: dict[str, Callable[[], Any]] = {
    "spectral norm": lambda: torch.nn.Sequential(parametrizations.spectral_norm(torch.nn.Linear(3, 2))),
    "weight norm": lambda: torch.nn.Sequential(parametrizations.weight_norm(torch.nn.Linear(3, 2))),
    "old weight norm": lambda: torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))),
    "compiled": lambda: torch.compile(build(), backend="eager"),
    "tied": lambda: _tied(),
    "pruned": lambda: torch.nn.Sequential(prune.l1_unstructured(torch.nn.Linear(3, 2), "weight", 0.5)),
}


def _tied() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


@pytest.mark.some("Sync(*")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sync", [rp.Sync(), rp.AllReduce(), rp.LocalSteps(steps=2)], ids=repr)
def test_models_that_do_unusual_things_to_themselves_are_trained(name: str, sync: Any) -> None:
    train(MODELS[name](), sync=sync, steps=4)


def test_a_hook_of_the_scripts_own_that_leaves_the_gradient_is_fine() -> None:
    model, seen = build(), []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    assert train(model) == train(build())
    assert len(seen) == 16


def test_a_hook_of_the_scripts_own_that_takes_the_gradient_is_named() -> None:
    model = build()

    def takes(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model[0].weight.register_post_accumulate_grad_hook(takes)
    with pytest.raises(ModelError, match=r"parameter 0\.weight had no gradient any more.*a hook of the script"):
        train(model)


def hooks_of_the_process() -> list[int]:
    return [len(hooks) for hooks in (
        modules._global_module_registration_hooks, modules._global_parameter_registration_hooks,
        modules._global_buffer_registration_hooks, optimizers._global_optimizer_pre_hooks,
    )]  # fmt: skip


def test_no_hook_of_the_guard_is_left_in_the_process() -> None:
    before, during = hooks_of_the_process(), []
    train(build(), at(2, lambda model: during.append(hooks_of_the_process())))
    assert during == [[count + 1 for count in before]]
    assert hooks_of_the_process() == before


class GivesNone(torch.autograd.Function):
    """Doubles `x`. Its backward has no gradient for `weight`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * gradients[0], None


class UsesInPart(torch.nn.Module):
    """Has parameters to which autograd gives no gradient: torch calls their hooks, and `.grad` stays None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = torch._foreach_mul([self.layer.weight, self.layer.bias], 2.0)
        return GivesNone.apply(x @ first.T, self.idle)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_to_which_autograd_gives_no_gradient_contributes_zeros(accumulate: int) -> None:
    torch.manual_seed(3)
    model = UsesInPart()
    before = copy.deepcopy(model)
    train(model, accumulate=accumulate, optimizer=rp.SGD(lr=0.1))
    assert torch.equal(model.layer.bias, before.layer.bias)
    assert torch.equal(model.idle, before.idle)
    assert not torch.equal(model.layer.weight, before.layer.weight)
