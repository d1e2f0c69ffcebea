"""A job whose workers are groups of ranks of a given shape: ``shapes_job.py fsdp|tp|pp|tp-pp|fsdp-tp|one OUT [STOP]``.

Each rank writes OUT/pid-WORKER-RANK when it has begun, and what it holds at the end to OUT/WORKER-RANK. Before step
HELD_AT it waits until there is OUT/open. In step STOP each worker's last rank stops the job.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rallypoint as rp

IN, WIDTH, OUT, SAMPLES = 12, 22, 6, 64  # 11 rows a rank: not a multiple of anything
HELD_AT = 4
ACCUMULATE, PIECES = 2, 2  # micro-batches of a replica; what a pipeline's schedule cuts each into
MESHES = {
    "fsdp": ((2,), ("dp",)), "tp": ((2,), ("tp",)), "pp": ((2,), ("pp",)), "tp-pp": ((2, 2), ("pp", "tp")),
    "fsdp-tp": ((2, 2), ("dp", "tp")),
}  # fmt: skip


class Block(torch.nn.Module):
    """Two linear layers, the first of which tensor parallelism cuts by rows and the second by columns."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(inside, WIDTH)
        self.down = torch.nn.Linear(WIDTH, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(torch.nn.Module):
    """Two blocks and a norm between them; a stage of a pipeline has some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first: torch.nn.Module | None = Block(IN, IN)
        self.norm: torch.nn.Module | None = torch.nn.LayerNorm(IN)
        self.second: torch.nn.Module | None = Block(IN, OUT)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, self.norm, self.second):
            x = x if part is None else part(x)
        return x


def built(shape: str, mesh: DeviceMesh | None) -> Net:
    """Build the model from one seed, and spread it over the ranks."""
    torch.manual_seed(7)
    net = Net()
    if mesh is None:
        return net
    if "pp" in shape:
        del net.seen  # the stages would each have one
        if mesh["pp"].get_local_rank() == 0:
            net.norm = net.second = None
        else:
            net.first = None
    if "tp" in shape:
        for part in (net.first, net.second):
            if part is not None:
                parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "fsdp" in shape:
        for part in (net.first, net.norm, net.second, net):
            fully_shard(part, mesh=mesh["dp"])
    return net


def fingerprint(net: torch.nn.Module, of: Callable[[DTensor], torch.Tensor] = DTensor.to_local) -> str:
    """Hash the values that this rank holds."""
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        values = of(tensor) if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode() + values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def whole(net: torch.nn.Module) -> str:
    """Hash the whole model's values; all ranks call it."""
    return fingerprint(net, DTensor.full_tensor)


def main(shape: str, out: Path, stop: int | None = None) -> None:
    """Train, and write what this rank holds at the end, and a hash of the whole model at the beginning and the end.

    Of the shape "any" is the one that the number of ranks says.
    """
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, IN, generator=generator), torch.randn(SAMPLES, OUT, generator=generator)
    )
    with rp.join() as job:
        (out / f"pid-{job.id}-{job.rank}").write_text(str(os.getpid()))
        shape = {1: "one", 2: "fsdp", 4: "fsdp-tp"}[job.ranks] if shape == "any" else shape
        mesh = None
        if job.ranks > 1:
            sizes, names = MESHES[shape]
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        net = built(shape, mesh)
        split = "dp" if "fsdp" in shape else ()
        run = job.train(net, data, replicas=4, batch=8, accumulate=ACCUMULATE, steps=12, seed=3,
                        optimizer=rp.AdamW(lr=1e-2), parallel=rp.Parallel(mesh, split=split))  # fmt: skip
        loss_fn = torch.nn.MSELoss()
        schedule = None
        if mesh is not None and "pp" in shape:
            pp = mesh["pp"]
            stage = PipelineStage(net, pp.get_local_rank(), pp.size(), torch.device("cpu"), group=pp.get_group())
            # (its own scaling would divide what the micro-batch before has left in .grad once more)
            part = lambda out, y: loss_fn(out, y) / (PIECES * ACCUMULATE)  # noqa: E731
            schedule = Schedule1F1B(stage, n_microbatches=PIECES, loss_fn=part, scale_grads=False)

        @run.every(6)
        def total(step: int) -> dict[str, float] | None:
            if schedule is not None:
                return None
            value = sum((p.full_tensor() if isinstance(p, DTensor) else p).abs().sum() for p in net.parameters())
            return {"total": float(value)}

        begun = False
        for micro in run:
            if not begun and "pp" not in shape:
                (out / f"whole-{job.ranks}-{micro.step}").write_text(whole(net))
            begun = True
            while micro.step >= HELD_AT and not (out / "open").exists():
                time.sleep(0.005)
            if micro.step == stop and job.rank == job.ranks - 1:
                run.stop("enough")
            with micro:
                x, y = micro.batch
                if schedule is None:
                    micro.backward(loss_fn(net(x), y))
                    continue
                losses: list[torch.Tensor] = []
                if mesh["pp"].get_local_rank() == 0:
                    schedule.step(x)
                else:
                    schedule.step(target=y, losses=losses)
                micro.computed(torch.stack(losses).sum() * ACCUMULATE if losses else None)
        (out / f"{job.id}-{job.rank}").write_text(fingerprint(net))
        if "pp" not in shape:
            (out / f"whole-{job.ranks}-end").write_text(whole(net))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
