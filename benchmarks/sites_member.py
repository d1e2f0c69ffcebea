"""One worker of `benchmarks/sites.py`: trains a small GPT, notes when each step begins, and how good the model was.

The notes are written line by line, for whoever started it looks at them to cut a site off in the midst of the run.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

import rallypoint as rp
from cluster import finish
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.recipes.gpt_model import GPT, GPTConfig
from rallypoint.recipes.text import load_text
from strategies_member import Point, Recorder
from strategies_workloads import Pace

_TEXT_BYTES = 4 << 20
_VALIDATION_WINDOWS = 128


class Task(msgspec.Struct, frozen=True):
    """What to train: `settings` are those of `job.train`, `seconds` is how long a step's computing takes.

    `notes` is the file of steps that begin; every `every` steps a copy of the model is kept (0: none).
    """

    rank: int
    width: int
    layers: int
    settings: dict[str, Any]
    seconds: float
    every: int
    notes: str


class Result(msgspec.Struct, frozen=True):
    """When the first step began and the last ended (seconds, monotonic); validation losses (nats) of copies; processor
    seconds of a step."""

    began: float
    ended: float
    curve: list[Point]
    computing: float


def shape(width: int, layers: int) -> GPTConfig:
    """The model's."""
    return GPTConfig(layers=layers, heads=4, width=width, block=64)


def main() -> None:
    """Do the task in argv[1]."""
    hold_lifeline()
    task = msgspec.json.decode(sys.argv[1], type=Task)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = shape(task.width, task.layers)
    data, validation = load_text(block=config.block, budget=_TEXT_BYTES)
    torch.manual_seed(0)
    model = GPT(config)
    pace = Pace(task.seconds, model, [torch.stack(parts) for parts in zip(*(data[i] for i in range(4)), strict=True)])
    recorder = Recorder(model, task.every)
    with rp.join() as job, Path(task.notes).open("w", buffering=1) as notes:
        for micro in job.train(model, data, **task.settings):
            recorder.begin(micro.step)
            print(time.monotonic(), micro.step, micro.replica, file=notes)
            with micro:
                pace.keep()
                micro.backward(model.loss(*micro.batch))
        recorder.end()
    found = recorder.result(pace.computing, validation.fixed_windows(_VALIDATION_WINDOWS))
    finish(Result(found.began, found.ended, found.curve, pace.computing))


if __name__ == "__main__":
    main()
