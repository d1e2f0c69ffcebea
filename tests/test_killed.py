"""A user's own loop under kills, in one process: `rallypoint.testing.simulate`."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import rallypoint as rp
from rallypoint.errors import ConfigError, UsageError
from rallypoint.testing import simulate

EXAMPLE = Path(__file__).parents[1] / "examples" / "killed.py"


def _train(**settings: object) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 2))
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    with rp.join() as job:
        run = job.train(model, dataset, replicas=2, batch=4, steps=8, optimizer=rp.AdamW(lr=0.01), **settings)  # type: ignore[arg-type]
        for micro in run:
            with micro:
                x, y = micro.batch
                micro.backward(F.cross_entropy(model(x), y))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_loop_without_state_of_its_own_ends_with_the_same_bytes_whatever_is_killed(seed: int) -> None:
    came = simulate(_train, kills=3, seed=seed)
    assert came.same
    assert len(came.kills) == 3
    assert f"killed at step {came.kills[0][0]} before replica {came.kills[0][1]}, " in str(came)
    assert str(came).endswith("equal: all 8 versions that both have recorded, up to version 8")


def test_the_example_s_mistake_is_found_and_the_first_step_and_tensor_named() -> None:
    train = runpy.run_path(str(EXAMPLE))["train"]
    assert simulate(train, kills=0).same, "only a kill shows it"
    came = simulate(train, kills=2, seed=1)
    assert not came.same
    step, replica = came.kills[0]
    assert came.found.version == step + 1
    assert f"version {step + 1} (after step {step}) differs in" in str(came)
    assert f"replica {replica} at step {step}" in str(came)


def test_where_no_bytes_are_promised_it_says_so() -> None:
    with pytest.raises(ConfigError, match="fingerprints"):
        simulate(lambda: _train(sync=rp.Async()))


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_COORDINATOR", "127.0.0.1:1")
    with pytest.raises(UsageError, match="without a launcher"):
        simulate(_train)
