"""precision="bf16": autocast around the script's code. hold="bf16": bf16 on workers, fp32 masters on servers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from rallypoint.codec.spec import Bf16, Raw
from rallypoint.config import resolve
from rallypoint.core.optimizer import AdamW
from rallypoint.core.policy import AllReduce, LocalSteps
from rallypoint.core.protocol import Finished, Metrics
from rallypoint.core.schedule import rate_at
from rallypoint.data.loader import MicroBatches
from rallypoint.errors import ConfigError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.testing.reference import plain_optimizer, tree_sum
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash
from support.beside import until
from support.gathering import DATA, SETTINGS, Once, build, gathering, loss_of, reference_hash

BF16 = torch.bfloat16
HELD: dict[str, Any] = {"precision": "bf16", "memory.hold": "bf16", "clip": None}


def test_a_bf16_job_has_the_bytes_of_plain_pytorch_with_autocast() -> None:
    expected = reference_hash(precision="bf16", batch=4, accumulate=2)
    assert expected != reference_hash(batch=4, accumulate=2)
    with gathering(2, workers_start=2, workers_max=2) as cluster:
        for _ in range(2):
            cluster.add_worker(precision="bf16", batch=4, accumulate=2)
        assert [worker.result() for worker in cluster.workers] == [expected] * 2


class Seen(torch.autograd.Function):
    """Notes whether autocast is on, in forward and in backward."""

    notes: list[tuple[str, bool]] = []  # noqa: RUF012 - of one test

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Seen.notes.append(("forward", torch.is_autocast_enabled("cpu")))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        Seen.notes.append(("backward", torch.is_autocast_enabled("cpu")))
        return gradient


def test_backward_runs_outside_of_autocast_and_the_body_goes_on_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seen, "notes", [])
    after: list[bool] = []
    with ExitStack() as left:
        cluster = left.enter_context(gathering(1))
        address = cluster.coordinator.address
        job, model = left.enter_context(Job(id="worker0", coordinator=address, transport=cluster.transport)), build()
        run = job.train(model, DATA, **{**SETTINGS, "steps": 2, "precision": "bf16"})

        @run.every(1)
        def evaluate(step: int) -> dict[str, float]:
            return {"bits": torch.finfo(model(DATA[:4][0]).dtype).bits}

        for micro in run:
            assert not torch.is_autocast_enabled("cpu")
            with micro:
                loss = loss_of(model, micro.batch)
                micro.backward(Seen.apply(loss))  # type: ignore[no-untyped-call]
                after.append(torch.is_autocast_enabled("cpu"))
        until(lambda: bool(cluster.heard(Finished)))
        assert {*Seen.notes} == {("forward", True), ("backward", False)}
        assert after == [True] * 8
        assert not torch.is_autocast_enabled("cpu")
        assert [metrics.values for metrics in cluster.heard(Metrics)] == [{"bits": 16.0}] * 2


def test_autocast_ends_with_what_is_computed_in_vain() -> None:
    """A worker dies, and the other one is unwound out of `with micro:`."""
    entered: list[bool] = []

    def at(step: int, replica: int) -> None:
        entered.append(torch.is_autocast_enabled("cpu"))

    with gathering(2, workers_start=2, workers_max=2) as cluster:
        kill = Once(3, 1, lambda: cluster.workers[1].job._link.close())
        cluster.add_worker(at, precision="bf16")
        cluster.add_worker(kill, precision="bf16")
        assert cluster.workers[0].result() == reference_hash(precision="bf16")
    assert all(entered)


# ---- parameters that workers hold in bf16 ----


def masters(**settings: Any) -> tuple[str, str]:
    """fp32 masters stepped by plain PyTorch, from gradients of a model in bf16: their hash, and the model's."""
    config = resolve({**SETTINGS, **HELD, **settings})
    master, model = build(), build()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            model.get_parameter(name).data = parameter.data.to(BF16)
    batches = MicroBatches(DATA, config, torch.device("cpu"))
    decayed = [p for p in master.parameters() if p.dim() > 1]
    plain = [p for p in master.parameters() if p.dim() == 1]
    optimizer = plain_optimizer(config.optimizer, [
        {"params": decayed, "weight_decay": config.optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}
    ])  # fmt: skip
    for step in range(config.steps):
        start = [buffer.clone() for buffer in model.buffers()]
        leaves, kept = [], start
        for replica in range(config.replicas):
            with torch.no_grad():
                for p, of_master in zip(model.parameters(), master.parameters(), strict=True):
                    p.copy_(of_master.to(BF16))  # also those in fp32: versions travel as bf16
                for buffer, value in zip(model.buffers(), start, strict=True):
                    buffer.copy_(value)
            model.zero_grad()
            with torch.autocast("cpu", dtype=BF16):
                loss = loss_of(model, batches.load(step, replica, 0))
            loss.backward()  # type: ignore[no-untyped-call]
            leaves.append([p.grad.to(BF16).float() for p in model.parameters() if p.grad is not None])
            kept = [buffer.clone() for buffer in model.buffers()] if replica == 0 else kept
        for p, *gradients in zip(master.parameters(), *leaves, strict=True):
            p.grad = tree_sum(gradients) * (1.0 / config.replicas)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(config.schedule, step, config.steps)
        optimizer.step()
        with torch.no_grad():
            for model_of in (model, master):
                for buffer, value in zip(model_of.buffers(), kept, strict=True):
                    buffer.copy_(value)
    return weights_hash(master), weights_hash(model)


def test_workers_hold_bf16_servers_step_fp32_masters_and_everybody_ends_with_them() -> None:
    kinds: set[tuple[torch.dtype, ...]] = set()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        kinds.add(tuple(p.dtype for p in model.parameters()))
        return loss_of(model, batch)

    with gathering(2, workers_start=2, workers_max=2) as cluster:
        for _ in range(2):
            cluster.add_worker(loss=loss, **HELD)
        hashes = [worker.result() for worker in cluster.workers]
    weight_and_bias = (BF16, torch.float32)
    assert kinds == {(*weight_and_bias, torch.float32, torch.float32, *weight_and_bias)}  # BatchNorm's own are fp32
    assert hashes == [masters()[0]] * 2


def test_held_parameters_halve_the_bytes_both_ways_but_for_the_last_version(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[tuple[Kind, int, int, int], int] = {}  # a repeat, on a link that opens, counts once
    send = Channel.send

    def counted(self: Channel, header: Header, *args: Any, **kwargs: Any) -> None:
        sent[header.kind, header.shard, header.step, header.replica] = header.length
        send(self, header, *args, **kwargs)

    monkeypatch.setattr(Channel, "send", counted)

    def bytes_sent(**settings: Any) -> tuple[int, int]:
        sent.clear()
        with gathering(1) as cluster:
            cluster.add_worker(steps=4, **settings).result()
        return sum_of(Kind.PUSH), sum_of(Kind.VERSION)

    def sum_of(kind: Kind) -> int:
        return sum(length for (of, *_), length in sent.items() if of is kind)

    model = build()
    parameters = 4 * sum(p.numel() for p in model.parameters())
    ups, downs = bytes_sent(**{"network.presum_bytes": 0})
    held_ups, held_downs = bytes_sent(**HELD, **{"network.presum_bytes": 0})
    assert ups - held_ups == 4 * 4 * parameters // 2, "of four replicas in four steps"
    assert downs - held_downs == 4 * parameters // 2, "versions 0 to 3; the last one is raw"


def test_a_job_that_holds_bf16_goes_on_after_a_server_died() -> None:
    with gathering(2, replication=2, workers_start=2, workers_max=2) as cluster:
        kill = Once(4, 1, lambda: cluster.servers[0].close())
        for at in (kill, kill):
            cluster.add_worker(at, **HELD)
        assert [worker.result() for worker in cluster.workers] == [masters()[0]] * 2


def trained(steps: int, stop_at: int | None = None) -> torch.nn.Module:
    """A model that a job alone has held in bf16, so long, or until its script stopped it."""
    model = build()
    with EmbeddedJob() as job:
        run = job.train(model, DATA, **{**SETTINGS, **HELD, "steps": steps, "optimizer": AdamW(lr=0.01)})
        for micro in run:
            with micro:
                micro.backward(loss_of(model, micro.batch))
            if micro.step == stop_at:
                run.stop("enough")
    return model


def test_a_job_that_ends_early_leaves_the_masters_in_the_model() -> None:
    stopped, whole = trained(9, stop_at=3), trained(4)
    assert {p.dtype for p in stopped.parameters()} == {torch.float32}
    assert weights_hash(stopped) == weights_hash(whole)


# ---- settings ----


def test_held_parameters_travel_as_bf16_unless_the_settings_say_otherwise() -> None:
    config = resolve({"precision": "bf16", "memory.hold": "bf16"})
    assert (config.codec, config.down) == (Bf16(), Bf16())
    config = resolve({"precision": "bf16", "codec": Raw()}, {"memory": {"hold": "bf16"}, "down": {"type": "raw"}})
    assert (config.codec, config.down) == (Raw(), Raw())


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"memory.hold": "bf16"}, 'add precision="bf16"'),
    ({"precision": "bf16", "memory.hold": "bf16", "sync": AllReduce()}, "workers step the parameters themselves"),
    ({"precision": "bf16", "memory.hold": "bf16", "sync": LocalSteps(4)}, "workers step the parameters themselves"),
    ({"precision": "half"}, "precision is 'half': it must be one of fp32, bf16"),
])  # fmt: skip
def test_what_cannot_be_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(settings)
