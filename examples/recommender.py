"""Two embeddings that only the servers hold: who clicks on what, on synthetic clicks whose true odds are known.

    rallypoint run --workers 2 --servers 2 examples/recommender.py

The tables have 77 MB (with Adam's moments 230); a worker may grow by BUDGET_MB, because it only ever holds the rows of
its batch. The log-loss is measured against that of the odds from which the clicks were drawn: nobody can do better.
"""

import resource

import torch
import torch.nn.functional as F

import rallypoint as rp

USERS, ITEMS, COLUMNS, BUDGET_MB = 1_000_000, 200_000, 16, 48
TASTES = torch.linspace(0.3, 1.7, 4, dtype=torch.float64)  # the truth: 4 factors of each user and item, from its number


def odds(user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """The true log-odds of a click."""
    likes, is_like = (torch.cos(who[:, None] * 7919.0 * TASTES) for who in (user, item + 0.5))
    return (1.5 * (likes * is_like).sum(1) + torch.sin(item * 31.0) - 0.5).float()


class Clicks(torch.utils.data.Dataset[tuple[torch.Tensor, ...]]):
    """A click is a function of its number: no file, no memory. In nine of ten, every 500th user or item takes part."""

    def __len__(self) -> int:
        return 1 << 24

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        places = torch.tensor(indices, dtype=torch.float64)[:, None] * torch.tensor([2, 3, 5, 7]).double().sqrt()
        chance = torch.frac(places.sin().abs() * 43758.5453)
        user, item = (USERS * chance[:, 0]).long(), (ITEMS * chance[:, 1]).long()
        popular = torch.where(chance[:, 3] < 0.9, 500, 1)
        user, item = user - user % popular, item - item % popular
        return list(zip(user, item, (chance[:, 2] < torch.sigmoid(odds(user, item))).float(), strict=True))


class Recommender(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(USERS, COLUMNS, sparse=True, device="meta")  # nothing of it is here
        self.items = torch.nn.Embedding(ITEMS, COLUMNS, sparse=True, device="meta")
        self.top = torch.nn.Sequential(torch.nn.Linear(3 * COLUMNS, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        u, i = self.users(user), self.items(item)
        logits: torch.Tensor = self.top(torch.cat([u, i, u * i], 1)).squeeze(1) + (u * i).sum(1)
        return logits


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


torch.manual_seed(0)  # the same first weights each time; the servers make the tables' from seed=
clicks, model = Clicks(), Recommender()
unseen = clicks.__getitems__([len(clicks) + index for index in range(8192)])
held_out = [torch.stack(column) for column in zip(*unseen, strict=True)]
with rp.join() as job:
    run = job.train(model, clicks, replicas=4, batch=512, steps=600, seed=1, table_std=0.1,
                    optimizer=rp.AdamW(lr=rp.cosine(0.02, warmup=20), weight_decay=0.0))  # fmt: skip
    before = memory_mb()

    @run.every(100)
    def log_loss(step: int) -> dict[str, float]:
        user, item, clicked = held_out
        ours, truth = (float(F.binary_cross_entropy_with_logits(f(user, item), clicked)) for f in (model, odds))
        if step == run.config.steps:
            run.say(f"log-loss {ours:.4f}, the truth's own {truth:.4f}; "
                    f"this worker grew by {memory_mb() - before:.0f} MB of {BUDGET_MB}")  # fmt: skip
        return {"log_loss": ours, "of_the_truth": truth}

    for micro in run:
        with micro:
            user, item, clicked = micro.batch
            micro.backward(F.binary_cross_entropy_with_logits(model(user, item), clicked))
