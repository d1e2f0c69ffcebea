"""The worker of `streamed.py`: ``streamed_member.py VARIANT OUT LAYERS LIMIT``. It writes its figures to OUT."""

from __future__ import annotations

import hashlib
import json
import resource
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import rallypoint as rp
import rallypoint.launch.join  # what rp.join needs, before memory is measured
from cluster import memory_of_others
from rallypoint.core.order import derive_seed
from rallypoint.data.randomness import seeded
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.recipes.gpt_model import GPT, GPTConfig
from rallypoint.worker.sources.streamed import initialised

VARIANT, OUT, LAYERS, LIMIT = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
MODEL, STEPS = GPTConfig(layers=LAYERS, heads=16, width=1024, block=128), 5
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
moved: Counter[str] = Counter()


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random bytes: what is in them does not matter here."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.randint(0, 256, (MODEL.block + 1,), generator=torch.Generator().manual_seed(at))
        return window[:-1], window[1:]


def of_status(which: str) -> int:
    """VmRSS (now), VmHWM (at most) or VmData (what RLIMIT_DATA limits), in bytes."""
    return 1024 * int(next(line for line in STATUS.read_text().splitlines() if line.startswith(which)).split()[1])


def init(module: nn.Module) -> None:
    """As GPT-2."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build() -> GPT:
    """The model; with values where it is held: those that it would be given where it is streamed."""
    with torch.device("meta"):
        model = GPT(MODEL)
    if VARIANT != "local":
        return model
    values: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if module._parameters:
            with seeded(derive_seed(0, "init", name)):
                values |= {f"{name}.{leaf}": value for leaf, value in initialised(module, name, init).items()}
    model = model.to_empty(device="cpu")
    model.head.weight = model.tokens.weight
    model.load_state_dict({**values, "head.weight": values["tokens.weight"]})
    return model


def count_frames() -> None:
    """Count the bytes of what the worker sends and receives, by kind."""
    send, receive = Channel.send, Channel.receive_header

    def sent(self: Channel, header: Header, *args: Any, **kwargs: Any) -> None:
        moved[header.kind.name] += header.length
        send(self, header, *args, **kwargs)

    def received(self: Channel) -> Header:
        header = receive(self)
        moved[header.kind.name] += header.length
        return header

    Channel.send, Channel.receive_header = sent, received  # type: ignore[method-assign]


def main() -> None:
    """Train, and write the figures."""
    torch.set_num_threads(1)
    functional.linear(torch.ones(64, 64), torch.ones(64, 64))  # what torch loads at the first product
    count_frames()
    imported = of_status("VmRSS")
    CLEAR.write_text("5")  # VmHWM begins anew
    streamed: dict[str, Any] = {}
    if VARIANT != "local":
        threading.stack_size(1 << 20)  # the limit counts stacks as large as they may become
        most = of_status("VmData") + LIMIT * 10**6
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        streamed = {"memory.parameters": "streamed", "init": init}
    if VARIANT == "recompute":
        streamed["memory.recompute"] = "blocks"
    model, seconds, trained, digest = build(), list[float](), Counter[str](), hashlib.sha256()
    whole = 4 * sum(p.numel() for p in model.parameters())
    counts: list[tuple[int, int]] = [(0, 0)]  # uses of parameters, and those here in time, after each step
    with rp.join() as job:
        run = job.train(model, Text(), batch=1, steps=STEPS, optimizer=rp.AdamW(lr=1e-4), **streamed)
        assert isinstance(run, rp.Run)

        @run.every(STEPS)
        def evaluate(step: int) -> None:
            trained.update(moved)
            for name, parameter in model.named_parameters():
                digest.update(name.encode())
                digest.update(parameter.detach().numpy().data)

        others, began = 0, time.monotonic()
        for micro in run:
            with micro:
                micro.backward(model.loss(*micro.batch))
            seconds.append(time.monotonic() - began)
            others = memory_of_others()
            began = time.monotonic()
            if run._parts.streamed is not None:
                counts.append((run._parts.streamed.counts.uses, run._parts.streamed.counts.ready))
    first = counts[:2][-1]  # what follows it is counted
    versions = STEPS + 1  # that come whole: the first, and one for each step
    OUT.write_text(json.dumps({
        "K": whole, "peak": of_status("VmHWM") - others - imported, "step": statistics.median(seconds[2:]),
        "up": trained[Kind.PUSH.name] / STEPS,
        "down": trained[Kind.VERSION.name] / versions + trained[Kind.WORDS.name] / STEPS,
        "uses": counts[-1][0] - first[0], "ready": counts[-1][1] - first[1],
        "sha256": digest.hexdigest(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
