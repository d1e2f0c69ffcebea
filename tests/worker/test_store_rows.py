"""Row-sparse keys of a store on real processes: rows are pushed and pulled by their numbers, and each push counts once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.errors import ConfigError, UsageError
from rallypoint.testing.processes import ProcessCluster

STEPS, ROWS, COLUMNS = 4, 300, 6
POLICIES = {"sync": rp.Sync(), "async": rp.Async(), "ssp": rp.BoundedStaleness(1)}


def rows_of(step: int, contributor: int) -> torch.Tensor:
    """Three rows, one of them twice; contributors share row 7."""
    return torch.tensor([7, 10 * step + contributor, 250 + contributor, 7])


def pushing(job: rp.Job, sync: Any) -> list[list[float]]:
    store = job.store(
        {"users": torch.empty(ROWS, COLUMNS, device="meta"), "bias": torch.zeros(3)}, contributors=4, sync=sync,
        steps=STEPS, optimizer=rp.SGD(lr=1.0), network=rp.Network(shard_bytes=1024), table_std=0.0,
    )  # fmt: skip
    for step, contributor in store.due("users", STEPS):
        rows = rows_of(step, contributor)
        store.push("users", rows=rows, values=torch.ones(4, COLUMNS), step=step, contributor=contributor)
        store.push("bias", torch.ones(3), step=step, contributor=contributor)
    for _ in store.due("bias", STEPS):
        raise AssertionError("somebody has not pushed")
    found: list[list[float]] = store.pull("users", rows=range(ROWS), step=0).tolist()
    return found


@pytest.mark.some("sync")
@pytest.mark.parametrize("policy", POLICIES)
def test_each_push_of_rows_counts_once(policy: str) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        values = cluster.run(pushing, POLICIES[policy])
    expected = torch.zeros(ROWS, COLUMNS)
    for step in range(STEPS):
        for contributor in range(4):
            expected.index_add_(0, rows_of(step, contributor), torch.full((4, COLUMNS), -0.25))
    assert values == [expected.tolist()] * 2


def learning(job: rp.Job, optimizer: Any) -> list[list[float]]:
    """A table whose rows go to where they should, by a lazy optimizer."""
    store = job.store({"t": torch.empty(40, 2, device="meta")}, contributors=2, steps=3, optimizer=optimizer, seed=5)
    for step, contributor in store.due("t", 3):
        rows = torch.tensor([step, 20 + contributor])
        store.push("t", rows=rows, values=2 * store.pull("t", rows=rows, step=step), step=step, contributor=contributor)
    found: list[list[float]] = store.pull("t", rows=torch.arange(40), step=3).tolist()
    return found


OPTIMIZERS = {
    "sgd": rp.SGD(lr=0.1), "adam": rp.Adam(lr=0.1), "adamw": rp.AdamW(lr=0.1, weight_decay=0.0),
    "adagrad": rp.Adagrad(lr=0.1),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.some("adam")
def test_rows_are_updated_lazily_as_torch_does_on_a_sparse_gradient(optimizer: str) -> None:
    with ProcessCluster(workers=2, servers=1) as cluster:
        values = cluster.run(learning, OPTIMIZERS[optimizer])
        first = cluster.run(first_rows)[0]
    assert values == [plain(torch.tensor(first), optimizer)] * 2


def first_rows(job: rp.Job) -> list[list[float]]:
    store = job.store({"t": torch.empty(40, 2, device="meta")}, contributors=2, steps=3, seed=5)
    found: list[list[float]] = store.pull("t", rows=torch.arange(40)).tolist()
    return found


def plain(first: torch.Tensor, optimizer: str) -> list[list[float]]:
    """The same on one process, with torch's own optimizer for sparse gradients."""
    table = torch.nn.Parameter(first.clone())
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    stepper = kinds.get(optimizer, torch.optim.SparseAdam)([table], lr=0.1)
    for step in range(3):
        ids, values = torch.tensor([[step, 20, 21]]), torch.empty(3, 2)
        values[0] = (2 * table.detach()[step] + 2 * table.detach()[step]) / 2
        values[1:] = 2 * table.detach()[20:22] / 2
        table.grad = torch.sparse_coo_tensor(ids, values, table.shape, check_invariants=False)
        stepper.step()
    found: list[list[float]] = table.tolist()
    return found


def asking(job: rp.Job) -> None:
    store = job.store(
        {"users": torch.empty(ROWS, COLUMNS, device="meta"), "w": (2, 3)}, optimizer=rp.SGD(lr=1.0), steps=3
    )
    store.init("w", torch.ones(2, 3))
    rows = torch.tensor([[5, 299], [5, 0]])
    before = store.pull("users", rows=rows)
    assert before.shape == (2, 2, COLUMNS)
    assert before.equal(store.pull("users", rows=rows)), "a row has one value"
    assert before[0, 0].equal(before[1, 0])
    assert not before[0, 0].equal(before[0, 1])
    assert store.pull("users", rows=[]).shape == (0, COLUMNS)
    store.push("users", rows=rows, values=torch.ones(2, 2, COLUMNS))
    out = torch.empty(2, COLUMNS, dtype=torch.float64)
    assert store.pull("users", out, rows=[5, 0]) is out, "it has this worker's push, though nobody waited for that"
    assert out[0].equal((before[0, 0] - 2).double()), "row 5 was named twice"
    store.push("users", rows=[], values=torch.empty(0, COLUMNS)).result()
    assert store.step("users") == 2
    one, other = store.pull_later("users", rows=[1, 2]), store.pull_later("users", rows=[3])
    assert other.result().shape == (1, COLUMNS)
    assert one.result().equal(store.pull("users", rows=[1, 2]))
    mistakes: list[tuple[str, Any]] = [
        ("say which rows", lambda: store.pull("users")),
        ("there is no row 300 of key users, which has 300", lambda: store.pull("users", rows=[0, 300])),
        ("whole numbers, not float32", lambda: store.pull("users", rows=torch.ones(2))),
        (r"\[2, 6\] are wanted", lambda: store.push("users", rows=[1, 2], values=torch.ones(2, 5))),
        ("rows of key w, which is dense", lambda: store.pull("w", rows=[1])),
        ("servers make its rows", lambda: store.init("users", torch.ones(ROWS, COLUMNS))),
        ("a sparse tensor for key w", lambda: store.push("w", torch.eye(3)[:2].to_sparse())),
        ("a complex tensor", lambda: store.push("w", torch.ones(2, 3, dtype=torch.complex64))),
    ]  # fmt: skip
    for sentence, mistake in mistakes:
        with pytest.raises(UsageError, match=sentence):
            mistake()


def test_rows_have_any_shape_and_mistakes_are_told() -> None:
    with ProcessCluster(workers=1, servers=2) as cluster:
        cluster.run(asking)


def test_an_optimizer_without_a_lazy_form_is_refused_for_a_table() -> None:
    with ProcessCluster(workers=1, servers=1) as cluster:
        cluster.run(refused)


def refused(job: rp.Job) -> None:
    table = torch.empty(9, 2, device="meta")
    with pytest.raises(ConfigError, match="key t cannot be a table: torch's RMSprop has no form"):
        job.store({"t": table}, optimizer=rp.RMSprop(lr=1.0))
    with pytest.raises(ConfigError, match="key t cannot be a table: momentum would move every row"):
        job.store({"t": table, "w": (3,)}, optimizer={"t": rp.SGD(lr=1.0, momentum=0.9), "w": rp.Adam(lr=0.1)})
    with pytest.raises(ConfigError, match="rows and columns, not"):
        job.store({"t": torch.empty(9, device="meta")})
    with pytest.raises(ConfigError, match=r"key w of shape \[0, 3\] has no values"):
        job.store({"w": torch.empty(0, 3)})
    assert job.store({"w": ()}).pull_later("w").done() is False
