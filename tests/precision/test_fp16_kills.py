"""fp16 with forced overflows, and ten processes killed: the bytes and the scale are those of GradScaler."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from rallypoint.config import resolve
from rallypoint.core.optimizer import AdamW, LossScaling
from rallypoint.testing.reference import loss_scales
from rallypoint.worker.tensors import weights_hash
from test_survival import SCRIPT, STEPS, Cluster, cluster_of

pytestmark = [pytest.mark.programs, pytest.mark.slow]

OVERFLOWS = {3: 1, 4: 0, 10: 2, 17: 1}  # step -> the replica whose gradients overflow
SCALING = LossScaling(init_scale=1024.0, growth_interval=3)
FP16 = "precision='fp16', loss_scale=rp.LossScaling(init_scale=1024.0, growth_interval=3), clip=0.5,"
# The step in whose middle somebody of a role dies. Steps before it and after it overflow, or the scale grows there.
KILLS = {
    2: "worker", 3: "server", 4: "worker", 6: "coordinator", 8: "server", 10: "worker", 12: "server", 14: "coordinator",
    17: "server", 20: "worker",
}  # fmt: skip


class Fp16Cluster(Cluster):
    """Its gradients overflow at `OVERFLOWS`."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        script = SCRIPT.replace("clip=0.5,", FP16).replace(
            "            micro.backward(loss)",
            f"            if {OVERFLOWS}.get(micro.step) == micro.replica:\n"
            "                loss.register_hook(lambda gradient: gradient * 1e37)\n"
            "            micro.backward(loss)",
        )
        assert FP16 in script
        assert "1e37" in script
        self.script.write_text(script)


cluster = cluster_of(Fp16Cluster)


def reference() -> tuple[str, list[float]]:
    """The script of `Fp16Cluster` in plain PyTorch: the weights' hash, and the scale of each step."""
    settings = {"replicas": 3, "batch": 4, "steps": STEPS, "clip": 0.5, "network.shard_bytes": 256, "precision": "fp16"}
    config = resolve({**settings, "optimizer": AdamW(lr=1e-2), "loss_scale": SCALING})
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 30), torch.nn.Dropout(0.2), torch.nn.Linear(30, 3), torch.nn.Identity()
    )
    data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 3))
    calls = itertools.count()

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        step, replica = divmod(next(calls), 3)
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        if OVERFLOWS.get(step) == replica:
            loss.register_hook(lambda gradient: gradient * 1e37)  # type: ignore[no-untyped-call]
        return loss

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as a worker has
    try:
        scales = loss_scales(model, data, loss_of, config)
    finally:
        torch.set_num_threads(before)
    return weights_hash(model), scales


def test_ten_kills_change_no_byte_no_scale_and_no_skipped_step(cluster: Fp16Cluster) -> None:
    expected, scales = reference()
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2")
    for kills, (step, role) in enumerate(KILLS.items()):
        cluster.until_caught_up(step)
        cluster.until(lambda: cluster.members["exposed"] == 0)  # every shard is on both servers
        cluster.until(lambda role=role: any(name.startswith(role) for name in cluster.processes()))  # type: ignore[misc]
        victims = [process for name, process in sorted(cluster.processes().items()) if name.startswith(role)]
        victims[kills % len(victims)].kill()
        cluster.until(lambda kills=kills: cluster.output.count("was killed (SIGKILL)") > kills)  # type: ignore[misc]
    cluster.ends(expected)
    assert cluster.output.count("was killed (SIGKILL)") == len(KILLS)
    assert "Traceback" not in cluster.output
    skipped = {event["step"]: event["loss_scale"] for event in cluster.events("Skipped")}
    assert skipped == {step: scales[step + 1] for step in OVERFLOWS}
