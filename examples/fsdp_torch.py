"""FSDP2 on CPUs over Gloo, as it is written without Rallypoint; fsdp_rallypoint.py is the same over servers.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_torch.py
"""

import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images, labels = torch.randn(4096, 64), torch.randint(0, 10, (4096,))
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
mesh = init_device_mesh("cpu", (world,))
for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(100):
    mine = slice((step * world + rank) * 32 % 4096, (step * world + rank) * 32 % 4096 + 32)
    optimizer.zero_grad()
    F.cross_entropy(model(images[mine]), labels[mine]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()

whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in whole)
print(f"rank {rank}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
dist.destroy_process_group()
