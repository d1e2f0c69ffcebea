"""A small job that pauses in the middle, for runs on several machines; and how far such a run has come."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from rallypoint.testing.programs import run_program

STEPS, AT = 60, 10  # AT: from this step on it is slow, until the gate is open
SCRIPT = f"""
import pathlib, sys, time, torch, rallypoint as rp
from rallypoint.worker.tensors import weights_hash
gate = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Dropout(0.2), torch.nn.Linear(30, 3))
data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 3))
with rp.join() as job:
    run = job.train(model, data, replicas=4, batch=4, steps={STEPS}, clip=0.5, optimizer=rp.AdamW(lr=1e-2))
    for micro in run:
        with micro:
            if micro.step >= {AT} and not gate.exists():
                time.sleep(0.5)
            micro.backward(torch.nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1]))
    if run.lead:
        print("sha256", weights_hash(model), flush=True)
"""


def steps_done(run: Path) -> int:
    """The last step that the coordinator of the run in this folder has counted as done; -1 if there is none."""
    log = run / "events.jsonl"
    if not log.exists():
        return -1
    events = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    return max((event["step"] for event in events if event["type"] == "StepDone"), default=-1)


def hash_of(text: str) -> str:
    """The hash of the model that the last worker has printed."""
    return re.findall(r"sha256 (\w+)", text)[-1]


def undisturbed_hash(folder: Path) -> str:
    """The hash of the job in one process."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "gate").touch()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    status, text = run_program(["train.py", "gate"], folder / "output", env=env, cwd=folder)
    assert status == 0, text
    return hash_of(text)
