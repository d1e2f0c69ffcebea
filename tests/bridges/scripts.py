"""What workers of the bridges' tests run, beside plain PyTorch that adds the replicas' gradients pairwise."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rallypoint.bridges import joining
from rallypoint.testing.reference import tree_sum
from rallypoint.worker.collective import Sums
from rallypoint.worker.loop.session import Job

STEPS, BATCH = 6, 8
SMALL = 2 << 20
TIMES = 60
PATIENCE = timedelta(seconds=60)
CASES: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many buckets, built anew after the first step": {"bucket_cap_mb": 0.01},
    "gradients are views of buckets": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True, "bucket_cap_mb": 0.01},
    "no_sync": {"bucket_cap_mb": 0.01},
    "a static graph": {"static_graph": True, "bucket_cap_mb": 0.01},
}


class Net(torch.nn.Module):
    """Layers of different lengths; with `branches` a step uses one of two of them."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = torch.nn.Linear(12, 40)
        self.middle = torch.nn.ModuleList([torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)])
        self.last = torch.nn.Linear(40, 5)
        self.branches = branches

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for layer in [self.middle[step % 2]] if self.branches else self.middle:
            hidden = torch.tanh(layer(hidden))
        return self.last(hidden)


def batch_of(rank: int, step: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(BATCH, 12, generator=generator, dtype=torch.float32)


def hash_of(parameters: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(p.detach().contiguous().numpy().tobytes() for p in parameters)).hexdigest()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: torch.nn.Module, rank: int, step: int, micro: int = 0) -> torch.Tensor:
    return model(batch_of(rank, step, micro), step).square().mean()


def plain(world: int, case: str, *, divides_first: bool = False) -> str:
    """One process: each replica's gradient by itself, added up pairwise, times 1/world.

    DDP without a hook multiplies by 1/world before the sum (`divides_first`): another rounding, for 3 workers say.
    """
    before, after = (1.0 / world, 1.0) if divides_first else (1.0, 1.0 / world)
    unused, micros = case == "unused parameters", range(2 if case == "no_sync" else 1)
    model = Net(branches=unused)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        of_ranks = []
        for rank in range(world):
            model.zero_grad()
            for micro in micros:
                loss_of(model, rank, step, micro).backward()
            of_ranks.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for parameter, *grads in zip(model.parameters(), *of_ranks, strict=True):
            parameter.grad = None if grads[0] is None else tree_sum([g * before for g in grads]) * after
        optimizer.step()
    return hash_of(model.parameters())


def train_ddp(state: Any, hook: Any, rank: int, case: str) -> tuple[str, str]:
    """With DDP: the hash of the weights, and of the gradients of the last step."""
    model = Net(branches=case == "unused parameters").float()
    wrapped = DistributedDataParallel(model, **CASES[case])
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        if case == "no_sync":
            with wrapped.no_sync():
                loss_of(wrapped, rank, step, 0).backward()
        loss_of(wrapped, rank, step, int(case == "no_sync")).backward()
        optimizer.step()
    return hash_of(model.parameters()), hash_of(p.grad for p in model.parameters() if p.grad is not None)


def train_fsdp(rank: int, world: int) -> str:
    """With FSDP2 on the CPU."""
    model = Net(branches=False)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model.first, *model.middle, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return hash_of(p.full_tensor() for p in model.parameters())  # type: ignore[attr-defined]


# ---- in a worker of a test's cluster ----


def joined(job: Job, world: int) -> Sums:
    """The sums of this worker, whose rank is the number in its name."""
    made = Sums(job, rank=int(job.id.removeprefix("worker")), world=world, under_way_bytes=SMALL)
    joining.use(made)
    return made


def begin(backend: str, folder: str, rank: int, world: int) -> None:
    store = dist.FileStore(str(Path(folder) / backend), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)


def hook_script(job: Job, folder: str, world: int, cases: list[str]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """What DDP gives with the hook, and with Gloo; and how many sums servers have made."""
    from rallypoint.bridges.ddp import hook

    made = joined(job, world)
    begin("gloo", folder, made.rank, world)
    found = {case: train_ddp(made, hook, made.rank, case) for case in cases}
    beside = {case: train_ddp(None, None, made.rank, case) for case in cases}
    dist.destroy_process_group()
    made.finish()
    return found, beside, made.reducer.made


def hook_in_float64(job: Job, folder: str, world: int, cases: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same in a script whose default type is another than its model's."""
    torch.set_default_dtype(torch.float64)
    found, beside, _ = hook_script(job, folder, world, cases)
    return found, beside


def backend_script(job: Job, folder: str, world: int) -> dict[str, Any]:
    """DDP and FSDP2 with the backend; collectives of all kinds; then FSDP2 over Gloo."""
    made = joined(job, world)
    import rallypoint.bridges.c10d  # noqa: F401

    begin("rallypoint", folder, made.rank, world)
    counts = [made.reducer.made]
    found: dict[str, Any] = {"ddp": train_ddp(None, None, made.rank, "one bucket")[0]}
    counts.append(made.reducer.made)
    found["fsdp"] = train_fsdp(made.rank, world)
    counts.append(made.reducer.made)
    found["collectives"] = collectives(made.rank, world)
    dist.destroy_process_group()
    begin("gloo", folder, made.rank, world)
    found["fsdp over gloo"] = train_fsdp(made.rank, world)
    dist.destroy_process_group()
    made.finish()
    return {**found, "sums": [after - before for before, after in itertools.pairwise(counts)]}


def two_groups(rank: int, values: torch.Tensor) -> list[list[float]]:
    """Two sums under way at once, each of its own group of all ranks; odd ranks ask for the second one first."""
    groups: list[Any] = [None, dist.new_group(backend="rallypoint")]
    given = [values.clone(), values * 100]
    works = [dist.all_reduce(given[n], group=groups[n], async_op=True) for n in ((1, 0) if rank % 2 else (0, 1))]
    for work in works:
        work.wait()
    return [one.tolist() for one in given]


def many_times(rank: int, world: int) -> str:
    """Each collective that Gloo does, many times at once: its threads free tensors while this one asks for more."""
    values, several = torch.full((100,), float(rank)), [torch.zeros(100) for _ in range(world)]
    flat, parts = torch.zeros(100 * world), [torch.zeros(100) for _ in range(world)]
    for _ in range(TIMES):
        dist.broadcast(values.clone(), 0)
        dist.all_gather(several, values)
        dist.all_gather_into_tensor(flat, values)
        dist.all_to_all_single(torch.zeros(100 * world), flat)
        dist.gather(values.clone(), several if rank == 0 else None)
        dist.scatter(values.clone(), parts if rank == 0 else None)
        dist.barrier()
    return "done"


def collectives(rank: int, world: int) -> dict[str, Any]:
    """What each collective gives on this rank, as lists."""
    values = torch.tensor([rank + 1.0, 10.0 * (rank + 1)])
    found: dict[str, Any] = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("mean", dist.ReduceOp.AVG), ("max", dist.ReduceOp.MAX)):
        one = values.clone()
        dist.all_reduce(one, op)
        found[name] = one.tolist()
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64):
        one = values.to(dtype)
        dist.all_reduce(one)
        found[str(dtype)] = one.tolist()
    strided = torch.stack([values, values], 1)[:, 0]
    work = dist.all_reduce(strided, async_op=True)
    work.wait()
    found["strided, later"] = strided.tolist()
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), values, (2,))
    dist.all_reduce(sparse)
    found["sparse"] = sparse.to_dense().tolist()
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, values.repeat(world)[: world].contiguous())
    found["scattered"] = part.tolist()
    parts = torch.zeros(2)
    dist.reduce_scatter(parts, [values + other for other in range(world)])
    found["scattered from a list"] = parts.tolist()
    gathered = torch.zeros(2 * world)
    dist.all_gather_into_tensor(gathered, values)
    found["gathered"] = gathered.tolist()
    several = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(several, values)
    found["gathered in a list"] = torch.stack(several).flatten().tolist()
    sent = values.clone()
    dist.broadcast(sent, 0)
    found["broadcast"] = sent.tolist()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, f"rank {rank}")
    found["objects"] = objects
    found["two groups, in another order on each rank"] = two_groups(rank, values)
    reduced = values.clone()
    dist.reduce(reduced, 0)
    found["reduced"] = reduced.tolist() if rank == 0 else None
    if rank < 2:
        got = torch.zeros(2)
        (dist.send(values, 1) if rank == 0 else dist.recv(got, 0))
        found["received"] = got.tolist()
    some = dist.new_group([0, 1], backend="rallypoint")
    if rank < 2:
        pair = values.clone()
        dist.all_reduce(pair, dist.ReduceOp.AVG, group=some)
        found["mean of two ranks"] = pair.tolist()
    found["many times"] = many_times(rank, world)
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    dist.barrier()
    return found
