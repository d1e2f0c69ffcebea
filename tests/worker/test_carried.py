"""What a replica carries: its form, its names, what is refused, what the servers make of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.core.layout import TensorSpec, build_layout, carried_by, carried_in
from rallypoint.core.policy import Sync
from rallypoint.core.shard.effects import Apply, Drop, Take
from rallypoint.core.shard.events import Contribute, Initialise
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.errors import ConfigError, JobAborted, ModelError, UsageError
from rallypoint.worker.tensors import MOST_BYTES, Carried, Carry, ModelTensors
from support.training import Look, Loss, square, train

CPU = torch.device("cpu")


def _carried(replicas: int = 2) -> Carried:
    return Carried({"h": torch.zeros(2, 3), "more": (torch.tensor(7), [torch.zeros(1)])}, replicas, CPU)


def test_each_replica_has_tensors_of_its_own_named_by_their_place() -> None:
    assert list(_carried().tensors) == [
        "carry[0].h", "carry[0].more[0]", "carry[0].more[1][0]",
        "carry[1].h", "carry[1].more[0]", "carry[1].more[1][0]",
    ]  # fmt: skip
    assert {spec.group for spec in _carried().specs} == {carried_by(0), carried_by(1)}


def test_what_is_given_is_carried_from_the_end_of_the_micro_batch_on() -> None:
    carried, leaf = _carried(), torch.ones(2, 3, requires_grad=True)
    hidden = leaf * 2
    carried.give(1, {"h": hidden, "more": (torch.tensor(8), [torch.ones(1)])})
    assert float(carried.tensors["carry[1].h"].sum()) == 0.0, "the backward pass may still need what was there"
    carried.keep()
    found = carried.of(1)
    assert isinstance(found, dict)
    assert torch.equal(found["h"], torch.full((2, 3), 2.0))
    assert not found["h"].requires_grad
    assert found["more"][0] == 8
    assert isinstance(found["more"], tuple)
    assert float(carried.of(0)["h"].sum()) == 0.0  # type: ignore[call-overload,index]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_tensors_of_any_dense_type_are_carried(dtype: torch.dtype) -> None:
    carried = Carried(torch.zeros(3).to(dtype), 2, CPU)
    carried.give(1, torch.full((3,), 2.0).to(dtype))
    carried.keep()
    found = carried.of(1)
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, found.to(torch.complex64).real.tolist()) == (dtype, [2.0] * 3)


@pytest.mark.parametrize(("state", "says"), [
    ({"h": torch.zeros(2, 3)}, r"has no tensor carry\[1\].more\[0\]"),
    ({"h": torch.zeros(1, 3), "more": (torch.tensor(7), [torch.zeros(1)])}, r"carry\[1\].h is float32 \[1, 3\].*last"),
    ({"h": torch.zeros(2, 3).double(), "more": (torch.tensor(7), [torch.zeros(1)])}, "float64.*float32"),
    ({"h": 1.0, "more": ()}, "has a float at carry.h"),
], ids=["form", "shape", "type", "no tensor"])  # fmt: skip
def test_a_state_of_another_form_is_refused(state: Carry, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _carried().give(1, state)


@pytest.mark.parametrize(("first", "says"), [
    ((), "has no tensor"),
    (torch.tensor([math.nan]), "not finite"),
    (torch.eye(2).to_sparse(), "sparse_coo"),
    (torch.tensor([torch.nan]).to(torch.float8_e4m3fn), "not finite"),
    (torch.tensor([complex(0.0, torch.inf)]), "not finite"),
    (torch.zeros(MOST_BYTES // 8 + 1), "256 MiB are supported"),
    (torch.zeros(2, device="meta"), "on meta"),
], ids=["empty", "not finite", "sparse", "not finite of 8 bits", "imaginary", "size", "meta"])  # fmt: skip
def test_what_cannot_be_carried_is_refused_before_the_job(first: Carry, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Carried(first, 2, CPU)


def test_the_layout_has_a_shard_of_each_replica_s_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    tensors = ModelTensors(model, resolve({"replicas": 3}), carry=torch.zeros(4))
    shards = tensors.layout.shards
    assert [carried_in(shards).get(s.index) for s in shards if s.role == "buffers"] == [None, 0, 1, 2]
    with pytest.raises(ModelError, match="two tensors"):
        build_layout([TensorSpec("w", (2,), "float32", 0), *2 * [TensorSpec("carry[0]", (2,), "float32", -2)]])


def test_a_server_takes_a_state_from_its_replica_alone() -> None:
    machine = ShardMachine(Sync(), 1, lowest=3)
    machine.handle(Initialise(1, 0))
    (dropped,) = machine.handle(Contribute(step=0, replica=0, weight=1.0, ticket=2))
    assert dropped == Drop(2, "replica 0 does not contribute to this shard (it has only replica 3)")
    effects = machine.handle(Contribute(step=0, replica=3, weight=1.0, ticket=3))
    assert isinstance(effects[0], Take)
    assert any(isinstance(effect, Apply) for effect in effects)
    assert machine.handle(Contribute(step=0, replica=3, weight=1.0, ticket=4)) == [Drop(4)], "a repeat (I2)"
    machine.validate()


# ---- whole jobs, in this process ----


def _train(inside: Look, loss: Loss = square, **settings: Any) -> None:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 2))
    given = {"replicas": 2, "batch": 2, "steps": 4, "optimizer": rp.SGD(lr=0.1), **settings}
    train(torch.nn.Linear(2, 1), data, loss, inside=inside, **given)


def test_a_state_that_is_not_set_stays() -> None:
    seen = []

    def look(micro: rp.Micro) -> None:
        seen.append((micro.step, micro.replica, int(micro.carry)))
        if micro.replica == 1:
            micro.carry = micro.carry + 1
            assert int(micro.carry) == micro.step + 1, "what has just been set"

    _train(look, carry=torch.tensor(0))
    assert seen == [(step, replica, step * replica) for step in range(4) for replica in range(2)]


def test_micro_batches_of_one_replica_follow_one_another() -> None:
    seen = []

    def count(micro: rp.Micro) -> None:
        seen.append(int(micro.carry))
        micro.carry = micro.carry + 1

    _train(count, accumulate=2, carry=torch.tensor(0))
    assert seen == [2 * step + index for step in range(4) for _ in range(2) for index in range(2)]


def test_a_state_that_is_not_finite_stops_the_job_and_is_named() -> None:
    def diverge(micro: rp.Micro) -> None:
        micro.carry = torch.full((3,), math.inf if micro.step == 2 and micro.replica == 1 else 1.0)

    with pytest.raises(JobAborted, match=r"carry\[1\]"):
        _train(diverge, carry=torch.zeros(3))


def test_a_step_that_is_skipped_leaves_what_replicas_carry() -> None:
    seen = []

    def count(micro: rp.Micro) -> None:
        seen.append(((micro.step, micro.replica), int(micro.carry)))
        micro.carry = micro.carry + 1

    def loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
        return square(model, batch) * (math.nan if seen[-1][0] == (1, 0) else 1.0)

    _train(count, loss, nonfinite="skip", carry=torch.tensor(0))
    assert [carried for _, carried in seen] == [0, 0, 1, 1, 1, 1, 2, 2]


def test_a_job_without_carry_and_a_wrong_place_are_told_apart() -> None:
    def look(micro: rp.Micro) -> None:
        with pytest.raises(UsageError, match=r"give job.train\(carry=...\)"):
            _ = micro.carry

    def set_it(micro: rp.Micro) -> None:
        with pytest.raises(UsageError, match="outside of `with micro:`"):
            micro.carry = torch.tensor(0)

    _train(look, steps=1, after=set_it)
