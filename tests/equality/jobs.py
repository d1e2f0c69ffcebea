"""Jobs whose bytes are compared: built alike in the reference's process and in every worker's."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

import rallypoint as rp
from rallypoint.config import JobConfig, resolve
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.testing.reference import train_reference
from rallypoint.worker.tensors import ModelTensors, weights_hash
from support.reference_local import train_local_reference


@dataclass(frozen=True)
class Case:
    """Something to train: how to build it, its loss, its settings."""

    build: Callable[[], tuple[torch.nn.Module, Any]]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    settings: dict[str, Any]
    weight_of: Callable[[int, int], float] | None = None
    own: Callable[[torch.nn.Module], tuple[list[Any], list[Any]]] | None = None

    @property
    def config(self) -> JobConfig:
        return resolve(self.settings)


def _gpt() -> tuple[torch.nn.Module, Any]:
    from rallypoint.recipes.gpt_model import GPT, GPTConfig

    torch.manual_seed(7)
    model = GPT(GPTConfig(layers=2, heads=2, width=32, block=16, dropout=0.1))
    text = torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(3))
    windows = text.unfold(0, 17, 5)
    return model, torch.utils.data.TensorDataset(windows[:, :-1], windows[:, 1:])


def _gpt_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _resnet() -> tuple[torch.nn.Module, Any]:
    from rallypoint.recipes.resnet_model import ResNet, ResNetConfig

    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(200, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 10, (200,), generator=generator)
    return ResNet(ResNetConfig(width=8)), torch.utils.data.TensorDataset(images, labels)


def _classify(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


class SometimesUnused(torch.nn.Module):
    """A branch that some batches leave out, a parameter nobody uses, a frozen one, and one larger than a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 96)
        self.branch = torch.nn.Linear(96, 96)
        self.never = torch.nn.Parameter(torch.randn(5))
        self.frozen = torch.nn.Parameter(torch.randn(96), requires_grad=False)
        self.last = torch.nn.Linear(96, 3)

    def forward(self, x: torch.Tensor, use_branch: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) + self.frozen
        if use_branch:
            hidden = hidden + self.branch(hidden)
        return self.last(hidden)


def _sometimes() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(13)
    generator = torch.Generator().manual_seed(9)
    return SometimesUnused(), torch.utils.data.TensorDataset(
        torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator), torch.arange(64)
    )


def _sometimes_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y, index = batch
    return F.cross_entropy(model(x, use_branch=bool(index[0] % 2)), y)


def _weight(step: int, replica: int) -> float:
    return 1.0 + 0.37 * replica + 0.01 * step


_GPT_SETTINGS = {
    "replicas": 4, "batch": 4, "steps": 50, "seed": 5, "network.shard_bytes": 16 << 10, "clip": 0.5,
    "optimizer": rp.AdamW(lr=rp.cosine(3e-3, warmup=5), weight_decay=0.1),
}  # fmt: skip
_RESNET_SETTINGS = {
    "replicas": 4, "batch": 8, "steps": 50, "seed": 6, "network.shard_bytes": 64 << 10,
    "optimizer": rp.SGD(lr=rp.step_decay(0.1, every=20), momentum=0.9, weight_decay=1e-4),
}  # fmt: skip
_PLAIN = {"replicas": 3, "batch": 6, "steps": 24, "seed": 8, "network.shard_bytes": 4 << 10}

SYNC_CASES = {
    "gpt": Case(_gpt, _gpt_loss, _GPT_SETTINGS),
    "resnet": Case(_resnet, _classify, _RESNET_SETTINGS),
    "accumulation of 3": Case(_sometimes, _sometimes_loss, {**_PLAIN, "accumulate": 3, "clip": 1.0}),
    "weighted": Case(_sometimes, _sometimes_loss, {**_PLAIN, "optimizer": rp.Adam(lr=1e-2)}, _weight),
    "nesterov": Case(
        _sometimes, _sometimes_loss, {**_PLAIN, "optimizer": rp.SGD(lr=0.05, momentum=0.9, nesterov=True)}
    ),
    "groups": Case(
        _sometimes, _sometimes_loss,
        {**_PLAIN, "groups": (rp.Group(match=("last.*",), lr_scale=0.1, weight_decay=0.0),), "clip": 0.3},
    ),
    "adagrad": Case(
        _sometimes, _sometimes_loss,
        {**_PLAIN, "optimizer": rp.Adagrad(lr=rp.cosine(0.1), lr_decay=0.05, weight_decay=0.01), "clip": 1.0},
    ),
    "nadam, rates from a function": Case(
        _sometimes, _sometimes_loss,
        {**_PLAIN, "optimizer": rp.NAdam(lr=rp.tabulated(lambda step: 0.01 / (1 + step % 5), steps=24))},
    ),
    "adagrad, resnet": Case(
        _resnet, _classify,
        {**_RESNET_SETTINGS, "optimizer": rp.Adagrad(lr=0.02, initial_accumulator_value=0.1), "steps": 12},
    ),
    "one frame in flight, nothing held": Case(
        _sometimes, _sometimes_loss,
        {**_PLAIN, "replicas": 5, "network.hold_bytes": 0, "network.window": 1, "network.in_flight_bytes": 1}
    ),
    "gpt weighted and accumulated": Case(_gpt, _gpt_loss, {**_GPT_SETTINGS, "accumulate": 2, "steps": 20}, _weight),
    "resnet accumulated and clipped": Case(
        _resnet, _classify, {**_RESNET_SETTINGS, "accumulate": 2, "steps": 12, "clip": 1.0}
    ),
}  # fmt: skip


def _muon(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """As its author has it: matrices inside, AdamW for all else; and a schedule of each."""
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    others = [p for name, p in model.named_parameters() if not (p.dim() == 2 and "blocks" in name)]
    optimizers = [torch.optim.Muon(inside, lr=2e-3), torch.optim.AdamW(others, lr=3e-3)]
    return optimizers, [torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)) for o in optimizers]


def _rmsprop(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.RMSprop(trained, lr=1e-3, momentum=0.9, centered=True)
    return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)]


_ALL = {"sync": rp.AllReduce()}
ALL_REDUCE_CASES = {
    name: Case(case.build, case.loss, {**case.settings, **_ALL}, case.weight_of) for name, case in SYNC_CASES.items()
} | {
    "adam, fused": Case(_gpt, _gpt_loss, {**_GPT_SETTINGS, **_ALL, "optimizer": rp.Adam(lr=3e-3, fused=True)}),
    "own muon": Case(_gpt, _gpt_loss, {**_GPT_SETTINGS, **_ALL, "steps": 20}, own=_muon),
    "own rmsprop": Case(_sometimes, _sometimes_loss, {**_PLAIN, **_ALL, "accumulate": 3}, _weight, _rmsprop),
    "plain descent": Case(_sometimes, _sometimes_loss, {**_PLAIN, **_ALL, "optimizer": rp.SGD(lr=0.05)}),
}  # fmt: skip

_FRESH, _KEPT = rp.LocalSteps(steps=4, keep_inner=False), rp.LocalSteps(steps=4, keep_inner=True)
_LOCAL_GPT = {**_GPT_SETTINGS, "replicas": 3, "accumulate": 2, "steps": 22}  # the last round has two steps

LOCAL_CASES = {
    "fresh": Case(_gpt, _gpt_loss, {**_LOCAL_GPT, "sync": _FRESH}),
    "kept": Case(_gpt, _gpt_loss, {**_LOCAL_GPT, "sync": _KEPT}),
    "resnet": Case(_resnet, _classify, {**_RESNET_SETTINGS, "replicas": 3, "steps": 13, "sync": _KEPT}),
    "sometimes unused, weighted": Case(
        _sometimes, _sometimes_loss, {**_PLAIN, "accumulate": 3, "clip": 1.0, "sync": _KEPT}, _weight
    ),
    "groups": Case(
        _sometimes, _sometimes_loss,
        {**_PLAIN, "groups": (rp.Group(match=("last.*",), lr_scale=0.1, weight_decay=0.0),), "sync": _FRESH},
    ),
    "adagrad": Case(_resnet, _classify, {
        **_RESNET_SETTINGS, "replicas": 3, "steps": 13, "sync": _KEPT,
        "optimizer": rp.Adagrad(lr=0.01, initial_accumulator_value=0.1),
    }),
    "plain averaging": Case(
        _sometimes, _sometimes_loss,
        {**_PLAIN, "optimizer": rp.SGD(lr=0.05, momentum=0.9),
         "sync": rp.LocalSteps(steps=6, outer=rp.SGD(lr=1.0), keep_inner=False)},
    ),
    # A round every 4 steps updates a third of the shards; the last round, of two steps, updates all.
    "fragments": Case(_gpt, _gpt_loss, {**_LOCAL_GPT, "sync": rp.LocalSteps(steps=12, fragments=3)}),
    "fragments, resnet": Case(
        _resnet, _classify,
        {**_RESNET_SETTINGS, "replicas": 2, "steps": 12, "sync": rp.LocalSteps(steps=4, fragments=2)},
    ),
    "fragments, sometimes unused, weighted": Case(
        _sometimes, _sometimes_loss,
        {**_PLAIN, "accumulate": 3, "clip": 1.0, "sync": rp.LocalSteps(steps=6, fragments=3)}, _weight,
    ),
    # A round takes three steps: it updates the norms; every second round a block in addition; every fourth the rest.
    "periods": Case(_gpt, _gpt_loss, {
        **_LOCAL_GPT, "sync": rp.LocalSteps(steps=12), "groups": (
            rp.Group(match=("norm.*", "*.norm_*"), sync_every=3, weight_decay=0.0),
            rp.Group(match=("blocks.0.*",), sync_every=6),
            rp.Group(match=("blocks.1.*",), sync_every=6, sync_offset=3, lr_scale=0.5),
        ),
    }),
    "periods, fragments, buffers": Case(
        _resnet, _classify,
        {**_RESNET_SETTINGS, "replicas": 2, "steps": 12, "sync": rp.LocalSteps(steps=8, fragments=2),
         "groups": (rp.Group(match=("head.*", "stages.0.*"), sync_every=2),)},
    ),
    # Workers mix in a round's result three steps into the next round (in the last round, of two steps, after one).
    "delay": Case(_gpt, _gpt_loss, {**_LOCAL_GPT, "sync": rp.LocalSteps(steps=12, fragments=3, delay=3)}),
    "delay, whole rounds": Case(_gpt, _gpt_loss, {**_LOCAL_GPT, "sync": rp.LocalSteps(steps=4, delay=1, mix=0.75)}),
    "delay, periods, weighted": Case(
        _sometimes, _sometimes_loss,
        {**_PLAIN, "accumulate": 3, "clip": 1.0, "sync": rp.LocalSteps(steps=6, delay=1, mix=1.0),
         "groups": (rp.Group(match=("last.*",), sync_every=3),)}, _weight,
    ),
    "fewer steps than a round": Case(
        _sometimes, _sometimes_loss, {**_PLAIN, "steps": 3, "sync": rp.LocalSteps(steps=50)}
    ),
}  # fmt: skip


CASES = SYNC_CASES | {
    f"{mode} {name}": case
    for mode, cases in (("all-reduce", ALL_REDUCE_CASES), ("local", LOCAL_CASES))
    for name, case in cases.items()
}


@cache
def reference_hash(name: str) -> str:
    """The weights' hash of plain PyTorch in this process."""
    case = CASES[name]
    model, dataset = case.build()
    if isinstance(case.config.sync, rp.LocalSteps):
        train_local_reference(model, dataset, case.loss, case.config, weight_of=case.weight_of)
    else:
        train_reference(model, dataset, case.loss, case.config, weight_of=case.weight_of, own=case.own)
    return weights_hash(model)


def train_on_worker(job: rp.Job, name: str) -> str:
    """The weights' hash on one worker of a real cluster."""
    return _train(job, CASES[name])


def _train(job: rp.Job, case: Case) -> str:
    model, dataset = case.build()
    if job.id != "worker0":  # only the lead's first weights count: the servers give them to everybody
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
    optimizers, schedules = case.own(model) if case.own else ([], [])
    settings = {key: value for key, value in case.settings.items() if key != "optimizer" or not optimizers}
    for micro in job.train(model, dataset, own_optimizer=optimizers, own_schedule=schedules, **settings):
        with micro:
            weight = case.weight_of(micro.step, micro.replica) if case.weight_of else 1.0
            micro.backward(case.loss(model, micro.batch), weight=weight)
    return weights_hash(model)


@dataclass(frozen=True)
class Pushed:
    """The weights' hash, the bytes of parameters pushed by this worker, and the bytes of all parameters."""

    hash: str
    pushed: int
    whole: int


def bytes_pushed(job: rp.Job, settings: dict[str, Any]) -> Pushed:
    """Train a small GPT and count what this worker pushes."""
    model, dataset = _gpt()
    shards = ModelTensors(model, resolve(settings)).layout.shards
    pushed = 0
    send = Channel.send

    def counted(self: Channel, header: Header, *args: Any, **kwargs: Any) -> None:
        nonlocal pushed
        if header.kind is Kind.PUSH and shards[header.shard].role == "parameters":
            pushed += header.length
        send(self, header, *args, **kwargs)

    setattr(Channel, "send", counted)  # noqa: B010 - this process is only this job's
    for micro in job.train(model, dataset, **settings):
        with micro:
            micro.backward(_gpt_loss(model, micro.batch))
    return Pushed(weights_hash(model), pushed, sum(shard.nbytes for shard in shards if shard.role == "parameters"))


def train_with(job: rp.Job, settings: dict[str, Any]) -> tuple[str, dict[int, float]]:
    """A small job with other settings: the weights' hash, and the losses of the steps computed here."""
    model, dataset = _gpt()
    losses: dict[int, float] = {}
    common = {"replicas": 3, "batch": 8, "steps": 40, "seed": 5, "network.shard_bytes": 16 << 10}
    for micro in job.train(model, dataset, optimizer=rp.Adam(lr=3e-3), **{**common, **settings}):
        with micro:
            loss = _gpt_loss(model, micro.batch)
            losses[micro.step] = float(loss.detach())
            micro.backward(loss)
    return weights_hash(model), losses


def train_counting(job: rp.Job, settings: dict[str, Any]) -> dict[tuple[str, int], tuple[int, int]]:
    """Bytes of payload that crossed this worker's links, and the same as fp32, for each (kind, group)."""

    model, _ = _gpt()
    common = {"replicas": 3, "batch": 8, "steps": 40, "seed": 5, "network.shard_bytes": 16 << 10}
    shards = ModelTensors(model, resolve({**common, **settings})).layout.shards
    largest = {group: max(s.nbytes for s in shards if s.group == group) for group in {s.group for s in shards}}
    written: Counter[tuple[str, int]] = Counter()
    whole: Counter[tuple[str, int]] = Counter()
    send, receive = Channel.send, Channel.receive_header

    lock = threading.Lock()  # links count from threads of their own, and `+=` on a Counter is no one step

    def count(header: Header) -> None:
        # A group's last shard may have few words, of which a whole block is sent (64 words of Sign: 132 bytes for 256).
        # How often each shard is sent depends on who computes what: such a one would count for more or less.
        shard = shards[header.shard] if header.kind in (Kind.PUSH, Kind.VERSION) else None
        if shard is not None and 8 * shard.nbytes > largest[shard.group]:
            key = header.kind.name, shard.group
            with lock:
                written[key] += header.length
                whole[key] += shard.nbytes

    def counted_send(self: Channel, header: Header, *args: Any, **kwargs: Any) -> None:
        count(header)
        send(self, header, *args, **kwargs)

    def counted_receive(self: Channel) -> Header:
        header = receive(self)
        count(header)
        return header

    setattr(Channel, "send", counted_send)  # noqa: B010 - this process is only this job's
    setattr(Channel, "receive_header", counted_receive)  # noqa: B010
    train_with(job, settings)
    return {key: (written[key], whole[key]) for key in whole}
