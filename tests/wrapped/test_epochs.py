"""`optimizer.epochs`, and a loop that does not ask where the job is: a process that is started again never trains on
the batches of other steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from rallypoint.config import JobConfig
from rallypoint.data.randomness import seed_everything
from rallypoint.errors import UsageError
from rallypoint.worker.wrapped import OwnRun, WrappedOptimizer, epochs_of

STEPS = 17
DATA = TensorDataset(torch.arange(20))


class Played:
    """A run without a job: each step only counts, and seeds the generators as `OwnRun` does."""

    def __init__(self, position: int = 0, replica: int = 0) -> None:
        self.config, self.replica, self.position = JobConfig(replicas=2, steps=STEPS), replica, position
        self.push(None, {}, 0)

    @property
    def over(self) -> bool:
        return self.position >= STEPS

    def push(self, loss: object, figures: object, steps: int = 1) -> None:
        self.position += steps
        seed_everything(1000 * self.position)

    def epochs(self, loader: Any) -> Iterator[tuple[int, Any]]:
        return epochs_of(cast(OwnRun, self), loader)


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Its samples depend on the global generators, as augmented ones do."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "a generator": lambda: DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "processes": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1),
    "a last batch that is smaller": lambda: DataLoader(DATA, batch_size=6, shuffle=True),
    "distributed": lambda: DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, 1)),
    "augmented": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "a list": lambda: [torch.tensor(index) for index in range(5)],
}


def read(run: Played, loader: Any) -> list[tuple[int, int, str]]:
    found = []
    for epoch, batch in run.epochs(loader):
        found.append((run.position, epoch, repr(batch)))
        run.push(None, {})
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_a_process_that_is_started_again_reads_the_batches_that_it_would_have_read(kind: str) -> None:
    torch.manual_seed(1)
    undisturbed = read(Played(), LOADERS[kind]())
    length = len(LOADERS[kind]())
    assert [(step, epoch) for step, epoch, _ in undisturbed] == [(step, step // length) for step in range(STEPS)]
    for position in (1, length - 1, length, length + 2) if kind != "processes" else (length + 2,):
        torch.manual_seed(position)  # as a new process is: nothing of it may matter
        assert read(Played(position), LOADERS[kind]()) == undisturbed[position:]


def test_each_epoch_and_each_replica_has_an_order_of_its_own() -> None:
    orders = [
        tuple(batch for _, epoch, batch in read(Played(replica=replica), LOADERS["shuffled"]()) if epoch == wanted)
        for replica in (0, 1) for wanted in (0, 1, 2)
    ]  # fmt: skip
    assert len(set(orders)) == len(orders)


def test_a_loop_that_takes_a_batch_without_a_step_is_told() -> None:
    with pytest.raises(UsageError, match=r"call optimizer\.step\(\) once for each batch"):
        list(Played().epochs(LOADERS["in order"]()))


def test_a_loader_that_gives_fewer_batches_than_its_length_is_told() -> None:
    class Short:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter(range(2))

    with pytest.raises(UsageError, match="the loader ended epoch 0 before its 3 batches"):
        read(Played(), Short())
    with pytest.raises(UsageError, match="the loader ended epoch 1 before its 3 batches"):
        read(Played(5), Short())
    with pytest.raises(UsageError, match="a loader without a batch"):
        read(Played(), [])


@pytest.mark.parametrize("asks", ["position", "epochs", ""])
def test_a_process_that_begins_at_a_later_step_and_does_not_ask_where_is_told_before_anything_is_sent(
    asks: str,
) -> None:
    run = Played(7)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer = WrappedOptimizer(cast(OwnRun, run), inner, steps_here=True)
    if asks == "position":
        assert optimizer.position == 7
    elif asks:
        assert next(optimizer.epochs(LOADERS["in order"]()))[0] == 1
    else:
        with pytest.raises(UsageError, match=r"begins at step 7 .* `for epoch, batch in optimizer\.epochs\(loader\):`"):
            optimizer.step()
        assert run.position == 7
        return
    optimizer.step()
    assert run.position == 8


def test_a_process_that_begins_at_step_0_need_not_ask() -> None:
    run = Played()
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    WrappedOptimizer(cast(OwnRun, run), inner, steps_here=True).step()
    assert run.position == 1
