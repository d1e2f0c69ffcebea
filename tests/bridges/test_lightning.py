"""`RallypointStrategy`: Lightning's Trainer ends with the bytes of plain Lightning, also when a process is killed."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainings import fit_lightning

from rallypoint.errors import ConfigError, DataError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.testing.processes import ProcessCluster
from rallypoint.worker.wrapped import WrappedOptimizer
from support.programs import run_program

pytestmark = [
    pytest.mark.skipif(not find_spec("lightning"), reason='Lightning is missing: pip install "rallypoint[lightning]"'),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,  # importing Lightning takes seconds
]

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import torch, trainings, rallypoint as rp
model = trainings.lightning_module
trainings.lightning_module = lambda: model(sys.argv[1])
print("weights", *trainings.fit_lightning(rp.join(), sys.argv[1] + "/checkpoints")[:2], flush=True)
"""


def test_one_process_trains_as_plain_lightning_with_its_callbacks(tmp_path: Path) -> None:
    with EmbeddedJob() as job:
        weights, step, saved = fit_lightning(job, str(tmp_path / "job"))
    assert (weights, step, saved) == fit_lightning(None, str(tmp_path / "plain"))
    assert saved == ["step=40.ckpt"]


def test_accumulated_gradients_are_lightnings_own(tmp_path: Path) -> None:
    with EmbeddedJob() as job:
        ours = fit_lightning(job, str(tmp_path / "job"), accumulate=4)
    assert ours == fit_lightning(None, str(tmp_path / "plain"), accumulate=4)


def test_the_job_is_told_each_steps_loss_of_all_its_accumulated_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, log = list[float](), WrappedOptimizer.log

    def heard(self: WrappedOptimizer, loss: torch.Tensor) -> None:
        told.append(float(loss))
        log(self, loss)

    monkeypatch.setattr(WrappedOptimizer, "log", heard)
    with EmbeddedJob() as job:
        _, steps, _ = fit_lightning(job, str(tmp_path), accumulate=4)
    by_step = [told[at : at + 4] for at in range(0, len(told), 4)]
    assert len(by_step) == steps
    assert all(parts[0] > 0.0 and parts == sorted(parts) for parts in by_step)


def test_early_stopping_ends_the_job(tmp_path: Path) -> None:
    """After the second validation in an epoch of its own: Lightning ends there, and so does the job."""
    more: dict[str, Any] = {"val_check_interval": 0.25}
    with EmbeddedJob() as job:
        ours = fit_lightning(job, str(tmp_path / "job"), patience=1, **more)
    assert ours == fit_lightning(None, str(tmp_path / "plain"), patience=1, **more)
    assert ours[1] == 10


@pytest.mark.parametrize(("more", "why"), [
    ({"gradient_clip_val": 1.0}, "give it clip="),
    ({"max_steps": -1, "max_epochs": -1}, "give the Trainer max_steps or max_epochs"),
])  # fmt: skip
def test_what_has_no_place_is_refused_with_what_to_do(tmp_path: Path, more: dict[str, Any], why: str) -> None:
    with EmbeddedJob() as job, pytest.raises(ConfigError, match=why):
        _fit_with(job, tmp_path, more)


def test_a_gpu_is_named_by_its_number_each_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.set_device``, which Lightning calls with it, refuses "cuda"."""
    from rallypoint.bridges.lightning import RallypointStrategy

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert RallypointStrategy().root_device == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert RallypointStrategy().root_device == torch.device("cuda", 3)


def test_a_loader_that_is_made_again_leaves_out_batches_in_the_epoch_of_the_restart_only() -> None:
    """``Trainer(reload_dataloaders_every_n_epochs=1)`` in a process that began in mid-epoch."""
    from lightning.pytorch.trainer.states import TrainerFn

    from rallypoint.bridges.lightning import RallypointStrategy

    strategy = RallypointStrategy("cpu")
    strategy._job, strategy._epoch, strategy._skip = SimpleNamespace(started=2), 1, 3
    read = {}
    for epoch in (1, 2):
        trainer = SimpleNamespace(training=True, state=SimpleNamespace(fn=TrainerFn.FITTING), current_epoch=epoch)
        strategy._lightning_module = SimpleNamespace(trainer=trainer)
        loader = strategy.process_dataloader(torch.utils.data.DataLoader(list(range(40)), batch_size=2))
        read[epoch] = [int(batch[0]) for batch in loader]
    assert read == {1: [12, 16, 20, 24, 28, 32, 36], 2: [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]}


def test_a_sampler_that_reads_in_another_way_is_refused() -> None:
    from lightning.pytorch.trainer.states import TrainerFn

    from rallypoint.bridges.lightning import RallypointStrategy

    strategy, data = RallypointStrategy("cpu"), list(range(40))
    strategy._job = SimpleNamespace(started=2)
    trainer = SimpleNamespace(training=True, state=SimpleNamespace(fn=TrainerFn.FITTING), current_epoch=0)
    strategy._lightning_module = SimpleNamespace(trainer=trainer)
    few = torch.utils.data.RandomSampler(data, replacement=True, num_samples=8)
    with pytest.raises(DataError, match=r"a DataLoader with a RandomSampler was given: .* in that order"):
        strategy.process_dataloader(torch.utils.data.DataLoader(data, batch_size=2, sampler=few))


def _fit_with(job: Any, folder: Path, more: dict[str, Any]) -> None:
    import lightning
    from trainings import lightning_module

    from rallypoint.bridges.lightning import RallypointStrategy

    strategy = RallypointStrategy("cpu")
    strategy._job = job
    data = torch.utils.data.TensorDataset(torch.zeros(8, 8), torch.zeros(8, 4))
    trainer = lightning.Trainer(
        strategy=strategy, logger=False, enable_progress_bar=False, default_root_dir=folder, limit_val_batches=0,
        enable_checkpointing=False, **more,
    )  # fmt: skip
    trainer.fit(lightning_module(), torch.utils.data.DataLoader(data, batch_size=2))


def test_two_processes_train_as_one_with_two_accumulated_batches(tmp_path: Path) -> None:
    with ProcessCluster(workers=2, servers=1) as cluster:
        first, second = sorted(cluster.run(fit_lightning, str(tmp_path / "job")))
    assert second == fit_lightning(None, str(tmp_path / "plain"), accumulate=2)
    assert first == (*second[:2], [])  # replica 0 saves


@pytest.mark.programs
def test_a_process_that_is_killed_in_mid_epoch_goes_on_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(HERE)))
    given = ["-m", "rallypoint.cli", "run", "--workers", "2", "--servers", "1", str(script), str(tmp_path)]
    status, text = run_program(given, tmp_path / "output", env=dict(os.environ), cwd=tmp_path, timeout=240.0)
    assert status == 0, text
    weights, step, _ = fit_lightning(None, str(tmp_path / "plain"), accumulate=2)
    assert re.findall(r"weights (\w{64}) (\d+)", text) == [(weights, str(step))] * 2, text
    assert "was killed (SIGKILL): starting another" in text


def test_the_example_is_the_plain_one_with_two_lines_changed() -> None:
    before, after = ((EXAMPLES / f"lightning_{name}.py").read_text().splitlines() for name in ("plain", "rallypoint"))
    assert sum(bool(line) and line not in before for line in after) == 2
    assert sum(line not in after for line in before) == 1
