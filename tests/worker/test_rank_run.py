"""The loop of a rank that does not lead, given the leader's orders: buffers, evaluations, losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rallypoint.config import JobConfig, resolve
from rallypoint.core.ranks import Spread
from rallypoint.data.loader import MicroBatches
from rallypoint.errors import ConfigError, ModelError, UsageError
from rallypoint.parallel import OrderKind, Parallel, RankGroup, RankOrder, whole_of
from rallypoint.worker.precision import Losses
from rallypoint.worker.ranks.followers import Figures, Logged, OtherRanks, RankSaid
from rallypoint.worker.ranks.run import RankJob, RankRun
from rallypoint.worker.ranks.tensors import SpreadModel, in_order, layout_of
from rallypoint.worker.sources.hooks import Staging


class OneRank(RankGroup):
    """A group of one rank that hears these orders; `told` has the values of `seen` that it gives away."""

    def __init__(self) -> None:
        self.rank, self.size = 1, 1
        self.orders: list[RankOrder] = []
        self.told: list[float] = []
        self.said: list[RankSaid] = []  # of replicas

    def hear(self) -> RankOrder:
        return self.orders.pop(0)

    def all_bytes(self, data: bytes) -> list[bytes]:
        with suppress(msgspec.DecodeError):
            self.said.append(msgspec.msgpack.decode(data, type=RankSaid))
        return [data]

    def all_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers)]

    def collect(self, tensor: Spread, own: torch.Tensor | None, whole: torch.Tensor | None) -> None:
        if tensor.name == "seen":
            assert own is not None
            self.told.append(float(own))

    def hand_out(self, tensor: Spread, own: torch.Tensor | None, whole: torch.Tensor | None) -> None:
        """Every version has the values that are here."""


class Net(torch.nn.Module):
    """A layer, and a buffer that its forward pass counts up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(x)


class Rank:
    """A rank that is given orders."""

    def __init__(self) -> None:
        config = JobConfig(replicas=1, batch=2, steps=4)
        self.net, self.group = Net(), OneRank()
        spread = SpreadModel(self.group, self.net, Parallel())
        data = torch.utils.data.TensorDataset(torch.ones(8, 3))
        order = in_order(spread, layout_of(spread, config))
        self.run = RankRun(spread, config, MicroBatches(data, config, spread.device), order, Path())
        self.place = [tensor.name for _, tensor in order].index("seen")

    def does(self, *orders: RankOrder) -> None:
        """Run the loop with these orders."""
        self.group.orders = [*orders, RankOrder(OrderKind.END)]
        for micro in self.run:
            with micro:
                micro.backward(self.net(micro.batch[0]).sum())


def test_a_group_that_matches_nothing_is_refused_in_a_worker_of_ranks_too() -> None:
    config = resolve({"groups": [{"match": ["nosuch.*"]}]})
    with pytest.raises(ConfigError, match=r"match=\['nosuch\.\*'\]: .* layer\.weight, layer\.bias"):
        layout_of(SpreadModel(OneRank(), Net(), Parallel()), config)


def test_the_first_values_are_those_of_the_version_also_after_a_replica() -> None:
    rank = Rank()
    rank.does(RankOrder(OrderKind.INSTALL), RankOrder(OrderKind.COMPUTE), RankOrder(OrderKind.VALUE, rank.place))
    assert rank.group.told == [1, 0]  # what the replica has made of it; then what all workers start from, once more


def test_an_evaluation_sees_the_version_s_buffers() -> None:
    rank = Rank()
    found: list[float] = []
    rank.run.every(2)(lambda step: found.append(float(rank.net.seen)))
    rank.does(RankOrder(OrderKind.INSTALL), RankOrder(OrderKind.COMPUTE), RankOrder(OrderKind.EVALUATE, 4, 1))
    assert found == [0]


def test_an_evaluation_of_rank_0_alone_is_refused() -> None:
    rank = Rank()
    rank.run.every(2)(lambda step: None)
    with pytest.raises(UsageError, match="has an evaluation that this rank does not have"):
        rank.does(RankOrder(OrderKind.INSTALL), RankOrder(OrderKind.EVALUATE, 2, 2))


def test_a_rank_that_leaves_the_loop_says_so() -> None:
    rank = Rank()
    rank.group.orders = [RankOrder(OrderKind.INSTALL), RankOrder(OrderKind.COMPUTE)]
    job = RankJob(rank.group, "worker0")
    job._run = rank.run
    next(iter(rank.run))
    with pytest.raises(UsageError, match=r"left before the last step on rank 1 .* call run.stop\(\)"):
        job.__exit__(None, None, None)


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ModelError, match="weight is on the meta device"):
        SpreadModel(OneRank(), torch.nn.Linear(2, 2, device="meta"), Parallel())


def test_losses_that_an_error_has_cut_short_are_agreed_on() -> None:
    figures = Figures(OneRank(), (0, 1))
    ranks = OtherRanks(OneRank(), figures)
    losses = Losses(Stopped(), lambda step, value: None)
    for _ in range(2):
        losses.add(torch.tensor(math.nan), 0)
        ranks.micro(has_loss=True)
    ranks.agree(losses, [1.0], Logged())
    assert not figures.finite


def test_a_weight_may_be_a_tensor_as_in_a_worker_of_one_process() -> None:
    figures = Figures(OneRank(), (0, 1))
    tokens: Any = torch.tensor(3)  # such as those that a mask leaves
    figures.agree([0.5], tokens, Logged())
    assert figures.weight == 3.0


def test_a_rank_s_wish_to_stop_reaches_rank_0_with_the_replica_s_figures() -> None:
    rank = Rank()
    rank.group.orders = [
        RankOrder(OrderKind.INSTALL),
        RankOrder(OrderKind.COMPUTE),
        RankOrder(OrderKind.COMPUTE, 1),
        RankOrder(OrderKind.END),
    ]
    for micro in rank.run:
        with micro:
            micro.log(seen=micro.step)
            micro.backward(rank.net(micro.batch[0]).sum())
        if micro.step == 1:
            rank.run.stop("enough")
            rank.run.stop("more than enough")
    assert [said.stop for said in rank.group.said] == [None, "enough"]
    assert [said.figures for said in rank.group.said] == [{"seen": 0.0}, {"seen": 1.0}]
    assert rank.run._figures.stop is None


def test_an_evaluation_s_wish_to_stop_reaches_all_ranks() -> None:
    figures = Figures(OneRank(), (0, 1))
    figures.stop = "good enough"
    ranks = OtherRanks(OneRank(), figures)
    assert ranks.result({"loss": math.nan}) == pytest.approx({"loss": math.nan}, nan_ok=True)
    assert (ranks.stop(), ranks.stop()) == ("good enough", None)


class Several(OneRank):
    """Ranks that say the same figures: each but the first is given."""

    def __init__(self, *others: RankSaid) -> None:
        super().__init__()
        self.others = [msgspec.msgpack.encode(one) for one in others]

    def all_bytes(self, data: bytes) -> list[bytes]:
        return [data, *self.others]


def test_logged_figures_are_averaged_over_the_parts_of_the_batch() -> None:
    group = Several(
        RankSaid(0, 9.0, 2.0, {"right": 9.0}, None), RankSaid(1, 3.0, 2.0, {"right": 3.0, "last": 7.0}, "done")
    )
    figures, logged = Figures(group, (0, 2)), Logged()
    logged.add({"right": 1.0})
    figures.agree([1.0], 2.0, logged)
    assert (figures.loss, figures.weight, figures.stop) == (2.0, 2.0, "done")
    assert figures.logged == {"right": 2.0, "last": 7.0}  # of rank 1, which has part 0 as well, nothing


def test_another_whole_model_on_one_rank_is_refused() -> None:
    class Differ(OneRank):
        def all_bytes(self, data: bytes) -> list[bytes]:
            return [data, b"null"] if data.startswith(b'["') else [data]

    whole = Net()
    mesh = Parallel(unsharded=whole)
    with pytest.raises(ModelError, match="rank 1 of this worker was given another whole model"):
        SpreadModel(Differ(), Net(), mesh)


class Stopped(Staging):
    """A staging whose thread has ended with the first loss."""

    def __init__(self) -> None:
        self._over = False

    def then(self, call: Callable[[], None]) -> None:
        if not self._over:
            self._over = True
            call()


def test_a_loss_of_tensor_parallelism_is_read_as_a_plain_one() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
        loss = (weight * 2).sum()
        assert isinstance(loss, DTensor)
        assert type(whole_of(loss)) is torch.Tensor
        assert torch.empty(()).copy_(whole_of(loss)) == 6
        assert not whole_of(loss).requires_grad
    finally:
        dist.destroy_process_group()
