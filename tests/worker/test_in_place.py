"""A job alone in its process: the server steps the model where it lies, and the bytes are those of any cluster."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.bridges.wrap import wrap_in
from rallypoint.codec.base import Scratch
from rallypoint.config import resolve
from rallypoint.core.optimizer import Optimizer
from rallypoint.core.shard.effects import Apply
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.net.pool import BufferPool
from rallypoint.net.transport import LEAST_LENT, InprocLender
from rallypoint.optim import InPlace, Pieces
from rallypoint.server.shard import InPlaceShard, OwnedShard
from rallypoint.worker.exchange.pushes import ReplicaPushes
from rallypoint.worker.loop.micro import BufferVersions
from rallypoint.worker.tensors import weights_hash
from support import training

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))

from test_averaged import IN_ROWS, OPTIMIZERS, WORDS

DATA = torch.utils.data.TensorDataset(
    torch.randn(64, 30, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3
)
Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.ReLU(), torch.nn.Linear(20, 3)
    )


def entropy(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x), y)


def train(model: torch.nn.Module, loss: Loss = entropy, *, servers: int = 1, **settings: Any) -> bool:
    """Train, and return whether the server stepped the model in place."""
    with EmbeddedJob(servers=servers) as job:
        run = job.train(model, DATA, **{"replicas": 1, "batch": 4, "steps": 6, "seed": 5, **settings})
        for micro in run:
            with micro:
                micro.backward(loss(model, *micro.batch), weight=1.0 + micro.replica)
        return bool(job._exchange.in_place.parameters)


def same_as_sent(loss: Loss = entropy, make: Callable[[], torch.nn.Module] = build, **settings: Any) -> torch.nn.Module:
    """Train in place, and on two servers, to which everything is sent: the models must be equal. Return one."""
    own, sent = make(), make()
    assert train(own, loss, **settings)
    assert not train(sent, loss, servers=2, **settings)
    assert weights_hash(own) == weights_hash(sent)
    return own


@pytest.mark.some("settings0", "settings6")
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": rp.AdamW(lr=0.01)},
        {"optimizer": rp.AdamW(lr=rp.cosine(0.01, warmup=2)), "replicas": 4},
        {"optimizer": rp.AdamW(lr=0.01), "replicas": 5, "clip": 0.05},
        {"optimizer": rp.SGD(lr=0.1, momentum=0.9, nesterov=True), "replicas": 3, "accumulate": 2},
        {"optimizer": rp.Adagrad(lr=0.1), "replicas": 2, "network": rp.Network(shard_bytes=384), "clip": 1.0},
        {"optimizer": rp.RMSprop(lr=0.01, momentum=0.5, centered=True), "network": rp.Network(shard_bytes=1216)},
        {"optimizer": rp.NAdam(lr=0.01), "replicas": 8, "nonfinite": "continue"},
        {"optimizer": rp.ASGD(lr=0.1, t0=2), "precision": "fp16", "replicas": 2},
        {"optimizer": rp.SGD(lr=0.1), "groups": (rp.Group(match=["0.*"], lr_scale=0.1, weight_decay=0.1),)},
    ],
)
def test_the_bytes_are_those_of_a_job_whose_gradients_and_versions_are_sent(settings: dict[str, Any]) -> None:
    same_as_sent(**settings)


def test_parameters_stay_where_they_are_and_no_payload_of_a_shard_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[int] = []
    lend = InprocLender.lend
    monkeypatch.setattr(InprocLender, "lend", lambda self, payload: lent.append(len(payload)) or lend(self, payload))
    model = torch.nn.Linear(30, 3000)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    held = model.state_dict()
    wide = torch.utils.data.TensorDataset(torch.ones(8, 30))
    training.train(model, wide, replicas=2, optimizer=rp.AdamW(lr=0.1))
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert torch.equal(held["weight"], model.weight), "what the script held of the model is not the model any more"
    assert max(lent) < LEAST_LENT


def test_the_bytes_are_those_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))
    plain, batches = copy.deepcopy(model), []

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batches.append((x, y))
        return entropy(model, x, y)

    assert train(model, loss, optimizer=rp.AdamW(lr=0.01, weight_decay=0.0), groups=())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for x, y in batches:
        optimizer.zero_grad()
        entropy(plain, x, y).backward()
        optimizer.step()
    assert weights_hash(plain) == weights_hash(model)


def test_a_backward_pass_may_read_a_parameter_whose_gradient_is_complete() -> None:
    """`detach()` hides from autograd that the product needs the weight: it is read after the weight's gradient is."""

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = x.clone().requires_grad_()
        first = torch.nn.functional.linear(hidden * model[0].bias.sum(), model[0].weight.detach())
        return entropy(model, x, y) + (first.square().mean() + model[0].weight.square().mean())

    same_as_sent(loss, replicas=2, optimizer=rp.SGD(lr=0.5))


@pytest.mark.parametrize(
    ("clip", "last", "reaches"),
    [(None, 3, False), (0.1, 3, False), (None, 7, False), (None, 7, True), (None, 8, False)],
)
def test_a_link_that_breaks_among_the_shards_of_a_step_changes_no_byte(
    monkeypatch: pytest.MonkeyPatch, clip: float | None, last: int, reaches: bool
) -> None:
    """What is lost is computed once more, from the version that the model still holds. (The last shard, 8, has the
    statistics of BatchNorm: all shards of parameters are at the server before it.) If the last contribution `reaches`
    the server, the new version may or may not come before the link breaks."""
    settings = {"replicas": 2, "optimizer": rp.SGD(lr=0.5), "network": rp.Network(shard_bytes=384), "clip": clip}
    undisturbed, model, computed = build(), build(), []
    assert train(undisturbed, **settings)
    filled, broken = ReplicaPushes.filled, []

    def breaks(pushes: ReplicaPushes, shard: int) -> None:
        now = shard == last and len(computed) == (5 if last == 8 else 6)  # replica 0 alone contributes to the last one
        if now and not reaches:
            lose(pushes, shard)
        filled(pushes, shard)
        if now and reaches:
            lose(pushes, shard)

    def lose(pushes: ReplicaPushes, shard: int) -> None:
        if not broken:
            (link,) = pushes._links._links.values()
            assert link._channel.flush(10.0), "the shards before this one are at the server"
            link._channel.connection.close()
            broken.append(shard)

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        computed.append(x)
        return entropy(model, x, y)

    monkeypatch.setattr(ReplicaPushes, "filled", breaks)
    assert train(model, loss, **settings)
    assert broken
    assert last == 8 or reaches or len(computed) > 12, "the step in progress was computed again"
    assert weights_hash(model) == weights_hash(undisturbed)


def test_the_model_holds_its_version_until_the_next_one_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error or Ctrl-C may come while the script waits: what it saves then is one version."""
    seen: list[tuple[str, str]] = []
    model, install = build(), BufferVersions.install

    def looks(versions: BufferVersions, version: int) -> Any:
        before = weights_hash(model)
        assert not seen or before == seen[-1][1]
        done = install(versions, version)
        seen.append((before, weights_hash(model)))
        return done

    monkeypatch.setattr(BufferVersions, "install", looks)
    model[1].eval()  # (statistics of BatchNorm change with the forward pass)
    assert train(model, replicas=2, optimizer=rp.AdamW(lr=0.1))
    assert len({after for _, after in seen}) == 7


def rebound(change: Callable[[torch.nn.Module], None]) -> Loss:
    """A loss whose script changes the memory of parameters each time."""

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        change(model)
        return entropy(model, x, y)

    return loss


def cast_and_back(model: torch.nn.Module) -> None:
    model.double()
    model.float()


def swap(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [cast_and_back, swap])
def test_parameters_may_get_other_memory(change: Callable[[torch.nn.Module], None]) -> None:
    same_as_sent(rebound(change), replicas=2, optimizer=rp.AdamW(lr=0.01))


def test_sharpness_aware_steps_are_as_they_are_elsewhere() -> None:
    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        entropy(model, x, y)
        old = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.01
        found = entropy(model, x, y)
        for parameter, before in zip(model.parameters(), old, strict=True):
            parameter.data = before
        return found

    def quiet() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))

    same_as_sent(loss, quiet, steps=4, optimizer=rp.SGD(lr=0.1))


class Shared(torch.nn.Module):
    """Two parameters whose gradients autograd makes as views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two = torch.nn.Parameter(torch.randn(30)), torch.nn.Parameter(torch.randn(30))
        self.last = torch.nn.Linear(30, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(x[:1] * (self.one.unsqueeze(0) + self.two.unsqueeze(0)))
        return found.expand(len(x), 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"replicas": 2}, {"accumulate": 2}, {"clip": 0.01}, {"replicas": 3, "accumulate": 2, "clip": 0.01},
        {"optimizer": rp.SGD(lr=0.1, momentum=0.9, nesterov=True)},
    ],
)  # fmt: skip
def test_gradients_that_are_views_of_one_memory_are_counted_once(settings: dict[str, Any]) -> None:
    same_as_sent(make=Shared, **{"optimizer": rp.SGD(lr=0.1), **settings})


def test_a_hook_of_the_script_may_go_on_with_its_own_gradient() -> None:
    def make() -> torch.nn.Module:
        model = build()
        mean = torch.zeros_like(model[0].weight)

        def smooth(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            mean.lerp_(parameter.grad, 0.5)
            parameter.grad = mean

        model[0].weight.register_post_accumulate_grad_hook(smooth)
        model[3].weight.register_post_accumulate_grad_hook(
            lambda parameter: setattr(parameter, "grad", parameter.grad.mean().expand_as(parameter))
        )
        return model

    same_as_sent(make=make, replicas=3, accumulate=2, clip=0.5, optimizer=rp.SGD(lr=0.1))


def with_own(servers: int, **settings: Any) -> tuple[bool, str]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    own = train(model, servers=servers, own_optimizer=optimizer, sync=rp.AllReduce(), **settings)
    return own, weights_hash(model)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"replicas": 3, "accumulate": 2, "clip": 0.1}, {"replicas": 2, "nonfinite": "skip"},
        {"replicas": 2, "network": rp.Network(shard_bytes=384)},
    ],
)  # fmt: skip
def test_an_optimizer_of_the_scripts_own_gets_its_gradients_where_they_are(settings: dict[str, Any]) -> None:
    own, sent = with_own(1, **settings), with_own(2, **settings)
    assert (own[0], sent[0]) == (True, False)
    assert own[1] == sent[1]


@pytest.mark.parametrize("steps_here", [True, False])
def test_a_wrapped_loop_has_the_bytes_of_one_that_sends(steps_here: bool) -> None:
    def wrapped(servers: int) -> str:
        model = build()
        with EmbeddedJob(servers=servers) as job:
            here = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer = wrap_in(job, model, here if steps_here else rp.AdamW(lr=0.01), steps=6, clip=0.1)
            for step in range(6):
                x, y = DATA[4 * step : 4 * step + 4]
                optimizer.zero_grad()
                entropy(model, x, y).backward()
                optimizer.step()
            assert bool(job._exchange.in_place.parameters) == (servers == 1)
        return weights_hash(model)

    assert wrapped(1) == wrapped(2)


class Odd(torch.nn.Module):
    """A tied weight, a parameter that only some steps use, one that none uses, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)
        self.second.weight = self.first.weight
        self.sometimes = torch.nn.Parameter(torch.ones(3))
        self.never, self.empty = torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(0))
        self.last = torch.nn.Linear(30, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.last(self.second(self.first(x).relu()).relu())
        return out * self.sometimes if self.calls % 2 else out


def test_odd_parameters_are_stepped_as_they_would_be_elsewhere() -> None:
    model = same_as_sent(make=Odd, replicas=2, accumulate=2, optimizer=rp.AdamW(lr=0.01))
    assert not torch.equal(model.never, torch.ones(3, 3)), "weight decay moves it"


def test_a_step_that_is_not_finite_is_skipped_as_it_is_elsewhere() -> None:
    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        infinite = torch.where(x[0, 0] > 0.5, torch.inf, 1.0)  # in some steps
        return entropy(model, x, y) * infinite

    same_as_sent(loss, steps=12, replicas=2, nonfinite="skip", optimizer=rp.AdamW(lr=0.01))


def test_evaluations_and_a_stop_see_the_version() -> None:
    seen: list[tuple[int, str]] = []
    model = build()
    with EmbeddedJob() as job:
        run = job.train(model, DATA, replicas=2, batch=4, steps=20, seed=5, optimizer=rp.AdamW(lr=0.01))
        run.every(2)(lambda step: seen.append((step, weights_hash(model))))
        for micro in run:
            with micro:
                micro.backward(entropy(model, *micro.batch), weight=1.0 + micro.replica)
                if micro.step == 5:
                    run.stop("enough")
    for step, found in seen[1:]:
        other = build()
        train(other, servers=2, replicas=2, steps=step, optimizer=rp.AdamW(lr=0.01))
        assert weights_hash(other) == found, step


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, rp.AdamW(lr=0.1)], ids=repr)
def test_a_shard_in_place_has_the_state_of_one_that_is_sent_and_goes_on_from_it(optimizer: Optimizer) -> None:
    if isinstance(optimizer, rp.Muon):
        pytest.skip("Muon steps whole matrices: they are sent")
    config = resolve({"replicas": 1, "batch": 1, "steps": 8, "optimizer": optimizer})
    pool, random = BufferPool(WORDS), torch.Generator().manual_seed(4)
    sent = OwnedShard(IN_ROWS, config, pool, Scratch())
    values = torch.randn(WORDS, generator=random)
    first = pool.take()
    first.tensor.copy_(values)
    sent.install(first)

    def place(values: torch.Tensor) -> tuple[InPlace, InPlaceShard]:
        model = InPlace()
        model.parameters[0] = Pieces(part.clone() for part in values.split([300, 1, 450, 249]))
        return model, InPlaceShard(IN_ROWS, config, model, pool.take())

    model, own = place(values)
    own.install(pool.take())
    for step in range(6):
        gradient = torch.randn(WORDS, generator=random)
        buffer = pool.take()
        buffer.tensor.copy_(gradient)
        model.gradients[0] = Pieces(part.clone() for part in gradient.split([300, 1, 450, 249]))
        update = Apply(step + 1, step, 0.5, step, replicate=False)
        for shard, payload in ((sent, buffer), (own, pool.take())):
            shard.take(payload, 3.0)
            shard.mean(4.0)
        assert sent.norms() == own.norms()
        assert sent.apply(update) is own.apply(update) is None
        model.install()
        here, there = sent.state(step + 1, (), wires=False), own.state(step + 1, (), wires=False)
        assert here.scalars == there.scalars
        assert {n: a.tobytes() for n, a in here.arrays.items()} == {n: a.tobytes() for n, a in there.arrays.items()}
        assert own.keeps(step + 1)
        if step == 2:  # a snapshot's record: go on from it
            model, own = place(torch.zeros(WORDS))
            own.load(there)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: build().to(torch.bfloat16), {}), (build, {"average": rp.EMA(decay=0.9)}),
        (build, {"optimizer": rp.AdamW(fused=True)}), (build, {"sync": rp.LocalSteps(2)}),
        (build, {"sync": rp.BoundedStaleness(1)}), (build, {"memory": rp.Memory(hold="bf16"), "precision": "bf16"}),
        (build, {"codec": rp.Int8()}),
    ],
)  # fmt: skip
def test_a_job_whose_server_needs_something_else_is_sent(
    make: Callable[[], torch.nn.Module], settings: dict[str, Any]
) -> None:
    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x.to(model[0].weight.dtype), y)

    assert not train(make(), loss, **{"replicas": 2, "steps": 2, **settings})
