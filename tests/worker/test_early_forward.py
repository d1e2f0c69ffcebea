"""A forward pass that begins before all of its version is here reads every parameter's new values, whoever reads them.

`Hold` lets every shard of a version come only when somebody waits for it: what is read without waiting is old.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import nn

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.errors import UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.testing.reference import train_reference
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.locked import LockedShell
from rallypoint.worker.exchange.pushes import ForwardVersion
from rallypoint.worker.loop import micro
from rallypoint.worker.loop.micro import EarlyForward
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash
from support.rewinds import Cluster

PATIENCE_S = 60.0
SETTINGS: dict[str, Any] = {
    "replicas": 2, "batch": 4, "steps": 8, "network.shard_bytes": 128, "optimizer": rp.AdamW(lr=1e-2),
}  # fmt: skip
EARLY = [3, 5, 6, 7]  # at steps 0, 1, 2, 4 all values are compared, so the whole version is waited for

Batch = Sequence[torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


class Hold:
    """Holds every shard of a version back until somebody waits for it, where a forward pass may begin early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[int] = []  # the steps whose forward pass began early
        self.given: list[int] = []  # how many tasks a worker remembers then
        self.said: list[str] = []
        self._held: dict[LockedShell, list[int]] = {}
        landed, allow, wait = LockedShell.landed, ForwardVersion.allow, LockedShell.wait_for_shards
        begin = EarlyForward.begin

        def hold(locked: LockedShell, shard: int) -> None:
            with locked.changed:
                if locked in self._held and shard not in locked._awaited:
                    self._held[locked].append(shard)
                    return
            landed(locked, shard)

        def allowed(forward: ForwardVersion, may: bool) -> None:
            allow(forward, may)
            locked = forward._locked
            with locked.changed:
                left = [] if may else self._held.pop(locked, [])
                if may:
                    self._held.setdefault(locked, [])
            for shard in left:
                landed(locked, shard)

        def let_come(locked: LockedShell, shards: Sequence[int], *rest: Any) -> None:
            held = self._held.get(locked, [])
            for shard in [shard for shard in held if shard in shards]:
                held.remove(shard)
                landed(locked, shard)
            wait(locked, shards, *rest)

        def note(early: EarlyForward) -> None:
            if early._starts:
                self.began.append(early._parts.exchange.step)
                self.given.append(len(early._parts.exchange._locked.progress._given))
            begin(early)

        torch._dynamo.utils.counters.clear()  # other tests compile
        monkeypatch.setattr(LockedShell, "landed", hold)
        monkeypatch.setattr(ForwardVersion, "allow", allowed)
        monkeypatch.setattr(LockedShell, "wait_for_shards", let_come)
        monkeypatch.setattr(EarlyForward, "begin", note)
        monkeypatch.setattr(Job, "_say", lambda job, text: self.said.append(text))


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Hold:
    return Hold(monkeypatch)


# ---- models that do unusual things -----------------------------------------------------------------------------


class OutOfOrder(nn.Module):
    """Uses its layers in another order than they are registered in, in every second batch in yet another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.never = nn.Linear(6, 6)
        self.alone = nn.Parameter(torch.randn(5))  # in no module's forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = (2, 0, 3) if x[0, 0] > 0 else (1, 3, 0)  # one layer is left out
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class ReadsOthers(nn.Module):
    """Reads parameters of modules that never run, or run later; attention reads those of its `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)
        self.table, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.recurrent = nn.LSTM(6, 6)
        self.scales = nn.ParameterList(torch.ones(6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.last.weight * self.scales[1]) @ self.table.weight.data.clone().T
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        return self.last(self.recurrent(x[None])[0][0])


class Normalised(nn.Module):
    """Has buffers, a weight that is no contiguous tensor, and one that is computed from another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.conv(x.view(-1, 2, 1, 3).expand(-1, 2, 2, 3))).flatten(1))


class Transformed(nn.Module):
    """Differentiates a layer inside of its forward; `functional`: by parameters that the transform is given."""

    def __init__(self, *, functional: bool) -> None:
        super().__init__()
        self.functional = functional
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.functional:
            return self.first(x) + torch.func.grad(lambda y: self.last(y).pow(2).sum())(x)
        start = dict(self.last.named_parameters())

        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(self.last, values, (x,)).pow(2).sum()

        gradient = torch.func.grad(loss)(start)
        return self.first(x) + sum(of.sum() for of in gradient.values())


class InThreads(nn.Module):
    """Runs its layers in threads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(len(self.layers)) as threads:
            return torch.stack(list(threads.map(lambda layer: layer(x), self.layers))).sum(0)


def mse(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def decayed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Reads every parameter outside of any module."""
    return mse(model, batch) + 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())


def without_calls(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Calls no module, so no hook runs."""
    assert isinstance(model, nn.Sequential)
    hidden = model[0].forward(batch[0])
    return F.mse_loss(torch.addmm(model[2].bias, hidden, model[2].weight.T), batch[1])


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, dict[str, Any]]] = {
    "plain": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), mse, {}),
    "accumulates": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), mse, {"accumulate": 2}),
    "clips": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), mse, {"clip": 0.1}),
    "out of order": (OutOfOrder, mse, {}), "tied": (Tied, mse, {}), "reads others": (ReadsOthers, mse, {}),
    "buffers": (Normalised, mse, {}), "outside of modules": (OutOfOrder, decayed, {}),
    "no calls": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), without_calls, {}),
    "in threads": (InThreads, mse, {}), "torch.func, by its input": (lambda: Transformed(functional=False), mse, {}),
    "torch.func, by parameters": (lambda: Transformed(functional=True), mse, {}),
    "bfloat16": (lambda: nn.Linear(6, 6).bfloat16(), lambda m, b: mse(m, [t.bfloat16() for t in b]), {}),
}


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return torch.utils.data.TensorDataset(*(torch.randn(40, 6, generator=generator) for _ in range(2)))


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def train(model: nn.Module, loss: Loss = mse, script: Callable[[Any], None] = lambda micro: None, **more: Any) -> str:
    with EmbeddedJob(servers=2) as job:
        for micro in job.train(model, data(), **{**SETTINGS, **more}):
            with micro:
                script(micro)
                micro.backward(loss(model, micro.batch))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    return weights_hash(model)


def reference(make: Callable[[], nn.Module], loss: Loss = mse, **more: Any) -> str:
    model = build(make)
    train_reference(model, data(), loss, resolve({**SETTINGS, **more}))
    return weights_hash(model)


@pytest.mark.some("bfloat16")
@pytest.mark.parametrize("case", CASES)
def test_whoever_reads_a_parameter_early_gets_its_new_values(hold: Hold, case: str) -> None:
    make, loss, more = CASES[case]
    trained = train(build(make), loss, **more)
    assert hold.began == EARLY
    assert trained == train(build(make), loss, **{"network.overlap": False}, **more)
    assert max(hold.given) <= 2 + SETTINGS["replicas"], "its memory of tasks grows from step to step"
    if case != "bfloat16":  # whose master copy on the servers is fp32
        assert trained == reference(make, loss, **more)


def test_the_first_module_runs_while_the_last_ones_parameters_are_on_their_way(hold: Hold) -> None:
    model = build(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    late: dict[int, bool] = {}

    def look(step: int) -> None:
        def hook(*_: Any) -> None:
            late.setdefault(step, type(model[1].weight) is not nn.Parameter)

        model[0].register_forward_hook(hook)

    train(model, script=lambda micro: look(micro.step))
    assert [step for step, was in late.items() if was] == EARLY


def test_links_keep_to_their_window_after_a_version_that_a_forward_pass_has_installed(hold: Hold) -> None:
    """The window bounds the memory of servers. Links leave it in the step in which a view comes."""
    leave: dict[int, bool] = {}

    def look(micro: Any) -> None:
        leave[micro.step] = micro._run._exchange._links._overdraws

    train(build(lambda: nn.Linear(6, 6)), script=look)
    assert hold.began == EARLY
    assert not any(leave[step + 1] for step in EARLY[:-1]), leave


def test_nothing_begins_early_where_the_user_says_so(hold: Hold) -> None:
    make = CASES["plain"][0]
    assert train(build(make), **{"network.overlap": False}) == reference(make)
    assert hold.began == []


def test_a_parameter_that_the_script_writes_to_is_named_also_in_a_step_that_began_early(hold: Hold) -> None:
    model = build(CASES["plain"][0])

    def writes(micro: Any) -> None:
        if micro.step == EARLY[1]:
            with torch.no_grad():
                model[2].weight.mul_(2)  # type: ignore[union-attr]

    with pytest.raises(UsageError, match=r"parameter 2\.weight was changed at step 5 by the script"):
        train(model, script=writes)


def evaluated(after_each: Callable[[], object] = lambda: None) -> list[int]:
    """The steps at which a job of eight steps that evaluates every five does so; `after_each` follows a micro-batch."""
    model, seen = build(CASES["plain"][0]), []
    with EmbeddedJob(servers=2) as job:
        run = job.train(model, data(), **SETTINGS)
        run.every(5)(lambda step: seen.append(step))
        for micro in run:
            with micro:
                micro.backward(mse(model, micro.batch))
            after_each()
    return seen


def test_a_version_with_an_evaluation_is_waited_for(hold: Hold) -> None:
    assert evaluated() == [5, 8]
    assert hold.began == [3, 6, 7]


def test_a_roll_back_right_after_a_forward_pass_makes_no_evaluation_due(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the coordinator's thread it may come at any moment: the exchange is at no step then."""
    finish, step = EarlyForward.finish, Exchange.step
    rolled_back: list[bool] = []

    def finished(early: EarlyForward, loss: torch.Tensor) -> bool:
        rolled_back[:] = [True] if finish(early, loss) else []
        return bool(rolled_back)

    monkeypatch.setattr(EarlyForward, "finish", finished)
    monkeypatch.setattr(Exchange, "step", property(lambda exchange: -1 if rolled_back else step.fget(exchange)))
    assert evaluated(rolled_back.clear) == [5, 8]
    assert hold.began == [3, 6, 7]


# ---- what Python does not see ----------------------------------------------------------------------------------


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.kept = [self.layer.weight.data]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x @ self.kept[0])


UNSEEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "script": (lambda: nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 6))), "module 1 is TorchScript"),
    "alias": (Aliased, r"parameter layer\.weight shares its memory with another tensor"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", UNSEEN)
def test_where_parameters_are_read_unseen_all_are_waited_for_and_it_is_said_once(hold: Hold, case: str) -> None:
    make, why = UNSEEN[case]
    assert train(build(make)) == reference(make)
    assert hold.began == []
    (said,) = hold.said
    assert re.search(why, said)


class KeepsView(nn.Module):
    """Makes a view of a weight in its first forward, and uses that from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(6, 6), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kept:
            self.kept.append(self.layer.weight.detach().T)
        return self.layer(x @ self.kept[0])


class Batches(nn.Module):
    """Its last layer is read by nobody but a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = torch.vmap(lambda row, shift: row.sum() * shift)(self.last.weight, self.last.bias)
        return self.first(x) * scales


UNSEEN_LATER: dict[str, tuple[Callable[[], nn.Module], str, list[int]]] = {
    "view": (KeepsView, r"parameter layer\.weight shares its memory with another tensor", []),
    "transform": (Batches, r"parameter last\.(weight|bias) is read by something that gets a copy of it", [3]),
}


@pytest.mark.parametrize("case", UNSEEN_LATER)
def test_what_a_forward_pass_does_unseen_is_found_and_from_then_on_all_are_waited_for(hold: Hold, case: str) -> None:
    make, why, began = UNSEEN_LATER[case]
    assert train(build(make)) == reference(make)
    assert hold.began == began
    (said,) = hold.said
    assert re.search(why, said)


def test_views_are_looked_for_once_however_many_parameters_a_graph_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set may be a million objects."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(20)))
    placed = [SimpleNamespace(entry=SimpleNamespace(spec=SimpleNamespace(name=name)), tensor=parameter)
              for name, parameter in model.named_parameters()]  # fmt: skip
    parts = cast(Any, SimpleNamespace(model=model, tensors=SimpleNamespace(parameters=placed)))
    loss = model(torch.ones(2, 6)).sum()
    looks = list[int]()
    monkeypatch.setattr(micro.gc, "get_objects", lambda: looks.append(1) or [loss, *model.parameters()])
    assert micro._read_unseen(parts, first=False) == ""
    assert len(looks) == 1
    monkeypatch.setattr(micro.gc, "get_objects", lambda: [loss, model[3].weight[0]])
    assert "parameter 3.weight shares its memory" in micro._read_unseen(parts, first=False)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x)
        return self.first(hidden), self.last(hidden)


def test_a_graph_that_the_script_keeps_reads_no_parameter_of_the_next_step(hold: Hold) -> None:
    """Two losses, and an average of the weights: the first loss's graph still holds views of the weights."""
    model = TwoHeads()
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    with EmbeddedJob(servers=2) as job:
        for micro in job.train(model, data(), **SETTINGS):
            with micro:
                first, last = model(micro.batch[0])
                one, other = first.square().mean(), F.mse_loss(last, micro.batch[1])
                micro.backward(one, more=True, retain_graph=True)
                micro.backward(other)
            for name, value in model.named_parameters():
                average[name].lerp_(value.detach(), 0.1)
    assert hold.said == []
    assert hold.began == EARLY


@pytest.mark.parametrize("backend", ["eager"])
def test_compiled_code_is_not_compiled_again_and_reads_whole_versions(hold: Hold, backend: str) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    before, model = counters["frames"]["total"], build(CASES["plain"][0])
    compiled = torch.compile(model, backend=backend)
    assert train(model, lambda _, batch: F.mse_loss(compiled(batch[0]), batch[1])) == reference(CASES["plain"][0])
    assert counters["frames"]["total"] - before == 1
    assert hold.began == []
    assert [text for text in hold.said if "torch.compile is used" in text] == hold.said != []


# ---- a stale forward pass --------------------------------------------------------------------------------------


class Peeks(nn.Module):
    """On one worker the forward reads the last layer first; `at` is called at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 6)  # three shards each, and one for their biases
        self.peeks = False
        self.at: Callable[[str], None] = lambda place: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.peeks:
            self.last.weight.sum()
            self.at("peeked")
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: self.at("backward"))
        return self.last(hidden)


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    made: list[Cluster] = []

    def make(workers: int) -> Cluster:
        made.append(Cluster(tmp_path, workers))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


class Watched:
    """Which shards a forward pass had swapped when it was given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.undone: list[int] = []
        undo = EarlyForward.undo

        def watch(early: EarlyForward) -> None:
            if early._runs:
                self.undone.append(len(early._in_model))
            undo(early)

        monkeypatch.setattr(EarlyForward, "undo", watch)


def loop(job: Job, model: nn.Module, on: Callable[[Any], None] = lambda micro: None) -> None:
    with job:
        for micro in job.train(model, data(), **SETTINGS):
            on(micro)
            with micro:
                micro.backward(mse(model, micro.batch))


def test_a_server_lost_while_a_version_is_half_installed_changes_no_byte(
    hold: Hold, clusters: Callable[[int], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the cluster goes back to its last snapshot."""
    watched, cluster = Watched(monkeypatch), clusters(1)
    model, job, at = build(Peeks), cluster.jobs[0], [-1]
    assert isinstance(model, Peeks)

    def lose(place: str) -> None:
        if place == "peeked" and at[0] == EARLY[0] and len(cluster.servers) == 1:
            cluster.lose_the_server()

    model.peeks, model.at = True, lose
    loop(job, model, lambda micro: at.__setitem__(0, micro.step))
    assert weights_hash(model) == reference(Peeks)
    assert len(watched.undone) == 1
    assert watched.undone[0] > 0


@pytest.mark.parametrize("transform", [False, True], ids=["modules", "torch.func"])
def test_a_server_lost_while_a_version_is_half_installed_and_the_script_runs_the_model_changes_no_byte(
    hold: Hold, clusters: Callable[[int], Cluster], monkeypatch: pytest.MonkeyPatch, transform: bool
) -> None:
    """Outside of ``with micro:``: nothing swallows what unwinds, so the pass reads the version before."""
    watched, cluster = Watched(monkeypatch), clusters(1)
    model, job = build(Normalised), cluster.jobs[0]
    held: dict[int, torch.Tensor] = {}
    passes: list[int] = []

    def run(micro: Any) -> None:
        if (micro.step, micro.replica) == (EARLY[1] - 1, 1):
            held.update(enumerate(p.detach().clone() for p in model.parameters()))
        if (micro.step, micro.replica) != (EARLY[1], 0) or len(cluster.servers) > 1:
            return
        next(model.parameters()).sum()  # some of the version is installed
        cluster.lose_the_server()
        model.eval()
        with torch.no_grad():
            if transform:
                torch.func.vmap(lambda x: model(x[None])[0])(micro.batch[0])
            else:
                model(micro.batch[0])
        model.train()
        assert all(torch.equal(p, held[index]) for index, p in enumerate(model.parameters()))
        passes.append(micro.step)

    loop(job, model, run)
    assert passes == [EARLY[1]]
    assert weights_hash(model) == reference(Normalised)
    assert len(watched.undone) == 1
    assert watched.undone[0] > 0


def test_a_worker_takes_over_a_replica_while_a_version_is_half_installed_and_no_byte_changes(
    hold: Hold, clusters: Callable[[int], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker stops when the last layer's gradients have left. The other, a step ahead, is asked for its replica."""
    watched, cluster = Watched(monkeypatch), clusters(2)
    models, step = [build(Peeks), build(Peeks)], EARLY[1] - 1
    stopped, go_on = threading.Event(), threading.Event()

    def peeked(job: Job) -> None:
        exchange = job._exchange
        assert exchange is not None
        assert stopped.wait(PATIENCE_S)
        exchange.assist(step, 1)
        go_on.set()

    def stop() -> None:
        stopped.set()
        assert go_on.wait(PATIENCE_S)

    def prepare(job: Job, model: Peeks, micro: Any) -> None:
        model.peeks, model.at = False, lambda place: None
        if (micro.step, micro.replica) == (step + 1, 0) and not go_on.is_set():
            model.peeks, model.at = True, lambda place: peeked(job) if place == "peeked" else None
        elif (micro.step, micro.replica) == (step, 1) and not go_on.is_set():
            model.at = lambda place: stop() if place == "backward" else None

    threads = [
        threading.Thread(target=loop, args=(job, model, partial(prepare, job, model)))
        for job, model in zip(cluster.jobs, models, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [weights_hash(model) for model in models] == [reference(Peeks)] * 2
    assert go_on.is_set()
    assert watched.undone
    assert watched.undone[0] > 0
