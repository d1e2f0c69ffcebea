"""Evaluations: when they are due, what they see, what they may do to the model and to training's randomness."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Evaluated, Evaluates, Message, Say
from rallypoint.core.view import Assignment, Lease, Member, StandingOrders, View, ViewNumber
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.handover import NoCodecStates
from rallypoint.core.worker.shell import WorkerShell, WorkerSnapshots
from rallypoint.core.worker.slots import Evaluate
from rallypoint.errors import UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.net.member import CoordinatorLink
from rallypoint.worker.evaluations import EvaluationReports, Evaluations
from rallypoint.worker.exchange.locked import Rewound
from rallypoint.worker.tensors import weights_hash
from support import training
from support.training import DATA

Evaluation = Callable[[torch.nn.Module, int], Any]


def build() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))


def train(model: torch.nn.Module, evaluate: Evaluation | None = None, every: Any = 2, **settings: Any) -> str:
    look = None if evaluate is None else partial(evaluate, model)
    training.train(model, evaluate=look, every=every, **{"replicas": 2, "steps": 6, **settings})
    return weights_hash(model)


@contextmanager
def unwatched(step: int) -> Iterator[None]:
    yield


def steps_evaluated(every: int, versions: list[tuple[int, int]], last: int = 1000) -> list[int]:
    """At which of these (step, step of the version before it in the job) an evaluation runs."""
    seen: list[int] = []
    evaluations = Evaluations(torch.nn.Linear(1, 1), seed=0, ends=lambda step: step == last, watch=unwatched)
    evaluations.add(every, lambda step: seen.append(step))
    for step, before in versions:
        evaluations.run(evaluations.due(step, before), step)
    return seen


def in_jumps(*steps: int) -> list[tuple[int, int]]:
    return [(step, step - 1) for step in steps]


def test_a_version_that_jumps_over_a_multiple_is_evaluated() -> None:
    assert steps_evaluated(10, in_jumps(0, 4, 9, 12, 19, 31, 39, 41)) == [12, 31, 41]


def test_each_multiple_is_evaluated_once_where_no_version_is_left_out() -> None:
    assert steps_evaluated(3, in_jumps(*range(11)), last=10) == [3, 6, 9, 10]


def test_an_evaluation_that_is_given_up_is_due_again_with_the_same_version() -> None:
    evaluations = Evaluations(torch.nn.Linear(1, 1), seed=0, ends=lambda step: False, watch=unwatched)
    done: list[int] = []
    lost = [True]

    def evaluate(step: int) -> None:
        if lost:
            lost.clear()
            raise Rewound
        done.append(step)

    evaluations.add(3, done.append)
    evaluations.add(3, evaluate)
    with pytest.raises(Rewound):
        evaluations.run(evaluations.due(3, 2), 3)
    evaluations.run(evaluations.due(3, 2), 3)  # the roll-back is to this very version
    assert done == [3, 3, 3]
    assert not evaluations.due(3, 2)


def test_what_is_computed_again_after_a_roll_back_is_evaluated_again() -> None:
    assert steps_evaluated(4, in_jumps(0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 8)) == [4, 4, 8]


def test_a_worker_that_begins_in_the_middle_evaluates_at_the_next_multiple() -> None:
    assert steps_evaluated(10, in_jumps(37, 38, 40, 41)) == [40]


@pytest.mark.slow
def test_an_evaluation_draws_the_same_numbers_whatever_came_before_and_training_does_not_notice() -> None:
    drawn: dict[int, list[float]] = {}

    def draws(model: torch.nn.Module, step: int) -> None:
        drawn.setdefault(step, []).append(torch.rand(1).item())

    undisturbed = train(build())
    assert train(build(), draws) == undisturbed
    assert train(build(), draws, every=3) == undisturbed
    assert drawn.keys() == {2, 3, 4, 6}
    assert len(set(drawn[6])) == 1, "one step, one seed"
    assert len({values[0] for values in drawn.values()}) == 4


def test_an_evaluation_is_seeded_by_its_step_and_puts_the_generators_back() -> None:
    drawn: list[float] = []
    evaluations = Evaluations(torch.nn.Linear(1, 1), seed=0, ends=lambda step: step == 100, watch=unwatched)
    evaluations.add(1, lambda step: drawn.append(torch.rand(1).item()))
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(2)[1]
        torch.manual_seed(seed)
        torch.rand(1)
        evaluations.run(evaluations.due(4, before=3), 4)
        assert torch.equal(torch.rand(1)[0], expected), "training's randomness goes on as if it had not been"
        evaluations.due(3, before=2)  # a roll-back: step 4 is computed again
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


def test_randomness_between_two_micro_batches_does_not_depend_on_evaluations() -> None:
    def drawn_outside(evaluate: Callable[[int], Any] | None) -> list[float]:
        drawn = list[float]()
        draws = lambda micro: drawn.append(torch.rand(1).item())  # noqa: E731
        training.train(build(), steps=4, evaluate=evaluate, after=draws)
        return drawn

    def reseeds(step: int) -> None:
        torch.manual_seed(step)

    assert drawn_outside(reseeds) == drawn_outside(None)


def test_an_evaluation_may_copy_and_save_the_model() -> None:
    copies: list[torch.nn.Module] = []

    def keep(model: torch.nn.Module, step: int) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        copies.append(copy.deepcopy(model))

    model = build()
    train(model, keep)
    assert len(copies) == 6
    for copied in copies:
        assert not any(module._forward_pre_hooks for module in copied.modules())
    assert weights_hash(copies[-1]) == weights_hash(model)


def test_the_loop_may_copy_and_save_the_model() -> None:
    model, copies = build(), list[Any]()

    def keep(micro: rp.Micro) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies[:] = torch.load(file, weights_only=False), copy.deepcopy(model)

    training.train(model, steps=2, before=keep)
    for other in copies:
        other(torch.ones(2, 3))
        assert "exchange" not in str(other[0]._forward_pre_hooks)


def test_an_evaluation_that_leaves_other_weights_is_refused() -> None:
    def writes(model: Any, step: int) -> None:
        model[0].weight.data.mul_(0.5)

    with pytest.raises(UsageError, match=r"parameter 0\.weight was changed at step 2 by the script.*on a copy"):
        train(build(), writes)


def test_a_figure_that_a_rule_waits_for_in_vain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said, send = list[Any](), CoordinatorLink.send
    monkeypatch.setattr(CoordinatorLink, "send", lambda self, message: (said.append(message), send(self, message)))
    train(build(), lambda model, step: {"accuracy": 0.5}, evaluation=rp.Evaluation(keep_best="acuracy"))
    assert [one.text for one in said if isinstance(one, Say)] == [
        "no evaluation has returned acuracy, which keep_best is about: figures are accuracy"
    ]


def test_an_evaluation_may_put_averaged_weights_in_and_the_own_ones_back() -> None:
    def swaps(model: torch.nn.Module, step: int) -> None:
        before = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
        model.load_state_dict(before)

    assert train(build(), swaps) == train(build())


def test_an_evaluation_in_training_mode_leaves_no_statistics_behind() -> None:
    def updates(model: torch.nn.Module, step: int) -> None:
        model.train()
        model(torch.randn(16, 3))

    assert train(build(), updates) == train(build())


def test_an_evaluation_that_needs_gradients_sends_none_of_them() -> None:
    def attacks(model: torch.nn.Module, step: int) -> None:
        with torch.enable_grad():
            model(torch.ones(4, 3)).sum().backward()

    assert train(build(), attacks) == train(build())


def test_an_evaluation_sees_the_model_in_eval_mode_and_needs_no_gradients() -> None:
    seen: list[tuple[int, bool, bool]] = []

    def looks(model: torch.nn.Module, step: int) -> None:
        seen.append((step, any(module.training for module in model.modules()), torch.is_grad_enabled()))

    train(build(), looks, steps=5)
    assert seen == [(2, False, False), (4, False, False), (5, False, False)]
    assert torch.is_grad_enabled()


def test_layers_that_stay_in_eval_mode_are_in_eval_mode_after_an_evaluation() -> None:
    model, modes = build(), list[tuple[bool, bool]]()
    model[1].eval()
    look = lambda micro: modes.append((model[0].training, model[1].training))  # noqa: E731
    training.train(model, evaluate=lambda step: None, inside=look)
    assert modes == [(True, False)] * 3


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (0.5, "returned a float: return a dict of numbers"),
        ([1, 2], "returned a list: return a dict of numbers"),
        ({"loss": torch.ones(2)}, r"returned a Tensor of shape \[2\] as 'loss': return names with one number each"),
        ({"loss": "low"}, "returned a str as 'loss'"),
        ({3: 0.5}, "returned a float as 3"),
        ({"a\tb": 0.5}, r"returned the name 'a\\tb': a name has at most 200 characters, and each is printable"),
        ({f"m{n}": 0.5 for n in range(1001)}, "returned 1001 figures: give at most 1000"),
    ],
    ids=str,
)
def test_a_result_that_is_no_dict_of_numbers_is_refused(result: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"the evaluation at step 2 {sentence}"):
        train(build(), lambda model, step: result)


@pytest.mark.parametrize("result", [{"loss": torch.ones(1)}, {"loss": 1}, {}, None], ids=str)
def test_numbers_of_any_kind_are_fine(result: Any) -> None:
    train(build(), lambda model, step: result)


@pytest.mark.parametrize("every", [0, -3, 1.5])
def test_an_impossible_interval_is_refused(every: Any) -> None:
    with pytest.raises(UsageError, match="give a positive number of steps"):
        train(build(), lambda model, step: None, every=every)


def test_a_run_whose_folder_cannot_be_made_says_so(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    with EmbeddedJob() as job:
        run: rp.Run = job.train(build(), DATA, batch=4, steps=1)
        welcome = run._parts.coordinator.welcome
        blocked = type(welcome)(folder=str(tmp_path / "file" / "run"))
        monkeypatch.setattr(run._parts.coordinator, "welcome", blocked)
        with pytest.raises(UsageError, match=r"the run's folder .*file/run cannot be made: Not a directory"):
            _ = run.folder
        monkeypatch.undo()


# ---- Results that were lost on their way: the worker says them again, or evaluates once more ----


FIRST = ViewNumber(1, 1)


def _view(count: int, incarnation: int) -> View:
    """The worker "me" stands by, and holds the lease of version 4."""
    return View(
        number=ViewNumber(1, count), generation=FIRST,
        workers=(Member("me", "h", incarnation=incarnation), Member("other", "h", incarnation=8)), servers=(),
        assignments=(Assignment(0, {"other": (0,)}),), primary={0: "s0"}, uploader="other",
        orders=StandingOrders(lease=Lease(4, "me", 8)),
    )  # fmt: skip


def test_a_worker_that_was_given_up_evaluates_again_because_its_result_may_be_lost() -> None:
    layout = build_layout([TensorSpec("weight", (4,), "float32", 0)], 64)
    shell = WorkerShell(WorkerMachine("me", len(layout.shards), frozenset(), 10), NoCodecStates(), WorkerSnapshots())
    shell.adopt(_view(1, 9), ())
    assert shell.next_action() == Evaluate(4)
    shell.leased.over(FIRST, 4)
    shell.adopt(_view(2, 9), ())
    assert shell.next_action() is None, "its result is on its way, and is said again if its connection broke"
    shell.adopt(_view(3, 11), ())
    assert shell.next_action() == Evaluate(4), "nothing that it said before counts"


def test_that_no_server_keeps_a_version_is_said_again() -> None:
    sent: list[Message] = []
    reports = EvaluationReports(sent.append)
    reports.registered([4], [])
    reports.evaluated(4, FIRST, {"loss": 1.0})
    reports.evaluated(8, FIRST, None)
    sent.clear()
    reports.repeat(new=False)
    assert sent == [Evaluates((4,)), Evaluated(4, FIRST, {"loss": 1.0}), Evaluated(8, FIRST, None)]
    sent.clear()
    reports.repeat(new=True)
    assert sent == [Evaluates((4,))]
