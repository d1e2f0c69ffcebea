"""Gradients on their way from a device, on a device that is played: its copies happen when somebody waits for them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rallypoint.codec.spec import Bf16
from rallypoint.config import resolve
from rallypoint.core.optimizer import AdamW
from rallypoint.core.policy import AllReduce, BoundedStaleness, LocalSteps
from rallypoint.core.worker.aligned import OverlapMachine
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.net.pool import words_of_memory
from rallypoint.worker.exchange import arrivals, exchange, locked
from rallypoint.worker.exchange.locked import Rewound, WholeVector, memory_of
from rallypoint.worker.loop import session
from rallypoint.worker.sources.hooks import CudaCopies, DeviceGradients, DeviceStaging, Staging
from rallypoint.worker.tensors import ModelTensors, weights_hash

PATIENCE_S = 30.0
HELD = {"precision": "bf16", "memory.hold": "bf16"}
DATA = torch.utils.data.TensorDataset(
    torch.randn(64, 6, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3
)


class LateCopies:
    """A device whose copies are made as late as a device may: when a mark is waited for. A slot is NaN until then, so
    that whoever reads it too early is noticed; values that were freed before could not be copied."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, Callable[[], torch.Tensor | None]]] = []
        self.made = self.given = self.behind = self.seen = 0
        self._lock = threading.Lock()

    def see(self) -> None:
        self.seen += 1

    def now(self) -> Callable[[], None]:
        self.given += 1
        given = self.given
        return lambda: setattr(self, "behind", max(self.behind, given))

    def copy(self, slot: torch.Tensor, values: torch.Tensor) -> None:
        assert self.behind, "a copy that waits for nothing that the device computes"
        slot.fill_(torch.nan)
        self.copies.append((slot, weakref.ref(values)))  # who stages it holds it

    def mark(self) -> Callable[[], None]:
        upto = len(self.copies)
        return lambda: self._make(upto)

    @torch.no_grad()
    def _make(self, upto: int) -> None:
        with self._lock:
            while self.made < upto:
                slot, values = self.copies[self.made]
                there = values()
                assert there is not None, "a gradient was freed before it was copied"
                slot.copy_(there)
                self.made += 1


def staging(copies: LateCopies) -> tuple[DeviceStaging, list[BaseException]]:
    failures: list[BaseException] = []
    return DeviceStaging(copies, failures.append), failures


def test_a_gradient_is_held_until_it_is_copied_and_no_longer() -> None:
    copies = LateCopies()
    staged, failures = staging(copies)
    slot, gradient = torch.zeros(4), torch.arange(4.0)
    held = weakref.ref(gradient)
    staged.write(slot, gradient, add=False)
    del gradient
    gc.collect()
    assert held() is not None
    staged.drain()
    staged.close()
    gc.collect()
    assert (failures, slot.tolist(), held()) == ([], [0.0, 1.0, 2.0, 3.0], None)


def test_what_comes_after_a_copy_runs_in_order_and_an_error_of_it_is_reported() -> None:
    copies, order, over = LateCopies(), [], threading.Event()
    staged, failures = staging(copies)
    slots = [torch.zeros(2) for _ in range(3)]
    kept = [torch.full((2,), float(number)) for number in range(3)]
    for number, slot in enumerate(slots):
        staged.write(slot, kept[number], add=False)
        staged.then(lambda number=number, slot=slot: order.append((number, slot[0].item())))  # type: ignore[misc]
    staged.then(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    staged.then(over.set)
    staged.drain()
    staged.close()
    assert order == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [type(error) for error in failures] == [ZeroDivisionError]
    assert not over.is_set()


def test_a_device_that_hangs_keeps_nobody_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    class Hangs(LateCopies):
        def mark(self) -> Callable[[], None]:
            return lambda: [go_on.wait(PATIENCE_S)].clear()

    monkeypatch.setattr("rallypoint.worker.sources.hooks._CLOSES_WITHIN_S", 0.1)
    staged, _ = staging(Hangs())
    staged.then(lambda: None)
    staged.close()  # returns
    go_on.set()
    staged._thread.join(PATIENCE_S)
    assert not staged._thread.is_alive()


def test_a_loss_that_is_on_the_host_already_needs_no_stream() -> None:
    """`criterion(model(x).cpu(), y)`, or a number that a wrapped optimizer was told. Nor may it take the stream of the
    model's GPU if it is on another one: that stream does not wait for it."""
    slot, copies = torch.zeros((), dtype=torch.float64), object.__new__(CudaCopies)
    copies._device = torch.device("cuda", 0)
    copies.copy(slot, torch.tensor(1.5))
    assert slot.item() == 1.5


def test_a_copy_leaves_no_trace_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread is on GPU 0 at first. ``torch.cuda.stream`` goes back there by cudaSetDevice, and takes memory of it."""
    entered, copies = list[Any](), object.__new__(CudaCopies)
    copies._device, copies._stream = torch.device("cuda", 1), "side"  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered.append(stream) or nullcontext())
    slot: Any = SimpleNamespace(copy_=lambda values, non_blocking: entered.append(values))
    values: Any = SimpleNamespace(device=copies._device)
    copies.copy(slot, values)
    assert entered == [copies._device, "side", values]


def test_what_an_error_leaves_behind_holds_no_gradient() -> None:
    """Neither what was written and has no `then`, nor what came after the error."""
    staged, failures = staging(LateCopies())
    gradients = [torch.ones(2) for _ in range(3)]
    staged.write(torch.zeros(2), gradients[0], add=False)
    staged.then(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    staged._thread.join(PATIENCE_S)
    staged.write(torch.zeros(2), gradients[1], add=False)
    staged.then(lambda: None)
    staged.write(torch.zeros(2), gradients[2], add=False)
    staged.close()
    left = [weakref.ref(gradient) for gradient in gradients]
    del gradients
    gc.collect()
    assert [found() for found in left] == [None] * 3
    assert [type(error) for error in failures] == [ZeroDivisionError]


# ---- a replica's gradients, and a server that is slow or gone ----


class Replica:
    """What the hooks use of `Exchange.replica`. Slots may be written once `free` is set, unless a view says `stale`."""

    def __init__(self) -> None:
        self.free, self.stale, self.sent = threading.Event(), False, list[int]()
        self.contributions = SimpleNamespace(active=False)

    def claim(self, shard: int) -> bool:
        assert self.free.wait(PATIENCE_S)
        if self.stale:
            raise Rewound
        return True

    def filled(self, shard: int) -> None:
        self.sent.append(shard)

    def buffers_of(self, replica: int) -> list[Any]:
        return []

    def weigh(self, weight: float, *, finite: bool) -> None: ...
    def computed(self) -> None: ...
    def abandoned(self) -> None: ...


@pytest.fixture
def computed() -> Iterator[tuple[DeviceGradients, Replica, torch.nn.Module, LateCopies]]:
    """A replica whose backward pass is over, though no slot is free yet."""
    model, copies, replica = build(), LateCopies(), Replica()
    tensors = ModelTensors(model, resolve({"replicas": 1, "steps": 1, "network.shard_bytes": 256}))
    buffer = torch.full((tensors.layout.words,), torch.nan)
    plane: Any = SimpleNamespace(
        layout=tensors.layout, memory=WholeVector(tensors.layout, buffer), replica=replica, buffer=buffer,
        check=lambda stale: None, step=0,
    )  # fmt: skip
    staged, failures = staging(copies)
    source = DeviceGradients(tensors, plane, staged)
    source.begin_backward(1.0, finite=lambda: True, last=True)
    model(DATA.tensors[0]).square().mean().backward()  # returns: hooks only queue
    source.end_backward()
    assert not replica.free.is_set()
    yield source, replica, model, copies
    replica.free.set()
    source.remove()
    staged.close()
    assert failures == []


def test_no_hook_waits_for_a_slot_so_signals_are_seen(computed: Any) -> None:
    source, replica, _, copies = computed
    threading.Timer(0.05, replica.free.set).start()
    source.end_replica(0)  # the main thread waits here, where it handles signals
    shards = [shard for shard in source._exchange.layout.shards if shard.role == "parameters"]
    assert sorted(replica.sent) == [shard.index for shard in shards]
    assert len(copies.copies) == 6 < len(shards)  # one for each parameter, however many shards it lies in
    assert copies.seen == 6  # they may be of several streams, and of each the copies are behind
    assert not source._exchange.buffer[: shards[0].stop].isnan().any()


def test_the_staging_s_thread_computes_nothing(computed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy waits for what its own stream does: so gradients that lie in another order come to it in order."""
    source, _, model, copies = computed
    source.abandon()
    for parameter in model.parameters():
        parameter.data = parameter.data.t().contiguous().t()  # autograd keeps to that order
    monkeypatch.setattr(source._exchange.replica, "claim", lambda shard: bool(shard % 2))  # others go nowhere
    reshape, made = torch.Tensor.reshape, list[str]()

    def noted(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        shaped = reshape(tensor, *shape)
        if shaped.data_ptr() != tensor.data_ptr():
            made.append(threading.current_thread().name)
        return shaped

    monkeypatch.setattr(torch.Tensor, "reshape", noted)
    source.begin_backward(1.0, finite=lambda: True, last=True)
    model(DATA.tensors[0]).square().mean().backward()
    source.end_backward()
    source.end_replica(0)
    assert (made, bool(copies.copies)) == ([], True)


def test_a_replica_that_is_stale_meanwhile_unwinds_on_the_main_thread(computed: Any) -> None:
    source, replica, _, copies = computed
    replica.stale = True
    replica.free.set()
    with pytest.raises(Rewound):
        source.end_replica(0)
    source.abandon()
    assert (replica.sent, copies.copies) == ([], [])


def test_whoever_waits_for_a_copy_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own default keeps a core busy."""
    made: list[dict[str, bool]] = []

    class Event:
        def __init__(self, **how: bool) -> None:
            made.append(how)

        def record(self, stream: object) -> None: ...
        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "Event", Event)
    copies = object.__new__(CudaCopies)
    copies._stream = None  # type: ignore[assignment]
    copies.mark()()
    assert made == [{"blocking": True}]


def test_a_copy_to_another_gpu_than_the_one_that_is_waited_for_is_made_at_once() -> None:
    """A buffer may be there; parameters may not."""
    copied, tensors, gpus = list[tuple[int, bool]](), object.__new__(ModelTensors), range(2)

    def on(gpu: int) -> Any:
        def copy(values: torch.Tensor, non_blocking: bool) -> None:
            copied.append((gpu, non_blocking))

        tensor = SimpleNamespace(device=torch.device("cuda", gpu), copy_=copy)
        return SimpleNamespace(tensor=tensor, of=lambda vector: vector)

    tensors.device, tensors.buffers = torch.device("cuda", 0), [on(gpu) for gpu in gpus]
    tensors.read_buffers_from(torch.zeros(1))
    assert copied == [(0, True), (1, False)]


# ---- whole jobs ----


class LateInstalls(TorchFunctionMode):
    """The main thread's copies between host and device, of versions and of buffers. They are made as late as a device
    may: when a mark is waited for. Until then there is NaN."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.made = self.marks = 0
        installed = exchange.Exchange.installed

        def checked(of: exchange.Exchange, version: int) -> Any:
            slots = {part.untyped_storage().data_ptr() for part in (of.buffer, of.memory.part(0)[0])}
            late = [values for _, values in self.copies[self.made :] if values.untyped_storage().data_ptr() in slots]
            assert not late, "slots are free, and their copies are not made"
            return installed(of, version)

        patch.setattr(ModelTensors, "mark", lambda tensors: self._mark())
        patch.setattr(exchange.Exchange, "installed", checked)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not kwargs.get("non_blocking"):
            return func(*args, **kwargs)
        if func is torch.Tensor.to:  # what the device does next sees it: its stream keeps the order
            self.copies.append((torch.empty_like(args[0]), args[0]))
            return func(*args, **kwargs).clone()
        assert func is torch.Tensor.copy_
        self.copies.append(args)
        return args[0].fill_(torch.nan if args[0].is_floating_point() else -1)

    def _mark(self) -> Callable[[], None]:
        upto, self.marks = len(self.copies), self.marks + 1
        return lambda: self._make(upto)

    @torch.no_grad()
    def _make(self, upto: int) -> None:
        for into, values in self.copies[self.made : upto]:
            into.copy_(values)
        self.made = max(self.made, upto)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.GELU(), torch.nn.Linear(40, 3)
    )


def play_on(copies: LateCopies | None, patch: pytest.MonkeyPatch) -> None:
    """Jobs' models are on this device; None: on the CPU."""
    open_exchange = session.Job.open_exchange

    def of(device: torch.device, failed: Callable[[BaseException], None]) -> Any:
        return Staging() if copies is None else DeviceStaging(copies, failed)

    def pinned(job: session.Job, record: Any, config: Any, **how: Any) -> Any:
        opened = open_exchange(job, record, config, **{**how, "pinned": copies is not None})
        if copies is not None:  # a forward pass that began early would copy on the script's streams
            assert not isinstance(opened._shell.machine, OverlapMachine)
        return opened

    patch.setattr(session, "staging_for", of)
    patch.setattr(session.Job, "open_exchange", pinned)
    patch.setattr(exchange, "pinned_words", words_of_memory)
    for module in (locked, arrivals):
        patch.setattr(module, "memory_of", lambda words, *, pinned=False: memory_of(words))


def trained(monkeypatch: pytest.MonkeyPatch, copies: LateCopies | None, stop: int = -1, **settings: Any) -> str:
    """The hash of a model that a job has trained, which is stopped in step `stop`. `copies`: on this device."""
    model = build()
    with monkeypatch.context() as patch:
        play_on(copies, patch)
        with nullcontext() if copies is None else LateInstalls(patch) as late:
            _train(model, stop, settings)
    if late is not None:  # one mark for a version, and one for all buffers that replica 0 sends
        sent = {values.data_ptr() for _, values in late.copies}
        assert sent.issuperset(buffer.data_ptr() for buffer in model.buffers())
        assert late.marks <= 2 * 6 + 1
    return weights_hash(model)


def _train(model: torch.nn.Module, stop: int, settings: dict[str, Any]) -> list[float]:
    losses = list[float]()
    with EmbeddedJob(servers=2) as job:
        run = job.train(model, DATA, **{
            "replicas": 3, "batch": 4, "steps": 6, "optimizer": AdamW(lr=1e-2), "network.shard_bytes": 256, **settings,
        })  # fmt: skip
        for micro in run:
            with micro:
                x, y = micro.batch
                micro.backward(loss := F.cross_entropy(model(x).float(), y))
            losses.append(loss.item())
            if micro.step == stop:
                run.stop()
    return losses


@pytest.mark.some("{}", "*hold*accumulate*", "*codec*", "*LocalSteps*")
@pytest.mark.parametrize("settings", [
    {}, {"clip": 1.0}, {"accumulate": 4, "batch": 8}, {"nonfinite": "skip"}, HELD,
    {**HELD, "accumulate": 4, "batch": 8}, {**HELD, "stop": 3}, {"codec": Bf16(), "down": Bf16(), "clip": 0.1},
    {**HELD, "sync": BoundedStaleness(0)}, {"sync": AllReduce(), "clip": 0.1}, {"sync": LocalSteps(2)},
], ids=str)  # fmt: skip
def test_a_device_that_copies_late_changes_no_byte(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """Of bf16 parameters too: autograd would add up micro-batches' gradients in bf16, a slot in fp32. Where bf16
    travels, it is bf16 that is copied; but the last version comes raw."""
    copies = LateCopies()
    assert trained(monkeypatch, copies, **settings) == trained(monkeypatch, None, **settings)
    assert copies.made == len(copies.copies) > 0
    types = {slot.dtype for slot, _ in copies.copies} - {torch.float64}  # (losses)
    assert types == {torch.bfloat16 if settings.get("codec") or "memory.hold" in settings else torch.float32}


def test_streamed_parameters_have_the_same_gradients_on_a_device_that_copies_late(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of a slot is another gradient's when it was sent."""
    losses = []
    for copies in (device := LateCopies(), None):
        with monkeypatch.context() as patch:
            play_on(copies, patch)
            losses.append(_train(build(), -1, {"memory.parameters": "streamed", "memory.prefetch_bytes": 1024}))
    assert losses[0] == losses[1]
    assert device.made == len(device.copies) > 6 * 3 * 6


def test_an_rnn_whose_parameters_are_cast_is_one_piece_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN wants that; on a CPU torch does nothing then."""
    model = torch.nn.ModuleDict({"rnn": torch.nn.LSTM(4, 4), "out": torch.nn.Linear(4, 3)})
    seen: list[torch.dtype] = []
    monkeypatch.setattr(torch.nn.LSTM, "flatten_parameters", lambda rnn: seen.append(rnn.weight_hh_l0.dtype))
    # oneDNN has no LSTM in bf16 for processors without AVX-512
    with torch.backends.mkldnn.flags(enabled=False), EmbeddedJob() as job:
        for micro in job.train(model, DATA, replicas=1, batch=4, steps=2, optimizer=AdamW(lr=1e-2), **HELD):
            with micro:
                micro.backward(model["out"](model["rnn"](micro.batch[0][:, None, :4])[0]).float().sum())
    assert seen == [torch.bfloat16, torch.float32]
