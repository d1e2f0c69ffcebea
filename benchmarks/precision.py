"""What each precision costs and buys: validation loss and bytes per step of the GPT recipe's model.

    python benchmarks/precision.py --json precision.json             # fp32, bf16, bf16 held: 200 steps each
    python benchmarks/precision.py --steps 20 --settings fp32,fp16   # a quick look (fp16 is slow on a CPU)

Every row has the same model, first weights, samples and order of samples: the tiny GPT of `rallypoint train gpt`, on
Python's standard library. Two workers with one replica each, one server. Bytes are payloads of frames on one worker's
link. Seconds say little about GPUs: a CPU may be slower in bf16 than in fp32.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from rich.console import Console
from rich.table import Table

import rallypoint as rp
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.recipes.gpt import PRESETS, VALIDATION_BYTES, validation_loss
from rallypoint.recipes.gpt_model import GPT
from rallypoint.recipes.text import load_text
from rallypoint.testing.processes import ProcessCluster

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "held": {"precision": "bf16", "memory.hold": "bf16"},
    "fp16": {"precision": "fp16"},
}


class Row(msgspec.Struct):
    """What one setting gave."""

    setting: str
    loss: float
    bytes_up: float
    bytes_down: float
    seconds: float


def train(job: rp.Job, name: str, steps: int, lr: float, seed: int) -> Row:
    """Train on one worker; the bytes are those of one step, without the first and the last version."""
    preset = PRESETS["tiny"]
    text, validation_text = load_text(None, block=preset.model.block)
    windows = validation_text.fixed_windows(VALIDATION_BYTES // preset.model.block)
    torch.manual_seed(seed)
    model = GPT(preset.model)
    moved = _count_bytes(steps)
    run = job.train(
        model, text, replicas=preset.replicas, batch=preset.batch, steps=steps, seed=seed, clip=preset.clip,
        optimizer=rp.AdamW(lr=rp.cosine(lr, warmup=preset.warmup), betas=(0.9, 0.95), weight_decay=preset.weight_decay),
        **SETTINGS[name],
    )  # fmt: skip
    began = time.monotonic()
    for micro in run:
        with micro:
            tokens, targets = micro.batch
            micro.backward(model.loss(tokens, targets))
    seconds = time.monotonic() - began
    loss = validation_loss(model.eval(), windows)
    return Row(name, loss, moved[Kind.PUSH] / steps, moved[Kind.VERSION] / (steps - 1), seconds / steps)


def _count_bytes(steps: int) -> dict[Kind, int]:
    """The payloads of contributions, and of versions 1 to steps - 1, of this process."""
    moved = {Kind.PUSH: 0, Kind.VERSION: 0}
    send, receive = Channel.send, Channel.receive_header

    def counted_send(self: Channel, header: Header, *args: Any, **kwargs: Any) -> None:
        if header.kind is Kind.PUSH:
            moved[Kind.PUSH] += header.length
        send(self, header, *args, **kwargs)

    def counted_receive(self: Channel) -> Header:
        header = receive(self)
        if header.kind is Kind.VERSION and 0 < header.step < steps:
            moved[Kind.VERSION] += header.length
        return header

    setattr(Channel, "send", counted_send)  # noqa: B010 - this process is only this job's
    setattr(Channel, "receive_header", counted_receive)  # noqa: B010
    return moved


def main(
    settings: Annotated[str, typer.Option(help=f"Some of {', '.join(SETTINGS)}.")] = "fp32,bf16,held",
    steps: Annotated[int, typer.Option(min=2)] = 200,
    lr: Annotated[float, typer.Option(help="The highest rate. The recipe's 4e-3 makes runs differ by chance.")] = 1e-3,
    seed: Annotated[int, typer.Option()] = 1234,
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
) -> None:
    """Train the tiny GPT with each setting, and print a table."""
    rows = []
    table = Table("setting", "validation loss", "against fp32", "MB up a step", "MB down a step", "s a step")
    for name in settings.split(","):
        with ProcessCluster(workers=2, servers=1, timeout=3600.0) as cluster:
            row, _ = cluster.run(train, name, steps, lr, seed)
        rows.append(row)
        against = f"{100 * (row.loss / rows[0].loss - 1):+.2f} %" if rows[0].setting == "fp32" else ""
        table.add_row(
            name, f"{row.loss:.4f}", against, f"{row.bytes_up / 1e6:.3f}", f"{row.bytes_down / 1e6:.3f}",
            f"{row.seconds:.2f}",
        )  # fmt: skip
        print(f"{name}: {row.loss:.4f}", flush=True)
    Console().print(table)
    if json is not None:
        json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    typer.run(main)
