"""Jobs of several models, each with its own optimizer, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rallypoint as rp
from rallypoint.config import JobConfig, resolve
from rallypoint.core.order import SampleOrder, derive_seed
from rallypoint.core.shard.clip import clip_scale, total_norm
from rallypoint.data.randomness import seed_everything
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.testing.reference import copy_all, norm_of, tree_sum
from rallypoint.worker.models import one_model
from rallypoint.worker.tensors import ModelTensors, weights_hash

NOISE = 6
SEED, SAMPLES, BATCH = 4, 60, 6
Models = dict[str, nn.Module]
Optimizers = dict[str, torch.optim.Optimizer]


class Generator(nn.Module):
    """Noise (n, NOISE, 1, 1) to images (n, 1, 8, 8), with BatchNorm, as a DCGAN's."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise: Tensor) -> Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    """Images to logits (n,), with BatchNorm where `norm`."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 6, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(6) if norm else nn.Identity(),
            nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Conv2d(6, 1, 4),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.main(images).flatten()


def gan() -> Models:
    torch.manual_seed(21)
    return {"generator": Generator(), "discriminator": Discriminator()}


def wasserstein() -> Models:
    torch.manual_seed(22)
    return {"generator": Generator(), "critic": Discriminator(norm=False)}


def dataset() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(9)))


def noise_of(iteration: int, replica: int) -> Tensor:
    """The same for both steps of an iteration."""
    return torch.randn(BATCH, NOISE, 1, 1, generator=torch.Generator().manual_seed(100 * iteration + replica))


@dataclass(frozen=True)
class Place:
    """What a loss may depend on beside the models and the samples."""

    updates: Sequence[str]
    iteration: int
    replica: int


Losses = Callable[[Models, Tensor, Place], Iterator[Tensor]]


def gan_losses(models: Models, real: Tensor, place: Place) -> Iterator[Tensor]:
    """Each is to be back-propagated by itself."""
    generator, discriminator = models["generator"], models["discriminator"]
    one, zero = torch.ones(len(real)), torch.zeros(len(real))
    if "discriminator" in place.updates:
        yield F.binary_cross_entropy_with_logits(discriminator(real), one)
        fake = generator(noise_of(place.iteration, place.replica))
        yield F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zero)
    else:
        fake = generator(noise_of(place.iteration, place.replica))
        yield F.binary_cross_entropy_with_logits(discriminator(fake), one)


def simultaneous_losses(models: Models, real: Tensor, place: Place) -> Iterator[Tensor]:
    """Both models are updated at each step, each with its own loss."""
    generator, discriminator = models["generator"], models["discriminator"]
    fake = generator(torch.randn(len(real), NOISE, 1, 1))
    found = discriminator(real).mean() - discriminator(fake.detach()).mean()
    yield F.softplus(found) + 0.1 * fake.square().mean()


def mixed_losses(models: Models, real: Tensor, place: Place) -> Iterator[Tensor]:
    """Some steps update both models, the others one."""
    yield from (simultaneous_losses if len(place.updates) == 2 else gan_losses)(models, real, place)


def penalty_losses(models: Models, real: Tensor, place: Place) -> Iterator[Tensor]:
    """Gulrajani et al., 2017: a gradient penalty, so a backward pass through a backward pass."""
    generator, critic = models["generator"], models["critic"]
    fake = generator(torch.randn(len(real), NOISE, 1, 1))
    if "critic" not in place.updates:
        yield -critic(fake).mean()
        return
    fake = fake.detach()
    share = torch.rand(len(real), 1, 1, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    yield critic(fake).mean() - critic(real).mean() + 10 * penalty


@dataclass(frozen=True)
class Case:
    """A job of several models: what plain PyTorch's optimizers are of each, and the job's settings."""

    build: Callable[[], Models]
    losses: Losses
    plain: Callable[[Models], Optimizers]
    settings: dict[str, Any] = field(default_factory=dict)

    def all_settings(self, replicas: int) -> dict[str, Any]:
        common = {"replicas": replicas, "batch": BATCH, "steps": 15, "seed": SEED, "shard_bytes": 512}
        return {**common, **self.settings}

    def config(self, replicas: int) -> JobConfig:
        return resolve(one_model(self.build(), self.all_settings(replicas))[1])


def _adams(models: Models) -> Optimizers:
    return {name: torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999)) for name, model in models.items()}


_ADAM = rp.Adam(lr=2e-3, betas=(0.5, 0.999))
_BOTH = {"generator": _ADAM, "discriminator": _ADAM}
_DCGAN = {"optimizer": _BOTH, "alternate": ("discriminator", "generator")}
CASES = {
    "dcgan": Case(gan, gan_losses, _adams, _DCGAN),
    "clipped": Case(gan, gan_losses, _adams, {**_DCGAN, "clip": 0.05}),
    "wasserstein": Case(
        wasserstein, penalty_losses,
        lambda models: {
            "critic": torch.optim.RMSprop(models["critic"].parameters(), lr=1e-3),
            "generator": torch.optim.SGD(models["generator"].parameters(), lr=0.1, momentum=0.9),
        },
        {"optimizer": {"critic": rp.RMSprop(lr=1e-3), "generator": rp.SGD(lr=0.1, momentum=0.9)},
         "alternate": ("critic", "critic", "critic", "generator"), "batch_for": "step"},
    ),
    "at once": Case(
        gan, simultaneous_losses,
        lambda models: {
            "discriminator": torch.optim.Adagrad(models["discriminator"].parameters(), lr=0.01),
            "generator": torch.optim.Adam(models["generator"].parameters(), lr=1e-3),
        },
        {"optimizer": {"discriminator": rp.Adagrad(lr=0.01), "generator": rp.Adam(lr=1e-3)}},
    ),
    "one optimizer for each, and one of both": Case(
        gan, mixed_losses, _adams, {"optimizer": _ADAM, "alternate": (("discriminator", "generator"), "generator")}
    ),
}  # fmt: skip


def train_case(job: rp.Job, name: str, replicas: int, changes: dict[str, Any] | None = None) -> str:
    """The weights' hash on one worker of a real cluster."""
    case = CASES[name]
    models = case.build()
    if job.id != "worker0":  # only the lead's first weights count
        with torch.no_grad():
            for model in models.values():
                for parameter in model.parameters():
                    parameter.normal_()
    for micro in job.train(models, dataset(), **{**case.all_settings(replicas), **(changes or {})}):
        with micro:
            losses = list_of(case.losses, models, micro)
            for loss in losses:
                micro.backward(loss, more=loss is not losses[-1])
    return weights_hash(nn.ModuleDict(models))


def bytes_of(job: rp.Job) -> dict[str, tuple[int, int, int]]:
    """Of each model: the bytes that this worker has pushed, those of the versions that it got, and the model's.

    A version that is here before its shard's contribution has left the sending thread finds no room, and is asked for
    again (FETCH): that one counts once.
    """
    models = gan()
    settings = CASES["dcgan"].all_settings(1)
    one, named = one_model(models, settings)
    shards = ModelTensors(one, resolve(named)).layout.shards
    names = {0: "discriminator", 1: "discriminator", 2: "generator", 3: "generator"}  # by optimizer group
    pushed, got = dict.fromkeys(models, 0), dict.fromkeys(models, 0)
    send, receive = Channel.send, Channel.receive_header

    def count(header: Header, into: dict[str, int], kind: Kind) -> None:
        if header.kind is kind and shards[header.shard].group >= 0:
            into[names[shards[header.shard].group]] += header.length

    def counted_send(self: Channel, header: Header, *args: Any, **kwargs: Any) -> None:
        count(header, pushed, Kind.PUSH)
        if header.kind is Kind.FETCH and (asked := shards[header.shard]).group >= 0:
            got[names[asked.group]] -= asked.nbytes
        send(self, header, *args, **kwargs)

    def counted_receive(self: Channel) -> Header:
        count(header := receive(self), got, Kind.VERSION)
        return header

    setattr(Channel, "send", counted_send)  # noqa: B010 - this process is only this job's
    setattr(Channel, "receive_header", counted_receive)  # noqa: B010
    for micro in job.train(models, dataset(), **settings):
        with micro:
            losses = list_of(gan_losses, models, micro)
            for loss in losses:
                micro.backward(loss, more=loss is not losses[-1])
    sizes = {name: sum(s.nbytes for s in shards if names.get(s.group) == name) for name in models}
    return {name: (pushed[name], got[name], sizes[name]) for name in models}


def list_of(losses: Losses, models: Models, micro: rp.Micro) -> list[Tensor]:
    return list(losses(models, micro.batch[0], Place(micro.updates, micro.iteration, micro.replica)))


def plain_hash(name: str, replicas: int) -> str:
    """The weights' hash of plain PyTorch: an optimizer for each model, `replicas` computed one after another."""
    case, config = CASES[name], CASES[name].config(replicas)
    models = case.build()
    optimizers = case.plain(models)
    entries = config.alternate or (tuple(models),)
    buffers = [buffer for model in models.values() for buffer in model.buffers()]
    order = SampleOrder(seed=SEED, samples=SAMPLES, replicas=replicas, batch=BATCH)
    images = dataset().tensors[0]
    for step in range(config.steps):
        updates = entries[step % len(entries)]
        updates = (updates,) if isinstance(updates, str) else updates
        iteration = step // len(entries)
        start, kept, gradients = [b.clone() for b in buffers], list[Tensor](), list[list[Tensor]]()
        parameters = [parameter for name in updates for parameter in models[name].parameters()]
        for replica in range(replicas):
            copy_all(buffers, start)
            for model in models.values():
                model.zero_grad()
            seed_everything(derive_seed(SEED, "compute", step, replica, 0))
            number = iteration if config.batch_for == "iteration" else step
            real = images[order.samples(number, replica)]
            losses = list(case.losses(models, real, Place(updates, iteration, replica)))
            for loss in losses:
                loss.backward()
            gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
            kept = [b.clone() for b in buffers] if replica == 0 else kept
        copy_all(buffers, kept)
        scale = _clip(models, config, updates, parameters, gradients)
        for parameter, of_replicas in zip(parameters, zip(*gradients, strict=True), strict=True):
            parameter.grad = tree_sum(of_replicas) * (1.0 / replicas) * scale
        for name in updates:
            optimizers[name].step()
    return weights_hash(nn.ModuleDict(models))


def _clip(
    models: Models, config: JobConfig, updates: Sequence[str], parameters: list[Tensor],
    gradients: list[list[Tensor]],
) -> float:  # fmt: skip
    """The factor of clipping: by the norm of the gradient of those models that the step updates."""
    if config.clip is None:
        return 1.0
    tensors = ModelTensors(one_model(models, {})[0], config)
    vector = torch.zeros(tensors.layout.words)
    summed = [tree_sum(of) * (1.0 / config.replicas) for of in zip(*gradients, strict=True)]
    by_id = {id(parameter): gradient for parameter, gradient in zip(parameters, summed, strict=True)}
    for placed in tensors.parameters:
        if id(placed.tensor) in by_id:
            placed.of(vector).copy_(by_id[id(placed.tensor)])
    shards = [s for s in tensors.layout.shards if s.role == "parameters"]
    return clip_scale(total_norm(norm_of(vector[s.start : s.stop]) for s in shards), config.clip)


def dcgan_loop() -> Models:
    """The loop of pytorch/examples' DCGAN, with one replica: images are made once, and used for both models."""
    models = gan()
    generator, discriminator = models["generator"], models["discriminator"]
    optimizers = _adams(models)
    order = SampleOrder(seed=SEED, samples=SAMPLES, replicas=1, batch=BATCH)
    images = dataset().tensors[0]
    loss_of = nn.BCEWithLogitsLoss()
    for iteration in range(7):
        discriminator.zero_grad()
        seed_everything(derive_seed(SEED, "compute", 2 * iteration, 0, 0))
        loss_of(discriminator(images[order.samples(iteration, 0)]), torch.ones(BATCH)).backward()
        fake = generator(noise_of(iteration, 0))
        loss_of(discriminator(fake.detach()), torch.zeros(BATCH)).backward()
        optimizers["discriminator"].step()

        generator.zero_grad()
        seed_everything(derive_seed(SEED, "compute", 2 * iteration + 1, 0, 0))
        loss_of(discriminator(fake), torch.ones(BATCH)).backward()
        optimizers["generator"].step()
    return models


def train_dcgan(job: rp.Job) -> dict[str, dict[str, Any]]:
    """The same as a job: what its models hold at the end."""
    models = gan()
    for micro in job.train(models, dataset(), **{**CASES["dcgan"].all_settings(1), "steps": 14}):
        with micro:
            losses = list_of(gan_losses, models, micro)
            for loss in losses:
                micro.backward(loss, more=loss is not losses[-1])
    return {name: {k: v.numpy() for k, v in model.state_dict().items()} for name, model in models.items()}
