"""Whatever a user gets wrong is one sentence that says what to do, and at most their own traceback."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import rallypoint as rp
from rallypoint.coordinator.service import CoordinatorService
from rallypoint.core.cluster.terms import Terms
from rallypoint.errors import DataError, ModelError, NonFiniteLoss
from support.programs import run_program

pytestmark = pytest.mark.programs

SCRIPT = """
import math, os, sys
import torch
import rallypoint as rp

what, me = sys.argv[1], os.environ["RALLYPOINT_ID"]
second = me == "worker1"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3 if what == "models" and second else 2))
if what == "buffers":
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
data = [torch.ones(4) * i for i in range(20)]
if what == "content" and second:
    data[0] = torch.zeros(4) - 1
with rp.join() as job:
    run = job.train(model, data, replicas=2, batch=2, steps=4, optimizer=rp.SGD(lr=0.001))
    for micro in run:
        with micro:
            if what == "bug" and second and micro.step == 1:
                raise ValueError("the [bold]user's[/bold] own [/mistake]")
            loss = model(micro.batch).square().mean()
            if what in ("nan", "buffers") and micro.step == 2 and micro.replica == 1:
                loss = loss * math.nan
            micro.backward(loss)
    print("the last line of", me)
"""


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    status: int
    text: str

    @property
    def tracebacks(self) -> int:
        return self.text.count("Traceback (most recent call last)")


def rallypoint(*arguments: str, cwd: Path, **environment: str) -> Outcome:
    """``rallypoint ARGUMENTS`` as a user runs it."""
    env = {**os.environ, "COLUMNS": "200", **environment}
    return Outcome(*run_program(["-m", "rallypoint.cli", *arguments], cwd / "output", env=env, cwd=cwd))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Outcome]:
    """``rallypoint run`` of the script above: run("what", *options)."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(what: str, *options: str, workers: int = 1) -> Outcome:
        folder = str(tmp_path / "run")
        base = ("run", "--workers", str(workers), "--servers", "1", "--folder", folder)
        return rallypoint(*base, *options, str(script), what, cwd=tmp_path)

    return run


def events(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]


# ---- before anything is started --------------------------------------------------------------------------------


@pytest.mark.some("export *", "run .-", "worker-")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "nowhere.py"), "error: there is no script nowhere.py"),
        (("run", "."), "error: . is a folder: name the script in it"),
        (("worker", "."), "error: . is a folder: name the script in it"),
        (("train", "bert"), "error: there is no recipe bert: choose one of gpt, resnet"),
        (("train", "gan"), "error: the recipe gan is gone: it is a script now"),
        (("run", "--set", "steps", "here.py"), "error: --set steps: write it as key=value, such as steps=200"),
        (("run", "--config", "no.toml", "here.py"), "error: the configuration file no.toml cannot be read"),
        (("run", "--trace-steps", "5:7", "here.py"), "error: there is no option --trace-steps: --trace FILE@5:7"),
        (("top", "run"), "error: there is no command top: rallypoint watch RUN --terminal"),
        (("token", "--tls", "certificates", "--role", "worker"), "error: --tls makes certificates of all roles"),
        (("watch", "a", "b", "--track", "wandb:x"), "error: --track is for one run: name one folder"),
        (("replay", "a", "b", "--replica", "1"), "error: two runs are compared by what they have recorded"),
        (("run", "--workers", "8:2", "here.py"), "error: --workers 8:2: the least number comes first, as in 2:8"),
        (("run", "--workers", "²", "here.py"), "error: '²' is not a number of workers: write 4, or 2:8"),
        (("worker",), "error: which script? rallypoint worker [options] train.py"),
        (("worker", "--coordinator", "127.0.0.1:1", "here.py"), "error: a worker needs the job's token: give --token"),
        (("run", "--servers", "1", "--replication", "2", "here.py"), "--replication 2 needs at least two servers"),
        (("run", "--compression", "zip", "here.py"), "'zip' is no compression: choose zstd, zstd-planes or none"),
        (("resume", "."), "error: . is not the folder of a run: there is no run.json in it"),
        (("snapshot", "."), "error: no run is under way in ."),
        (("export", "nowhere", "--to", "model.onnx"), "error: model.onnx has no known ending"),
        (("export", "nowhere", "--to", "model.pt"), "error: "),
        (("run", "--bind", "4700", "here.py"), "'4700' is not an address: write host:port"),
        (("run", "--bind", "203.0.113.1:0", "here.py"), "cannot listen at 203.0.113.1:0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_command_is_one_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "here.py").touch()
    outcome = rallypoint(*arguments, cwd=tmp_path)
    assert outcome.status == 1
    assert sentence in outcome.text
    assert outcome.tracebacks == 0


@pytest.mark.slow
def test_a_port_in_use_is_one_sentence(run: Callable[..., Outcome]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = run("train", "--bind", f"127.0.0.1:{port}")
    assert outcome.status == 1
    assert f"port {port} on 127.0.0.1 is in use by another process: choose another" in outcome.text
    assert outcome.tracebacks == 0


@pytest.mark.slow
def test_a_wrong_token_is_one_sentence(tmp_path: Path) -> None:
    coordinator = CoordinatorService(terms=Terms(), token="the right token of this job")
    coordinator.start()
    try:
        outcome = rallypoint(
            "server", "--coordinator", coordinator.address, "--id", "s0", cwd=tmp_path, RALLYPOINT_TOKEN="another token"
        )
    finally:
        coordinator.close()
    assert outcome.status == 1
    why = f"error: {coordinator.address} refuses server s0 without proving that it knows the job token: either the"
    assert why in outcome.text
    assert outcome.tracebacks == 0
    assert "the right token of this job" not in outcome.text


# ---- what the script brings ------------------------------------------------------------------------------------


@pytest.mark.some("models*")
@pytest.mark.parametrize(("what", "sentence"), [
    ("models", r"(?s)brought a different model: parameter 1\.(.*\[3, 5\]|bias \[3\])"),
    ("content", "brought a different data set: sample 0 has other content"),
])  # fmt: skip
def test_what_differs_between_two_scripts_of_one_job_is_told(
    run: Callable[..., Outcome], what: str, sentence: str
) -> None:
    outcome = run(what, workers=2)
    assert outcome.status == 1
    assert re.search(sentence, outcome.text), outcome.text
    assert outcome.tracebacks == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--wokers", "3", "x.py"], "there is no option --wokers: did you mean --workers? (the script's own"),
        (["run", "--sevrers=3", "x.py"], "there is no option --sevrers: did you mean --servers? (the script's own"),
        (["train", "--stand-by", "1", "gpt"], "there is no option --stand-by: did you mean --standby? (the recipe's"),
        (["import", "w.pt", "--folder", "f", "x.py"], "--folder stands before all else: rallypoint import --folder"),
        (["run", "--zzz", "x.py"], "there is no option --zzz; `rallypoint run --help` lists them (the script's"),
    ],
)
def test_a_misspelt_option_is_not_taken_for_the_script(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "x.py").write_text("print('it ran')")
    status, text = run_program(
        ["-m", "rallypoint.cli", *arguments], tmp_path / "output", env=dict(os.environ), cwd=tmp_path
    )
    assert status == 1
    assert text.startswith(f"error: {sentence}")
    assert not (tmp_path / "runs").exists(), "no run was begun"


@pytest.mark.some("arguments0*")
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--workers", "4", "--set=x=1"], "hint: --workers, --set after x.py goes to x.py; if the cluster is meant: "),
        (["--mine", "4", "workers"], ""),
    ],
)
def test_an_option_of_ours_after_the_script_is_the_script_s_and_is_told(
    tmp_path: Path, arguments: list[str], hint: str
) -> None:
    (tmp_path / "x.py").write_text("import sys; print(sys.argv[1:], flush=True)")
    outcome = rallypoint("run", "--workers", "1", "--servers", "1", "x.py", *arguments, cwd=tmp_path)
    assert str(arguments) in outcome.text
    assert outcome.text.count("hint:") == bool(hint)
    assert hint in outcome.text


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("lr=3", "error: lr is no setting: did you mean optimizer.lr?"),
        ("sync=allreduce", "error: sync is 'allreduce': write rp.AllReduce() (--set sync.type=all-reduce)"),
        ("stepz=3", "error: stepz is no setting: did you mean steps?"),
        ("optimizer.learning=1", "error: optimizer.learning is no setting of optimizer: there are "),
        ("batch=lots", "error: batch is 'lots': it must be a whole number of at least 1"),
        ("clip=nan", "error: clip is nan: it must be a number above 0, or none"),
        ("optimizer.lr=inf", "error: optimizer.lr is inf: it must be a number of at least 0, or a part with"),
        ("sync=async", "error: sync is 'async': write rp.Async() (--set sync.type=async)"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(
    run: Callable[..., Outcome], setting: str, sentence: str
) -> None:
    outcome = run("train", "--set", setting)
    assert outcome.status == 1
    assert outcome.text.startswith(sentence)
    assert len(outcome.text.splitlines()) == 1


@pytest.mark.slow
def test_no_text_for_the_gpt_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    outcome = rallypoint("train", "--workers", "1", "--servers", "1", "gpt", "--data", "empty", cwd=tmp_path)
    assert outcome.status == 1, outcome.text
    assert "empty holds no text" in outcome.text, outcome.text
    assert "give --data a folder with text in it" in outcome.text, outcome.text
    assert outcome.tracebacks == 0


def test_a_users_own_mistake_is_one_traceback(run: Callable[..., Outcome]) -> None:
    outcome = run("bug", workers=2)
    assert outcome.status == 1
    mistake = "ValueError: the [bold]user's[/bold] own [/mistake]"  # no markup, though it looks so
    assert f"worker1 | {mistake}" in outcome.text, outcome.text
    assert f"failed: worker1: {mistake}" in outcome.text, outcome.text
    assert "the last line of" not in outcome.text
    assert outcome.tracebacks == 1


# ---- losses that are not finite --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("how", "step"), [("nan", 2), ("bug", 1), ("buffers", 2)])
def test_a_run_that_fails_stores_its_newest_version_and_goes_on_from_it_with_other_settings(
    run: Callable[..., Outcome], tmp_path: Path, how: str, step: int
) -> None:
    failed = run(how, workers=1 if how == "buffers" else 2)  # one worker: replica 0's buffers are one version ahead
    assert failed.status == 1
    assert f"snapshot of step {step}: " in failed.text
    assert f"to go on from step {step}, the last snapshot: rallypoint resume {tmp_path / 'run'}" in failed.text

    refused = rallypoint("resume", "run", "--set", "replicas=4", cwd=tmp_path)
    assert refused.text == (
        "error: replicas is 2 and cannot become 4: it decides which samples every step takes, and the steps before the "
        "snapshot have taken theirs\n"
    )
    (tmp_path / "script.py").write_text(SCRIPT.replace('what == "bug"', "False"))
    resumed = rallypoint("resume", "run", "--set", "nonfinite=skip", "--set", "optimizer.lr=1e-4", cwd=tmp_path)
    assert resumed.status == 0, resumed.text
    assert f"going on from step {step}: snapshot step-0000000{step}-" in resumed.text
    changes = ["nonfinite is skip (it was stop)", "optimizer.lr is 0.0001 (it was 0.001)"]
    assert all(f"from step {step} on, {change}" in resumed.text for change in changes)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["changes"] == [
        f"from step {step} on, {change}" for change in changes
    ]
    said = [str(event["text"]) for event in events(tmp_path) if event["type"] == "Say"]
    assert sum("with another setting: " in text for text in said) == 2
    assert events(tmp_path)[-1]["type"] == "Finished"


def test_a_nan_skips_its_step_and_the_job_goes_on(run: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run("nan", "--set", "nonfinite=skip")
    assert outcome.status == 0, outcome.text
    assert "step 2 skipped: the loss of replica 1 is not finite" in outcome.text, outcome.text
    assert [event["replicas"] for event in events(tmp_path) if event["type"] == "Skipped"] == [[1]]
    assert events(tmp_path)[-1]["type"] == "Finished"
    assert outcome.tracebacks == 0


# ---- alone, in one process -------------------------------------------------------------------------------------

DATA = [torch.ones(4) * i for i in range(8)]


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


def test_a_model_without_a_trainable_parameter_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(ModelError, match="no trainable parameter: set requires_grad=True on what should learn"):
        train(model.requires_grad_(False))


def test_an_empty_dataset_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(DataError, match="the dataset is empty: there is nothing to train on"):
        train(model, data=[])


def test_a_model_can_be_trained_again_after_a_run_that_failed(model: torch.nn.Module) -> None:
    with pytest.raises(NonFiniteLoss):
        train(model, lambda micro: micro.backward(model(micro.batch).mean() * float("nan")))
    train(model)


Body = Callable[[rp.Micro], None]


def train(model: torch.nn.Module, body: Body | None = None, data: list[torch.Tensor] = DATA) -> None:
    with rp.join() as job:
        for micro in job.train(model, data, steps=2, batch=2):
            with micro:
                if body is None:
                    micro.backward(model(micro.batch).mean())
                else:
                    body(micro)


@pytest.mark.some("run *")
@pytest.mark.parametrize("arguments", ["run train.py", "coordinator", "compare a b"])
def test_a_current_folder_that_was_deleted_is_one_sentence(tmp_path: Path, arguments: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    start = f"rmdir {gone} && exec {sys.executable} -m rallypoint.cli {arguments}"
    done = subprocess.run(["sh", "-c", start], cwd=gone, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the current folder has been deleted: change to another one (cd)\n"
