"""A small job that waits at a step until a gate is open, and what it prints at its end: for tests of launchers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil

import rallypoint
from support.beside import until
from support.programs import run_program

PATIENCE_S = 200.0
STEPS, AT = 60, 10  # AT: the first step that is not computed before the gate is open
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
            while micro.step >= {AT} and not gate.exists():
                time.sleep(0.005)
                model[0].weight.sum()
            micro.backward(torch.nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1]))
    if run.lead:
        print("sha256", weights_hash(model), flush=True)
"""
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "PYTHONPATH": str(Path(rallypoint.__file__).parents[1])}


def alone(folder: Path) -> str:
    """The hash of the job in one process."""
    (folder / "train.py").write_text(SCRIPT)
    status, text = run_program(["train.py", str(folder)], folder / "output", env=ENV, cwd=folder)
    assert status == 0, text
    return hash_of(text)


def hash_of(text: str) -> str:
    """The hash that the job has printed last."""
    return re.findall(r"sha256 (\w+)", text)[-1]


def steps_done(folder: Path) -> int:
    """The last step that the coordinator of a run's folder has counted as done; -1: none."""
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return max((event["step"] for event in events if event["type"] == "StepDone"), default=-1)


def wait_until(happened: Callable[[], bool], running: Callable[[], bool], said: Callable[[], str]) -> None:
    """Wait until something has happened. AssertionError with what was said, if nothing runs any more, or it is late."""
    until(happened, said, running=running, within=PATIENCE_S, pause=0.05)


def named(root: psutil.Process) -> dict[str, psutil.Process]:
    """The processes of a run below one process, by their names."""
    found = {}
    for process in root.children(recursive=True):
        try:
            found[process.environ().get("RALLYPOINT_ID", "")] = process
        except psutil.Error:
            continue  # it has just ended
    return {name: process for name, process in found.items() if name}
