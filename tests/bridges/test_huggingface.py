"""`RallypointTrainer`: Hugging Face's Trainer trains as it does alone, also when a process is killed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import BATCH, SAMPLES, train_huggingface

import rallypoint as rp
from rallypoint.data.order import ReplicaSampler
from rallypoint.errors import ConfigError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.testing.processes import ProcessCluster
from support.programs import run_program

MISSING = not (find_spec("transformers") and find_spec("accelerate"))
pytestmark = [
    pytest.mark.skipif(MISSING, reason='pip install "rallypoint[huggingface]"'),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,  # importing transformers takes seconds
]

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import torch, trainings, rallypoint as rp
from transformers import TrainerCallback
class Strikes(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        trainings.strike(sys.argv[1], state.global_step, kwargs["optimizer"].optimizer.replica)
sums, step, _ = trainings.train_huggingface(rp.join(), sys.argv[1] + "/out", callbacks=[Strikes()])
print("trained", step, sum(map(abs, sums)), flush=True)
"""


def test_one_process_trains_as_plain_transformers(tmp_path: Path) -> None:
    """Evaluation, checkpoints and save_pretrained too."""
    with EmbeddedJob() as job:
        sums, step, files = train_huggingface(job, str(tmp_path / "job"))
    plain_sums, plain_step, plain_files = train_huggingface(None, str(tmp_path / "plain"))
    assert (step, files) == (plain_step, plain_files)
    assert files == ["checkpoint-20", "checkpoint-40", "model"]
    assert sums == plain_sums


def test_a_saved_model_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    with EmbeddedJob() as job:
        sums, _, _ = train_huggingface(job, str(tmp_path))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert [float(p.detach().double().sum()) for p in loaded.parameters()] == sums


def test_two_processes_train_as_one_with_two_accumulated_batches(tmp_path: Path) -> None:
    with ProcessCluster(workers=2, servers=1) as cluster:
        first, second = cluster.run(train_huggingface, str(tmp_path / "job"))
    plain, step, _ = train_huggingface(None, str(tmp_path / "plain"), accumulate=2)
    assert first[0] == second[0] == pytest.approx(plain, rel=1e-4, abs=1e-3)
    assert first[1] == second[1] == step == 20


@pytest.mark.programs
def test_a_process_that_is_killed_in_mid_epoch_goes_on_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(HERE)))
    results = []
    for kills in (True, False):
        home = tmp_path / f"kills-{kills}"
        home.mkdir()
        if not kills:
            (home / "struck").touch()
        given = ["-m", "rallypoint.cli", "run", "--workers", "2", "--servers", "1", str(script), str(home)]
        status, text = run_program(given, home / "output", env=dict(os.environ), cwd=home, timeout=240.0)
        assert status == 0, text
        assert ("was killed (SIGKILL): starting another" in text) == kills
        results += re.findall(r"trained (\d+) (\S+)", text)
    assert len(results) == 4
    assert len(set(results)) == 1, results


def test_going_on_from_a_checkpoint_is_refused_with_what_to_do() -> None:
    from transformers import TrainingArguments

    from rallypoint.bridges.huggingface import RallypointTrainer

    trainer = RallypointTrainer(torch.nn.Linear(1, 1), TrainingArguments("out", report_to=[], use_cpu=True))
    with pytest.raises(ConfigError, match="a job goes on with `rallypoint resume`"):
        trainer.train("checkpoint-20")


def test_a_process_that_would_read_the_first_batches_again_is_refused() -> None:
    from transformers import TrainingArguments

    from rallypoint.bridges.huggingface import RallypointTrainer

    args = TrainingArguments("out", report_to=[], use_cpu=True, ignore_data_skip=True)
    with pytest.raises(ConfigError, match="does not support ignore_data_skip"):
        RallypointTrainer(torch.nn.Linear(1, 1), args).train()


@pytest.mark.parametrize("what", ["iterable", "own loader", "by length"])
def test_data_that_every_process_would_read_whole_is_refused(what: str) -> None:
    from transformers import TrainingArguments

    from rallypoint.bridges.huggingface import RallypointTrainer

    rows = [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(8)]

    class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return iter(rows)

    class Trainer(RallypointTrainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(rows) if what == "own loader" else super().get_train_dataloader()

    strategy = "group_by_length" if what == "by length" else "random"
    args = TrainingArguments("out", report_to=[], use_cpu=True, max_steps=2, train_sampling_strategy=strategy)
    trainer = Trainer(torch.nn.Linear(1, 1), args, train_dataset=Stream() if what == "iterable" else rows)
    with EmbeddedJob() as job:
        trainer._joined = job
        with pytest.raises(ConfigError, match=r"a map-style data set: give .*no IterableDataset"):
            trainer.train()


def test_accelerate_prepares_a_wrapped_optimizer() -> None:
    """As for one process: of its distributed types none is Rallypoint's."""
    from accelerate import Accelerator

    from rallypoint.bridges.wrap import wrap_in

    accelerator = Accelerator(cpu=True)
    with EmbeddedJob() as job:
        model = torch.nn.Linear(2, 1)
        wrapped = wrap_in(job, model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        model, optimizer = accelerator.prepare(model, wrapped)
        before = model.weight.detach().clone()
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(wrapped, rp.WrappedOptimizer)
        assert torch.allclose(model.weight, before - 0.2)


def test_the_example_is_the_plain_one_with_one_line_changed() -> None:
    before, after = ((EXAMPLES / f"huggingface_{name}.py").read_text().splitlines() for name in ("plain", "rallypoint"))
    new = [line for line in after if line and line not in before]
    assert new == [
        "from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments",
        "from rallypoint.bridges.huggingface import RallypointTrainer as Trainer",
    ]  # one import in place of another


def test_replicas_read_the_parts_of_each_global_batch() -> None:
    whole = ReplicaSampler(SAMPLES, replicas=1, batch=2 * BATCH, shuffled=True, seed=3)
    parts = [ReplicaSampler(SAMPLES, replicas=2, batch=BATCH, shuffled=True, seed=3) for _ in range(2)]
    for replica, part in enumerate(parts):
        part.replica = replica
    for epoch in range(2):
        for sampler in (whole, *parts):
            sampler.set_epoch(epoch)
        order, first, second = list(whole), list(parts[0]), list(parts[1])
        assert sorted(order) == list(range(SAMPLES))
        for step in range(len(order) // (2 * BATCH)):
            own = slice(step * BATCH, (step + 1) * BATCH)
            assert first[own] + second[own] == order[2 * BATCH * step : 2 * BATCH * (step + 1)]
    parts[0].skip = 3
    assert list(parts[0]) == first[3:]
    assert list(parts[0]) == first
