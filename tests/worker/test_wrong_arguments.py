"""What `job.train` and `micro.backward` are given by mistake: a sentence that says what to give instead."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.errors import ConfigError, DataError, ModelError, RallypointError, UsageError
from rallypoint.launch.console import RunConsole
from rallypoint.launch.embedded import EmbeddedJob
from support import training
from support.training import DATA, square

LR = torch.optim.lr_scheduler


def train(model: Any = None, data: Any = DATA, loss: Any = None, **settings: Any) -> None:
    found = square if loss is None else lambda model, batch: loss(square(model, batch))
    training.train(torch.nn.Linear(3, 2) if model is None else model, data, found, **settings)


def refused(error: type[RallypointError], sentence: str, *args: Any, **settings: Any) -> None:
    with pytest.raises(error, match=sentence):
        train(*args, **settings)


@pytest.mark.parametrize("kind", [rp.AdamW, rp.Adam, rp.SGD, rp.Adagrad, rp.NAdam, rp.ASGD])
def test_an_optimizer_that_is_given_parameters_says_who_owns_it(kind: Any) -> None:
    sentence = rf"rp\.{kind.__name__} takes settings by name.* and no parameters: the servers own the optimizer"
    with pytest.raises(ConfigError, match=sentence):
        kind(torch.nn.Linear(3, 2).parameters())
    with pytest.raises(ConfigError, match=r"has no setting 'weight_decai': did you mean weight_decay\?"):
        kind(weight_decai=0.1)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (torch.utils.data.DataLoader(DATA, batch_size=None), r"a DataLoader .* without batches, was given"),
        (None, "a NoneType was given as the data set: give a map-style one"),
        ({"x": [1, 2]}, "a dict was given as the data set"),
        ([object(), object()], r"these samples cannot be made a batch of \(default_collate: .*collate_fn="),
        ([torch.ones(i + 1) for i in range(9)], "these samples cannot be made a batch of .*tensors of one shape"),
    ],
    ids=["loader", "none", "dict", "objects", "shapes"],
)
def test_data_that_is_no_map_style_data_set(data: Any, sentence: str) -> None:
    refused(DataError, sentence, None, data)


def test_a_generator_can_be_read_only_once() -> None:
    refused(UsageError, "which can be read only once.*give the function that makes it", None, (x for x in [1, 2]))


def test_samples_of_unlike_shapes_are_made_a_batch_by_the_scripts_own_function() -> None:
    data = [torch.ones(1 + i % 3) for i in range(9)]
    shapes = []

    def pad(samples: list[torch.Tensor]) -> list[torch.Tensor]:
        shapes.append([len(sample) for sample in samples])
        return [torch.stack([torch.nn.functional.pad(sample, (0, 3 - len(sample))) for sample in samples])]

    train(None, data, collate_fn=pad)
    assert all(len(batch) == 4 for batch in shapes)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (dict, "a dict was given as the model: .* see examples/gan.py"),
        (lambda: print, "a builtin_function_or_method was given as the model: give a torch.nn.Module"),
        (lambda: torch.nn.Linear(3, 2, device="meta"), "parameter weight is on the meta device and has no values"),
        (lambda: torch.nn.LazyLinear(2), r"weight has no shape yet \(a lazy module\): run one batch through the model"),
        (lambda: torch.nn.LazyBatchNorm1d(), "has no shape yet"),
        (lambda: _expanded(), "parameter weight is an expanded view, whose elements share memory: make it one"),
    ],
    ids=["dict", "function", "meta", "lazy", "lazy buffers", "expanded"],
)
def test_models_that_cannot_be_trained(build: Any, sentence: str) -> None:
    refused(ModelError, sentence, build())


def _expanded() -> torch.nn.Module:
    model = torch.nn.Linear(3, 2)
    model.weight = torch.nn.Parameter(torch.ones(1, 3).expand(2, 3))
    return model


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": rp.AdamW(lr=lambda step: 0.1)}, r"optimizer\.lr is a builtins\.function: servers run sched"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)], lr=1)}, r"optimizer is a torch\.optim\.sgd\.SGD: use"),
        ({"optimizer": rp.AdamW}, r"optimizer is the class AdamW: write optimizer=rp\.AdamW\(\), with parentheses"),
        ({"sync": rp.AllReduce}, r"sync is the class AllReduce: write sync=rp\.AllReduce\(\), with"),
        ({"sync": rp.LocalSteps}, r"write sync=rp\.LocalSteps\(steps=16\), with"),
        ({"optimizer": torch.optim.AdamW}, r"class torch\.optim\.adamw\.AdamW: write optimizer=rp\.AdamW\(lr=1e-3\)"),
        ({"sync": "allreduce"}, r"sync is 'allreduce': write rp\.AllReduce\(\) \(--set sync\.type=all-reduce\)$"),
        ({"sync": "ring"}, r"write rp\.Sync\(\) \(--set sync\.type=sync\), or rp\.BoundedStaleness\(staleness=2\)"),
        ({"optimizer": "Adam"}, r"write rp\.Adam\(\) \(--set optimizer\.type=adam\)$"),
        ({"lr": 0.1}, r"unknown field `lr`: give it to the optimizer, optimizer=rp\.AdamW\(lr=1e-3\)"),
        ({"batch_size": 4}, "unknown field `batch_size`: a replica's samples at a step are batch="),
        ({"epochs": 4}, "unknown field `epochs`: give steps="),
        ({"alternate": ("a", "b")}, "alternate is gone: models that take turns, .* are keys of job.store"),
        ({"base_batch": 64}, r"base_batch is gone: give the rate, .*rp\.scaled_lr"),
        ({"callback": print}, "unknown field `callback`: docs/settings.md has a table of its settings"),
        ({"clip": print}, "clip is a builtins.builtin_function_or_method: settings are data"),
    ],
    ids=[
        "lr", "optimizer", "no parentheses", "a mode's class", "a mode that needs steps", "torch's class",
        "a mode's name", "no mode's name", "an optimizer's name", "lr outside", "batch_size", "epochs", "gone", "too",
        "unknown", "object",
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], sentence: str) -> None:
    refused(ConfigError, sentence, **settings)


@pytest.mark.parametrize(
    ("own", "schedule", "sentence"),
    [
        (lambda p: torch.optim.LBFGS(p), None, r"LBFGS\.step\(\) needs closure: the job steps once"),
        (lambda p: torch.optim.SGD(p), lambda o: LR.ReduceLROnPlateau(o), "own_schedule is a ReduceLROnPlateau"),
        (lambda p: torch.optim.SGD, None, r"own_optimizer is the class SGD: give a "),
        (lambda p: rp.AdamW(), None, "own_optimizer is a AdamW"),
        (lambda p: torch.optim.SGD(p), lambda o: (lambda step: 0.1), "own_schedule is a function"),
        (
            lambda p: torch.optim.SGD(p), lambda o: LR.StepLR(torch.optim.SGD(o.param_groups), 1),
            "own_schedule has a StepLR of an optimizer that is not in own_optimizer",
        ),
    ],
    ids=["closure", "plateau", "class", "ours", "function", "of another"],
)
def test_own_optimizers_that_the_job_cannot_step(own: Any, schedule: Any, sentence: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = own(list(model.parameters()))
    given = {"own_optimizer": optimizer, "own_schedule": schedule(optimizer) if schedule else None}
    refused(ConfigError, sentence, model, sync=rp.AllReduce(), **given)


def test_only_one_optimizer_is_given() -> None:
    model = torch.nn.Linear(3, 2)
    both = {"optimizer": rp.AdamW(), "own_optimizer": torch.optim.SGD(model.parameters())}
    refused(ConfigError, "optimizer= and own_optimizer= are both given", model, sync=rp.AllReduce(), **both)


@pytest.mark.parametrize("rounds", [None, 1, 9], ids=["no loop", "break", "to the end"])
def test_a_loop_that_never_began_is_told_when_alone_too(rounds: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 2)
    with EmbeddedJob() as job:
        run = job.train(model, DATA, batch=4, steps=4)
        for micro in run if rounds is not None else ():
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
            if micro.step == rounds:
                break
    assert ("the loop has not begun" in capsys.readouterr().err) is (rounds is None)


def test_sys_exit_in_the_loop_is_said_as_a_break_is_when_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 2)

    def train() -> None:
        with EmbeddedJob(console=RunConsole()) as job:
            for micro in job.train(model, DATA, batch=4, steps=4):
                with micro:
                    micro.backward(model(micro.batch[0]).square().mean())
                if micro.step == 1:
                    sys.exit(0)

    with pytest.raises(SystemExit):
        train()
    assert "done: 2 of 4 steps (the loop was left at step 1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: rp.LocalSteps(), r"rp\.LocalSteps needs steps: write rp\.LocalSteps\(steps=16\)"),
        (lambda: rp.LocalSteps(H=4), r"rp\.LocalSteps has no setting 'H': there are steps, outer"),
        (lambda: rp.LocalSteps(step=4), r"has no setting 'step': did you mean steps\?"),
        (lambda: rp.BoundedStaleness(), r"write rp\.BoundedStaleness\(staleness=2\)"),
        (lambda: rp.Async(staleness=4), r"rp\.Async has no setting 'staleness'"),
    ],
    ids=["nothing", "unknown", "misspelt", "no bound", "another's"],
)
def test_modes_say_what_they_need(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()
    assert rp.LocalSteps(4, fragments=2) == rp.LocalSteps(steps=4, fragments=2)


def test_an_evaluation_without_its_number_of_steps_is_refused_at_once() -> None:
    def starts() -> None:
        with EmbeddedJob() as job:
            job.train(torch.nn.Linear(3, 2), DATA).every(lambda step: None)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=r"write @run\.every\(100\) above the function"):
        starts()


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda found: found.item(), "needs the loss as a tensor, not as a float: pass it without"),
        (lambda found: None, "needs the loss as a tensor, not as a NoneType"),
        (lambda found: found.detach(), "step 0, replica 0: the loss depends on no trained parameter"),
        (lambda found: torch.ones((), requires_grad=True), "no parameter of the job's model got a gradient"),
        (lambda found: torch.stack([found, found]), r"needs a scalar loss, not one of shape \[2\]: take its mean"),
    ],
    ids=["float", "none", "detached", "another model", "two"],
)
def test_losses_that_have_no_gradient(loss: Any, sentence: str) -> None:
    refused(UsageError, sentence, loss=loss)


def test_a_batch_without_a_loss_is_none_of_another_model() -> None:
    """The job's first one, and those with which a worker begins that comes later."""
    model = torch.nn.Linear(3, 2)
    with EmbeddedJob() as job:
        run = job.train(model, DATA, batch=4, steps=5)
        for micro in run:
            if micro.step == 2:  # as in a process that begins here
                run._source._looked = False  # type: ignore[attr-defined]
            with micro:
                empty = torch.zeros((), requires_grad=True)
                micro.backward(square(model, micro.batch) if micro.step in (1, 4) else empty)
    assert run.step == 5


def test_parameters_that_get_no_gradient_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 2)
    model.more = torch.nn.Linear(2, 2)
    train(model)
    assert caplog.text.count("step 0: no gradient for more.weight, more.bias: zeros are used") == 1


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_element_is_a_loss(shape: tuple[int, ...]) -> None:
    train(loss=lambda found: found.view(shape))


def test_an_optimizer_of_torch_s_that_needs_whole_matrices_is_answered_with_the_servers_own() -> None:
    own = torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))])
    sentence = r"Muon, which servers cannot step: they have their own, rp\.Muon\(.*own_optimizer="
    refused(ConfigError, sentence, optimizer=own)
