"""A job with a delay in which one worker is late on purpose: what the other one does meanwhile can be told for sure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs import _gpt, _gpt_loss

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.worker.tensors import weights_hash
from support.beside import until
from support.reference_local import train_local_reference
from support.rewinds import cut_the_link

SETTINGS: dict[str, Any] = {
    "replicas": 2, "batch": 4, "steps": 12, "seed": 5, "network.shard_bytes": 16 << 10, "clip": 0.5,
    "optimizer": rp.AdamW(lr=3e-3), "sync": rp.LocalSteps(steps=4, delay=2),
}  # fmt: skip
LATE_AT, AHEAD = 7, (8, 9)  # replica 1's last step of its second round; what replica 0 may make of the third one


def reference() -> str:
    """The weights' hash of plain PyTorch in this process."""
    model, data = _gpt()
    train_local_reference(model, data, _gpt_loss, resolve(SETTINGS))
    return weights_hash(model)


def train_beside_a_late_worker(job: rp.Job, folder: str, cut: bool) -> tuple[str, list[tuple[int, int]], bool]:
    """Replica 1 stands still until replica 0 has gone ahead (with `cut`: and has lost its link to the server there, and
    computes the round before once more): the hash, the (replica, step)s made here, and was replica 0 further ahead?"""
    model, data = _gpt()
    go, further = Path(folder, "go"), Path(folder, "further")
    made: list[tuple[int, int]] = []
    too_far = False
    for micro in job.train(model, data, **SETTINGS):
        with micro:
            made.append((micro.replica, micro.step))
            match micro.replica, micro.step:
                case 1, step if step == LATE_AT:
                    until(go.exists)
                    too_far = further.exists()
                case 0, step if step == AHEAD[-1] + 1:
                    further.touch()
                case 0, step if step == AHEAD[-1]:
                    if cut and not go.exists():
                        cut_the_link(job, 1)
                    else:
                        go.touch()
                case 0, step if cut and made.count((0, step)) == 2:
                    go.touch()
            micro.backward(_gpt_loss(model, micro.batch))
    return weights_hash(model), made, too_far
