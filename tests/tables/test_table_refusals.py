"""What cannot be a table is refused before anything begins, with a sentence that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.errors import ConfigError, ModelError, RallypointError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.tensors import ModelTensors

DATA = torch.utils.data.TensorDataset(torch.arange(12) % 9, torch.randn(12))


def _table(**options: Any) -> torch.nn.Embedding:
    return torch.nn.Embedding(9, 2, sparse=True, **{"device": "meta", **options})


def _tied_frozen() -> torch.nn.Embedding:
    table = _table()
    table.weight.requires_grad_(False)
    return table


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (_table(device="cpu"), "it has weights here; declare it with device='meta'"),
        (torch.nn.EmbeddingBag(9, 2, sparse=True, device="meta"), r"only; use one and reduce its rows"),
        (_table(padding_idx=0), "padding_idx, max_norm and scale_grad_by_freq"),
        (_table(max_norm=1.0), "padding_idx, max_norm and scale_grad_by_freq"),
        (_table(dtype=torch.float16), "it must be fp32, trainable and not empty"),
        (_tied_frozen(), "it must be fp32, trainable and not empty"),
    ],
    ids=["materialised", "bag", "padding", "max_norm", "half", "frozen"],
)
def test_an_embedding_that_cannot_be_a_table_is_refused_by_name(model: torch.nn.Module, sentence: str) -> None:
    with pytest.raises(ModelError, match=f"^weight cannot be a table: .*{sentence}"):
        ModelTensors(model, resolve({}))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sync": rp.LocalSteps(steps=4)}, "under rp.LocalSteps the worker would have to hold it"),
        ({"sync": rp.AllReduce()}, "under rp.AllReduce the worker would have to hold it"),
        ({"sync": rp.Async(delay_compensation=0.1)}, "delay compensation is not supported"),
        ({"sync": rp.Async(), "clip": 1.0}, "its gradient cannot be clipped"),
        ({"optimizer": rp.SGD(lr=0.1, momentum=0.9)}, "momentum would move every row at every step"),
        ({"optimizer": rp.AdamW(eps=0.0)}, "needs a positive one"),
    ],
    ids=["local steps", "all-reduce", "delay compensation", "clip", "momentum", "eps"],
)
def test_settings_that_tables_cannot_follow_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        ModelTensors(_table(), resolve(settings))
    ModelTensors(torch.nn.Embedding(9, 2), resolve(settings))


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_impossible_first_values_are_refused(std: float) -> None:
    with pytest.raises(ConfigError, match="table_std"):
        resolve({"table_std": std})


def test_a_row_that_the_table_does_not_have_is_named() -> None:
    with pytest.raises(ModelError, match="there is no row 9 of weight, which has 9: they count from 0"):
        _train(_table(), offset=1)


def test_a_table_before_the_loop_says_where_it_can_be_used() -> None:
    model = _table()
    with pytest.raises(RallypointError, match="use it inside the run's loop"):
        _use_early(model)


def _use_early(model: torch.nn.Module) -> None:
    with EmbeddedJob() as job:
        job.train(model, DATA, batch=4, steps=1)
        model(torch.tensor([1]))


def test_a_model_of_nothing_but_tables_is_trained_and_gets_its_forward_back() -> None:
    model = _table()
    losses = _train(model, steps=60)
    assert losses[-1] < 0.5 * losses[0]
    assert "forward" not in vars(model)


def _train(model: torch.nn.Embedding, offset: int = 0, steps: int = 4) -> list[float]:
    losses = []
    with EmbeddedJob() as job:
        for micro in job.train(model, DATA, batch=12, steps=steps, seed=1, optimizer=rp.Adam(lr=0.1)):
            with micro:
                row, _ = micro.batch
                loss = (model(torch.where(row == 8, row + offset, row)).sum(1) - 1).pow(2).mean()
                losses.append(float(loss.detach()))
                micro.backward(loss)
    return losses
