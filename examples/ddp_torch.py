"""DistributedDataParallel over Gloo, as it is written without Rallypoint; ddp_rallypoint.py is the same over servers.

    torchrun --standalone --nproc-per-node 2 examples/ddp_torch.py
"""

import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images, labels = torch.randn(4096, 64), torch.randint(0, 10, (4096,))
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

for step in range(100):
    mine = slice((step * world + rank) * 32 % 4096, (step * world + rank) * 32 % 4096 + 32)
    optimizer.zero_grad()
    F.cross_entropy(ddp(images[mine]), labels[mine]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"rank {rank}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
dist.destroy_process_group()
