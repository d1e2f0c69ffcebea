"""A worker of `evaluation.py`: ``evaluation_member.py VARIANT FOLDER EVERY``. It writes when each step began there.

An accelerator is played: a step sleeps `STEP_S`, an evaluation `EVALUATION_S` in eight forward passes. The tensors, the
hooks, the bytes and the optimizer are real.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import rallypoint as rp

VARIANT, FOLDER, EVERY = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
STEPS, STEP_S, EVALUATION_S, PASSES = 160, 0.2, 1.0, 8

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))  # 2.1 M parameters, K = 8.4 MB
data = torch.utils.data.TensorDataset(torch.randn(256, 512))
began: dict[int, float] = {}
with rp.join() as job:
    run = job.train(model, data, replicas=2, batch=4, steps=STEPS, optimizer=rp.AdamW(lr=1e-4))
    if VARIANT != "none":

        @run.every(EVERY)
        def evaluate(step: int) -> dict[str, float]:
            """As long as an accelerator would take."""
            losses = []
            for part in data.tensors[0].chunk(PASSES):
                losses.append(float((model(part) - part).square().mean()))
                time.sleep(EVALUATION_S / PASSES)
            return {"val_loss": sum(losses) / len(losses)}

    for micro in run:
        began[micro.step] = time.monotonic()
        with micro:
            (x,) = micro.batch
            loss = (model(x) - x).square().mean()
            time.sleep(STEP_S)
            micro.backward(loss)
    if run.lead:
        (FOLDER / "began.json").write_text(json.dumps(sorted(began.items())))
