"""`RallypointTrainer` on Ray: what a user of Ray Train gives it, and the `Result` that comes back."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import no_leaks, ray_nodes

from rallypoint.errors import UsageError

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_example_is_the_torch_one_with_six_lines_changed() -> None:
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("ray_torch.py", "ray_rallypoint.py"))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip("+ ")]
    assert len(changed) <= 6, changed
    assert sum(bool(line) for line in after) <= 15


@pytest.fixture(scope="module")
def _imported() -> None:
    """Before the leak police looks: Ray leaves a variable in the environment."""
    pytest.importorskip("ray.train")


@pytest.fixture
def nodes() -> Iterator[Any]:
    pytest.importorskip("ray.train")
    leaks = no_leaks()
    next(leaks)
    with ray_nodes(0, 3, 3) as cluster:
        yield cluster
    next(leaks, None)


@pytest.fixture
def _leak_police() -> None:
    """`nodes` looks for leaks instead."""


@pytest.mark.programs
@pytest.mark.slow
@pytest.mark.usefixtures("_leak_police")
def test_a_function_is_trained_on_the_nodes_and_a_result_comes_back(tmp_path: Path, nodes: Any) -> None:
    import safetensors.torch
    from ray.train import RunConfig, ScalingConfig

    from rallypoint.bridges.ray import RallypointTrainer, join, report

    def train(config: dict[str, Any]) -> None:
        import torch

        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
        with join() as job:
            run = job.train(model, data, replicas=4, batch=4, steps=config["steps"])
            for micro in run:
                with micro:
                    x, y = micro.batch
                    micro.backward((model(x) - y).square().mean())
            report(run, {"steps": config["steps"], "worker": job.id})

    trainer = RallypointTrainer(
        train, train_loop_config={"steps": 12}, scaling_config=ScalingConfig(num_workers=(1, 2)),
        run_config=RunConfig(name="first", storage_path=str(tmp_path)),
    )  # fmt: skip
    result = trainer.fit()
    assert result.path == str(tmp_path / "first")
    assert result.error is None
    assert result.metrics["steps"] == 12
    with result.checkpoint.as_directory() as folder:
        weights = safetensors.torch.load_file(Path(folder) / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {"weight": (4, 8), "bias": (4,)}
    with pytest.raises(UsageError, match="holds a finished run"):
        trainer.fit()


class Reported:
    """What `report` needs of a `ray.train.Checkpoint`."""

    def to_directory(self, folder: str) -> None:
        Path(folder).mkdir()


@pytest.mark.slow
@pytest.mark.usefixtures("_imported")
def test_the_last_reported_checkpoints_are_kept_and_numbers_of_torch_are_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from rallypoint.bridges import ray as bridge

    monkeypatch.setenv("RALLYPOINT_RAY_RESULTS", str(tmp_path))
    run: Any = type("Run", (), {"lead": True})
    monkeypatch.setenv("RALLYPOINT_RAY_KEEP", "5")
    for n in range(4):
        bridge.report(run, {"loss": torch.tensor(n)}, Reported())
    assert len(list(tmp_path.glob("checkpoint*"))) == 4
    monkeypatch.setenv("RALLYPOINT_RAY_KEEP", "2")
    for n in range(4, 6):
        bridge.report(run, {"loss": torch.tensor(n)}, Reported())
    bridge.report(run, {"loss": torch.tensor(0.5)})
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint_000004", "checkpoint_000005"]
    with pytest.raises(TypeError, match="a metric is a number or a text, not object"):
        bridge.report(run, {"loss": object()}, Reported())
    assert len((tmp_path / "reports.jsonl").read_text().splitlines()) == 7
    result = bridge.result_of(tmp_path)
    assert result.metrics == {"loss": 0.5}
    assert [metrics["loss"] for _, metrics in result.best_checkpoints] == [4, 5]
    assert result.checkpoint.path == str(tmp_path / "checkpoint_000005")


@pytest.mark.slow
@pytest.mark.usefixtures("_imported")
def test_ctrl_c_is_no_failed_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.train import RunConfig

    from rallypoint.bridges import ray as bridge

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(bridge.run, "launch", lambda plan, console: bridge.run.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        bridge.RallypointTrainer(print, run_config=RunConfig(name="x", storage_path=str(tmp_path))).fit()


def test_without_ray_train_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from rallypoint.bridges import ray as bridge

    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(UsageError, match=r"pip install 'ray\[train\]'"):
        bridge.RallypointTrainer(print)
