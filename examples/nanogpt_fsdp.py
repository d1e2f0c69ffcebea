"""nanoGPT's own model, unchanged, sharded by FSDP2 over the ranks of each worker. Needs a clone of karpathy/nanoGPT.

    rallypoint run --workers 2 --servers 2 --ranks 2 examples/nanogpt_fsdp.py path/to/nanoGPT text.txt
"""

import os
import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rallypoint as rp

sys.path.insert(0, sys.argv[1])
from model import GPT, GPTConfig  # type: ignore[import-not-found]  # nanoGPT's model.py

BLOCK = 64


class Bytes(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text, as bytes, and the bytes that follow them."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as text:
            self.data = torch.tensor(list(text.read()))

    def __len__(self) -> int:
        return len(self.data) - BLOCK

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[at : at + BLOCK], self.data[at + 1 : at + BLOCK + 1]


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
torch.manual_seed(0)
model = GPT(GPTConfig(block_size=BLOCK, vocab_size=256, n_layer=4, n_head=4, n_embd=128, bias=False)).to(device)

with rp.join() as job:
    parallel = None
    if job.ranks > 1:
        mesh = init_device_mesh(device, (job.ranks,), mesh_dim_names=("dp",))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        parallel = rp.Parallel(mesh, split="dp")
    run = job.train(model, Bytes(sys.argv[2]), parallel=parallel, replicas=4, batch=8, steps=100,
                    optimizer=rp.AdamW(lr=rp.cosine(1e-3, warmup=10)), clip=1.0)  # fmt: skip
    for micro in run:
        with micro:
            logits, loss = model(*micro.batch)
            micro.backward(loss)
