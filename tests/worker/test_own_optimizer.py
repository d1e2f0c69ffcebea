"""What an optimizer keeps comes to another worker bit by bit, whatever it is; what cannot is refused at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import rallypoint as rp
from rallypoint.config import JobConfig, overrides_from, resolve, with_own_optimizer
from rallypoint.errors import ConfigError, ProtocolError
from rallypoint.store.record import ShardRecord, encode_record, read_state
from rallypoint.worker.loop.own import OwnStepper, SpecifiedStepper, WorkerOptimizer
from rallypoint.worker.tensors import ModelTensors, weights_hash

Built = tuple[Sequence[torch.optim.Optimizer], Sequence[Any]]


class Packed(torch.optim.Optimizer):
    """Keeps what real ones keep: bytes with a scale of each row, an integer, a flag, and nothing at all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.5)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                whole = p.grad.reshape(p.shape[0], -1)
                state["scale"] = whole.abs().amax(1).to(torch.bfloat16)
                state["packed"] = (whole / (whole.abs().amax() + 1e-6) * 100).to(torch.int8)
                state["count"] = state.get("count", 0) + 1
                state["odd"], state["nothing"] = bool(state["count"] % 2), None
                with torch.no_grad():
                    p.sub_(group["lr"] * group["betas"][0] / state["count"] * p.grad)


def _muon(model: torch.nn.Module) -> Built:
    matrices, others = [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)], []


def _scheduled(model: torch.nn.Module) -> Built:
    half = len(list(model.parameters())) // 2
    groups = [{"params": list(model.parameters())[:half]}, {"params": list(model.parameters())[half:], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), warm, rest]


OPTIMIZERS: dict[str, Callable[[torch.nn.Module], Built]] = {
    "adamw": lambda model: ([torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)], []),
    "rmsprop": lambda model: ([torch.optim.RMSprop(model.parameters(), lr=1e-2, centered=True)], []),
    "adafactor": lambda model: ([torch.optim.Adafactor(model.parameters(), lr=1e-2)], []),
    "muon and adamw": _muon,
    "groups and schedules": _scheduled,
    "packed": lambda model: ([Packed(model.parameters())], []),
}


class Worker:
    """A model with its optimizer, in some state."""

    def __init__(self, build: Callable[[torch.nn.Module], Built] | None, seed: int, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3))
        self.model.to(dtype)
        self.config = _config() if build is None else with_own_optimizer(_config(), "mine")
        self.tensors = ModelTensors(self.model, self.config)
        self.layout = self.tensors.layout
        stepper = SpecifiedStepper(self.tensors, self.config) if build is None else OwnStepper(
            self.tensors, *build(self.model)
        )  # fmt: skip
        self.state = WorkerOptimizer(self.tensors, stepper)
        self.state.version = 0

    def step(self) -> None:
        """With the mean gradient of that step, the same for everybody."""
        generator = torch.Generator().manual_seed(self.state.version)
        vector = torch.randn(self.layout.words, generator=generator)
        for shard in (s for s in self.layout.shards if s.role == "buffers"):
            vector[shard.start : shard.stop] = self.tensors.part(shard.start, shard.stop)
        self.state.install(self.state.version + 1, vector, {}, skipped=False)

    def uploaded(self) -> dict[int, ShardRecord]:
        """The state of all parameters, as it comes over the wire."""
        version = self.state.version
        return {
            s.index: read_state(encode_record(self.state.record(s), "none"), s, version, self.config)
            for s in self.layout.shards if s.role == "parameters"
        }  # fmt: skip

    def take(self, states: dict[int, ShardRecord], version: int) -> None:
        self.state.install(version, self.tensors.part(0, self.layout.words), states, skipped=False)


def _config() -> JobConfig:
    return resolve(
        {"steps": 50, "sync": rp.AllReduce(), "optimizer": rp.Adam(lr=rp.cosine(1e-2)), "network.shard_bytes": 192}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [None, *OPTIMIZERS])
def test_whoever_is_given_the_state_goes_on_as_who_gave_it(name: str | None, dtype: torch.dtype) -> None:
    build = None if name is None else OPTIMIZERS[name]
    giver, taker = Worker(build, 1, dtype), Worker(build, 2, dtype)
    for _ in range(4):
        giver.step()
    taker.step()  # it has had another life
    taker.take(giver.uploaded(), giver.state.version)
    assert all(map(torch.equal, taker.model.parameters(), giver.model.parameters()))
    for _ in range(3):
        giver.step()
        taker.step()
    assert all(map(torch.equal, taker.model.parameters(), giver.model.parameters()))
    again = {s: record.arrays for s, record in taker.uploaded().items()}
    for shard, record in giver.uploaded().items():
        assert record.arrays.keys() == again[shard].keys()
        assert all(record.arrays[key].tobytes() == again[shard][key].tobytes() for key in record.arrays)


@pytest.mark.parametrize("name", [None, *OPTIMIZERS])
def test_the_state_before_the_first_step_can_be_given_too(name: str | None) -> None:
    build = None if name is None else OPTIMIZERS[name]
    giver, taker = Worker(build, 1, torch.float32), Worker(build, 2, torch.float32)
    taker.step()
    taker.take(giver.uploaded(), 0)
    for worker in (giver, taker):
        worker.step()
    assert all(map(torch.equal, taker.model.parameters(), giver.model.parameters()))


def test_a_fused_optimizer_gets_gradients_and_its_state_in_the_order_of_the_parameter_s_memory() -> None:
    """It reads them as they lie: of a model in channels_last it would step other elements (on a GPU it refuses)."""

    def fused(model: torch.nn.Module) -> Built:
        return [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)], []

    plain, turned, taker = (Worker(fused, seed, torch.float32) for seed in (1, 1, 2))
    for worker in (turned, taker):
        for parameter in worker.model.parameters():
            parameter.data = parameter.data.t().contiguous().t()
    for _ in range(3):
        plain.step()
        turned.step()
    taker.take(turned.uploaded(), turned.state.version)
    for worker in (plain, turned, taker):
        worker.step()
        assert all(map(torch.equal, worker.model.parameters(), plain.model.parameters()))


def test_of_a_state_on_a_gpu_only_a_shard_s_share_is_copied_to_the_host() -> None:
    """An embedding lies in fifty shards: all of its state for each would take seconds, in which nobody steps."""
    worker, copied = Worker(OPTIMIZERS["adamw"], 1, torch.float32), list[int]()
    worker.step()

    class Copies(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.cpu, torch.Tensor.to):
                copied.append(args[0].nbytes)
            return func(*args, **(kwargs or {}))

    with Copies():
        worker.uploaded()
    assert 0 < max(copied) <= 4 * worker.layout.largest_shard < max(p.nbytes for p in worker.model.parameters())


def test_a_step_that_is_skipped_changes_no_parameter() -> None:
    worker = Worker(None, 1, torch.float32)
    before = weights_hash(worker.model)
    vector = torch.full((worker.layout.words,), torch.nan)
    for shard in (s for s in worker.layout.shards if s.role == "buffers"):
        vector[shard.start : shard.stop] = worker.tensors.part(shard.start, shard.stop)
    worker.state.install(1, vector, {}, skipped=True)
    assert (weights_hash(worker.model), worker.state.version) == (before, 1)


def test_a_setting_that_was_another_for_one_step_is_seen_at_every_later_one() -> None:
    """A worker that reports only later, or at no step in between, has other weights all the same."""
    optimizers: list[torch.optim.Optimizer] = []

    def build(model: torch.nn.Module) -> Built:
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        return optimizers[-1:], []

    ours, other = Worker(build, 1, torch.float32), Worker(build, 1, torch.float32)

    def digests() -> set[str]:
        return {worker.state.settings_digest() for worker in (ours, other)}

    assert len(digests()) == 1
    optimizers[0].param_groups[0]["lr"] = 0.2
    assert len(digests()) == 2
    for worker in (ours, other):
        worker.step()
    optimizers[0].param_groups[0]["lr"] = 0.1
    assert len(digests()) == 2
    for worker in (ours, other):
        worker.step()
        worker.take(ours.uploaded(), worker.state.version)
    assert len(digests()) == 1, "all start from one state again"


class Hoards(torch.optim.SGD):
    """Keeps a set."""

    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["seen"] = {1, 2}
        return super().step(closure)


def test_what_is_neither_a_tensor_nor_plain_is_refused_after_the_first_step() -> None:
    worker = Worker(lambda model: ([Hoards(model.parameters())], []), 1, torch.float32)
    with pytest.raises(ConfigError, match=r"keeps seen of 0\.weight, a set: that cannot be given"):
        worker.step()


@pytest.mark.parametrize(("build", "sentence"), [
    (lambda model: ([torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(9))])], []),
     r"a tensor of shape \[9\] that is no trained parameter"),
    (lambda model: ([torch.optim.SGD(list(model.parameters())[1:])], []), "parameter 0.weight is trained, and own_opt"),
    (lambda model: ([torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())], []), "twice"),
], ids=["strange", "missing", "twice"])  # fmt: skip
def test_an_optimizer_of_other_parameters_is_refused(build: Callable[[Any], Built], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Worker(build, 1, torch.float32)


def test_buffers_are_the_version_s_whatever_the_optimizer_writes_there() -> None:
    """A worker that joins has only the version's."""
    def build(model: Any) -> Built:
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.register_step_post_hook(lambda *_: model[1].running_mean.add_(1.0))
        return [optimizer], []

    worker = Worker(build, 1, torch.float32)
    worker.step()
    assert not worker.model[1].running_mean.any()


def test_the_state_of_another_optimizer_is_refused() -> None:
    giver, taker = Worker(OPTIMIZERS["rmsprop"], 1, torch.float32), Worker(_scheduled, 1, torch.float32)
    with pytest.raises(ProtocolError, match="the state of other optimizers than these"):
        taker.take(giver.uploaded(), 0)


@pytest.mark.parametrize("text", ["optimizer.lr=0.1", "optimizer.type=sgd", "optimizer.lr.peak=0.1"])
def test_a_setting_of_the_job_s_optimizer_beside_one_of_the_script_is_refused(text: str) -> None:
    """It would have no effect, and nobody would know."""
    overrides = overrides_from(None, [text])
    with pytest.raises(ConfigError, match=rf"^{text.partition('=')[0]} is set, and workers step the script's own_opt"):
        with_own_optimizer(_config(), "mine", overrides)
    assert with_own_optimizer(_config(), "", overrides) == _config()
    assert with_own_optimizer(_config(), "mine", {"steps": 9}).own_optimizer == "mine"
