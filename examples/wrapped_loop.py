"""A plain training loop, as in nanoGPT: batches of a text at random places, a rate by step, clipping."""

import math
import sys
from pathlib import Path

import torch

import rallypoint as rp

steps, batch, block = 200, 16, 32
torch.manual_seed(0)
text = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).read_bytes()
data = torch.tensor(list(text), dtype=torch.long)
model = torch.nn.Sequential(
    torch.nn.Embedding(256, 32), torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 256)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
optimizer = rp.wrap(model, optimizer, steps=steps, clip=1.0)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.randint(len(data) - block, (batch,))
    return (
        torch.stack([data[at : at + block] for at in places]),
        torch.stack([data[at + 1 : at + 1 + block] for at in places]),
    )


for step in range(optimizer.position, steps):
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
    x, y = get_batch()
    loss = torch.nn.functional.cross_entropy(model(x).view(-1, 256), y.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
