"""What a synchronous step of a GPT of 355 M costs between a GPU and its host: counted, with memory that nobody touches.

Copies only count here, so only Python's time can be measured. With ``-s`` the test prints what it has counted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rallypoint.codec.blocks import BF16
from rallypoint.codec.spec import Bf16
from rallypoint.config import resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.plan.tuning import shards_on_one_host
from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Mode, Sync
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.errors import ProtocolError
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import Credentials, Identity
from rallypoint.net.pool import words_of_memory
from rallypoint.net.transport import InprocTransport
from rallypoint.observe.trace import Tracer
from rallypoint.worker.exchange import exchange as module
from rallypoint.worker.exchange.exchange import Exchange, travels_as_bf16
from rallypoint.worker.exchange.links import ExchangeContext
from rallypoint.worker.exchange.locked import NarrowVector
from rallypoint.worker.sources.hooks import DeviceGradients, DeviceStaging
from rallypoint.worker.tensors import ModelTensors

WIDTH, LAYERS = 1024, 24
LAYER = [(3, 1), (3,), (1, 1), (1,), (4, 1), (4,), (1, 4), (1,), (1,), (1,), (1,), (1,)]  # in units of WIDTH
SHAPES = [(50304, WIDTH), (WIDTH, WIDTH), *([tuple(WIDTH * n for n in one) for one in LAYER] * LAYERS), *[(WIDTH,)] * 2]
SERVER, NUMBER = Member("s", "here", "nobody:1", 1), ViewNumber(1, 1)


class Counted(TorchDispatchMode):
    """A device whose copies are counted, and not made."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.nbytes = self.events = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.copy(args[1], args[1])
        return args[0]

    def copy(self, slot: torch.Tensor, values: torch.Tensor) -> None:
        self.copies += 1
        self.nbytes += slot.nbytes

    def see(self) -> None: ...

    def now(self) -> Callable[[], None]:
        self.events += 1
        return lambda: None

    mark = now


class Calls:
    """Counts calls of our own functions, in this thread and in those that start meanwhile."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call" and "/rallypoint/" in frame.f_code.co_filename


def began(exchange: Exchange) -> None:
    """The first version is here and installed, and this worker computes replica 0 of step 0."""
    view = View(
        NUMBER, NUMBER, (Member("w", "here", incarnation=1), Member("x", "here", incarnation=2)), (SERVER,),
        (Assignment(0, {"w": (0,)}),), {shard.index: "s" for shard in exchange.layout.shards}, {}, uploader="x",
        contributors={"w": (0,)},
    )  # fmt: skip
    exchange._links._context.credentials.given(view, {})
    exchange.adopt(view)
    exchange.arrivals.link_up(SERVER)
    narrow = isinstance(exchange.memory, NarrowVector)
    for shard in exchange.layout.shards:
        nbytes, codec = (2 * shard.words, BF16) if narrow else (shard.slot_bytes, 0)
        header = Header(Kind.VERSION, NUMBER, shard=shard.index, step=0, length=nbytes, codec=codec)
        assert exchange.arrivals.arriving(header, "s") is not None
        if narrow:
            exchange.arrivals.decode(shard.index, memoryview(b""))
        exchange.arrivals.landed(shard.index)
    assert exchange.next_action() == machine.Install(0)
    exchange.begin_install(0)
    exchange.installed(0)
    assert exchange.next_action() == machine.Compute(0, 0)
    exchange.replica.begin(0, 0)


class Step(NamedTuple):
    """What a step is counted to cost; `ms` of processor time, of all threads."""

    up: Counted
    down: Counted
    words: int
    calls: int
    ms: float


def step(hold: str, *, profiled: bool) -> Step:
    """Play a step: its version lands and is installed, its gradients are staged. No link sends or receives."""
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(shape)) for shape in SHAPES)
    words = sum(parameter.numel() for parameter in model)
    settings: dict[str, Any] = {"replicas": 1, "steps": 3, "nonfinite": "continue"}
    settings |= {"memory.hold": hold, "precision": hold, "network.shard_bytes": shards_on_one_host(4 * words, 1)}
    config = resolve(settings)
    tensors = ModelTensors(model, config)
    if hold == "bf16":
        for parameter in model:
            if parameter.dim() > 1:
                parameter.data = torch.empty(parameter.shape, dtype=torch.bfloat16)
    me = Credentials(Identity("worker", "w"))
    me.admitted(1, b"")
    context = ExchangeContext(me, InprocTransport(), Tracer("w"), lambda text: None)
    exchange = Exchange(tensors.layout, config, context, pinned=True, early=False, narrow=True)
    up, down, calls, failures = Counted(), Counted(), Calls(), list[BaseException]()
    if profiled:
        threading.setprofile(calls)
    staging = DeviceStaging(up, failures.append)
    source = DeviceGradients(tensors, exchange, staging)
    gradients = [torch.empty(parameter.shape, dtype=parameter.dtype) for parameter in model]
    before = time.process_time()
    sys.setprofile(calls if profiled else None)
    try:
        began(exchange)
        source.begin_backward(1.0, finite=lambda: True, last=True)
        for parameter, gradient in reversed(list(zip(model, gradients, strict=True))):
            parameter.grad = gradient
            for hook in parameter._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]
                hook(parameter)
        source.end_backward()
        source.end_replica(0)
        with down if profiled else nullcontext():
            vector = exchange.memory.whole() if isinstance(exchange.memory, NarrowVector) else exchange.buffer
            tensors.read_from(vector, exchange.buffer)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    ms = (time.process_time() - before) * 1e3
    source.remove()
    staging.close()
    exchange.finish()
    exchange.close()
    assert failures == []
    return Step(up, down, words, calls.count, ms)


@pytest.mark.parametrize("hold", ["fp32", "bf16"])
def test_a_step_of_355_m_parameters_has_few_copies_and_no_byte_too_many(
    monkeypatch: pytest.MonkeyPatch, hold: str
) -> None:
    monkeypatch.setattr(module, "pinned_words", words_of_memory)
    monkeypatch.setattr(NarrowVector, "take", lambda self, shard, payload: self._raw.discard(shard))
    up, down, words, calls, _ = step(hold, profiled=True)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, values, **how: into)
    ms = [step(hold, profiled=False).ms for _ in range(3)]
    print(f"\n{hold}: {up.copies} + {down.copies} copies, {up.events} events, {up.nbytes / 1e9:.2f} GB up and "
          f"{down.nbytes / 1e9:.2f} GB down, {calls:,} calls of Python, {min(ms):.0f} to {max(ms):.0f} ms")  # fmt: skip
    assert up.copies + down.copies == 2 * len(SHAPES) < 600
    assert up.events < 170  # two for each 16 MiB of gradients, and a few
    assert max(up.nbytes, down.nbytes) <= 1.1 * words * (2 if hold == "bf16" else 4)
    assert calls < 44_000  # of 340 shards of 4 MiB each: 60 to land, and 60 for its gradient


def test_a_version_of_which_some_shards_come_raw_is_whole() -> None:
    """A server sends the job's last version raw, and may have sent some of its shards before it knew of the end."""
    layout = build_layout([TensorSpec("w", (48,), "float32", 0), TensorSpec("b", (3,), "float32", -1)], shard_bytes=64)
    buffer, values = torch.zeros(layout.words), torch.linspace(-1.0, 1.0, 48)
    memory = NarrowVector(layout, buffer, torch.zeros(layout.words, dtype=torch.bfloat16))
    sent = {shard.index: values[shard.start : shard.stop] for shard in layout.shards if shard.role == "parameters"}

    def narrow(shard: int) -> None:
        memory.landing(shard)  # it is asked for before anybody looks at the codec
        memory.take(shard, memoryview(sent[shard].bfloat16().view(torch.uint8).numpy()))

    def raw(shard: int) -> None:
        memory.landing(shard)[:] = memoryview(sent[shard].view(torch.uint8).numpy()).cast("B")

    for shard in sent:
        narrow(shard)
    assert torch.equal(memory.whole()[:48], values.bfloat16())
    raw(1)
    expected = values.bfloat16().float()
    expected[layout.shards[1].start : layout.shards[1].stop] = sent[1]
    assert torch.equal(memory.whole()[:48], expected)
    narrow(1)
    assert memory.whole().dtype is torch.bfloat16
    with pytest.raises(ProtocolError, match="64 bytes for shard 0: 32 were expected"):
        memory.take(0, memoryview(bytes(64)))


@pytest.mark.parametrize(("sync", "narrow"), [
    (Sync(), True), (Sync(quorum=1), True), (BoundedStaleness(0), True), (BoundedStaleness(1), False),
    (Async(), False), (AllReduce(), False), (LocalSteps(2), False),
])  # fmt: skip
def test_bf16_crosses_where_servers_step_and_all_begin_from_one_version(sync: Mode, narrow: bool) -> None:
    """By what the mode is, not by its class: no staleness is `Sync`."""
    layout = build_layout([TensorSpec("w", (48,), "float32", 0)])
    config = resolve({"replicas": 2, "steps": 4, "sync": sync, "codec": Bf16(), "down": Bf16()})
    assert travels_as_bf16(config, layout) is narrow
    assert not travels_as_bf16(resolve({"replicas": 2, "steps": 4, "sync": sync, "codec": Bf16()}), layout)
