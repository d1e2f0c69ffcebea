"""Kill processes of a wrapped job: it ends with the bytes of plain training, and nobody else starts again for it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from own_loops import train_plain

from rallypoint.errors import UsageError
from rallypoint.launch.commands.resume import going_on
from rallypoint.launch.observing.beside import resolved_of
from support.programs import run_program

pytestmark = pytest.mark.programs

HERE = Path(__file__).parent
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import psutil
sys.path.insert(0, {here!r})
from own_loops import STEPS, Net, build, loss_of
import rallypoint as rp
from rallypoint.worker.tensors import weights_hash

strikes, kind = sys.argv[1].split("+"), sys.argv[2]
struck = Path("struck")
model = Net()
optimizer, schedule = build(kind, model)
optimizer = rp.wrap(model, optimizer, steps=STEPS, schedule=schedule, decay_1d=True)
print("replica", optimizer.replica, "begins at", optimizer.position, flush=True)
for step in range(optimizer.position, STEPS):
    loss_of(model, step, optimizer.replica).backward()
    if step == 7 and optimizer.replica == 1 and not struck.exists():
        struck.touch()
        for process in psutil.Process(os.getppid()).children():
            if process.name() in strikes:
                process.kill()
                process.wait()
        if "me" in strikes:
            os.kill(os.getpid(), signal.SIGKILL)
        if "leave" in strikes:
            os.kill(os.getpid(), signal.SIGTERM)
            # one is the first view; without the wait all may be over before it is replaced
            while Path("run/events.jsonl").read_bytes().count(b'"workers":[]') < 2:
                time.sleep(0.01)
    optimizer.step()
    if schedule is not None:
        schedule.step()
print("weights", weights_hash(model), flush=True)
"""


def run(home: Path, strikes: str, kind: str, *options: str) -> str:
    script = home / "script.py"
    script.write_text(SCRIPT.format(here=str(HERE)))
    given = ["-m", "rallypoint.cli", "run", "--workers", "2", "--folder", str(home / "run"), *options]
    status, text = run_program(
        [*given, str(script), strikes, kind], home / "output", env=dict(os.environ), cwd=home, timeout=240.0
    )
    assert status == 0, text
    assert re.findall(r"weights (\w{64})", text) == [train_plain(kind, 2)] * 2, text
    return text


@pytest.mark.parametrize("kind", ["servers", pytest.param("workers", marks=pytest.mark.slow)])
def test_a_killed_process_is_started_again_at_the_jobs_step(tmp_path: Path, kind: str) -> None:
    text = run(tmp_path, "me", kind)
    begun = sorted(re.findall(r"replica \d begins at \d+", text))
    assert begun == ["replica 0 begins at 0", "replica 1 begins at 0", "replica 1 begins at 7"]
    with pytest.raises(UsageError, match="go on with --workers 2, as this job began"):
        going_on(tmp_path / "run", print, {"steps": 40}, cluster={"workers": "3"})
    assert "replicas" in (settings := resolved_of(tmp_path / "run"))
    assert ("optimizer.lr" in settings) == (kind == "servers"), "where workers step, the script has it"


def test_a_process_that_is_told_to_leave_is_replaced(tmp_path: Path) -> None:
    """By `rallypoint drain`, or by whoever sends SIGTERM: nobody else can compute its replica."""
    text = run(tmp_path, "leave", "workers")
    assert "replica 1 begins at 0" in text
    assert len(re.findall(r"replica 1 begins at \d+", text)) == 2
    assert "ended with status 75: starting another" in text
    assert "start another process in the place of this one" not in text  # said to the launcher


@pytest.mark.slow
def test_a_script_that_ends_with_75_for_reasons_of_its_own_fails_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, rallypoint as rp\nrp.join()\nsys.exit(75)\n")
    status, text = run_program(
        ["-m", "rallypoint.cli", "run", "--workers", "1", str(script)], tmp_path / "output", env=dict(os.environ),
        cwd=tmp_path, timeout=240.0,
    )  # fmt: skip
    assert status == 1
    assert "failed: worker0 ended with status 75" in text
    assert "starting another" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [
    ("servers", ("--servers", "2", "--replication", "2")), ("workers", ("--servers", "1")),
])  # fmt: skip
def test_with_a_backup_or_where_workers_step_a_lost_server_starts_no_loop_again(
    tmp_path: Path, kind: str, options: tuple[str, ...]
) -> None:
    assert run(tmp_path, "server0", kind, *options).count("begins at") == 2


@pytest.mark.slow
def test_a_job_that_goes_back_to_a_snapshot_starts_its_loops_there(tmp_path: Path) -> None:
    text = run(tmp_path, "server0+me", "servers", "--servers", "1", "--snapshot-steps", "5")
    assert "to be started again: the job has gone back to step" in text
    assert "ended with status 75: starting another" in text


@pytest.mark.slow
def test_a_standby_process_takes_the_place_of_a_killed_one(tmp_path: Path) -> None:
    text = run(tmp_path, "me", "servers", "--standby", "1")
    assert "replica 1 begins at 7" in text


@pytest.mark.some("error")
@pytest.mark.parametrize(("last", "sentence"), [
    ("", "its script has ended at step 1 of 5: call optimizer.finish()"),
    ("raise ValueError('no such file')", "failed: worker0: ValueError: no such file"),
], ids=["end", "error"])  # fmt: skip
def test_a_script_that_ends_early_fails_the_job_with_a_sentence(tmp_path: Path, last: str, sentence: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, rallypoint as rp\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = rp.wrap(model, rp.SGD(lr=0.1), steps=5)\n"
        f"model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n{last}\n"
    )
    status, text = run_program(
        ["-m", "rallypoint.cli", "run", "--workers", "1", str(script)], tmp_path / "output", env=dict(os.environ),
        cwd=tmp_path, timeout=240.0,
    )  # fmt: skip
    assert status != 0
    assert sentence in " ".join(text.split())
    status, text = run_program([str(script)], tmp_path / "alone", env=dict(os.environ), cwd=tmp_path)
    assert status == bool(last)
    assert (f"warning: {sentence}" if status == 0 else "ValueError: no such file") in text
    assert "is gone" not in text


# ---- loops over epochs, and what a process that is started again would do wrong in silence ----

EPOCHS = """
import os, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, {here!r})
from own_loops import Net
import rallypoint as rp
from rallypoint.worker.tensors import weights_hash

how, struck = sys.argv[1], Path("struck")
data = torch.utils.data.TensorDataset(torch.randn(20, 6, generator=torch.Generator().manual_seed(1)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model = Net()
inner = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(inner, 3)
given = {{}} if how == "a scheduler that is not given" else {{"schedule": schedule}}
optimizer = rp.wrap(model, inner, steps=13, **given)


def two_loops():
    for epoch in range(3):
        yield from ((epoch, batch) for batch in loader)


for epoch, (x,) in two_loops() if how == "not asked" else optimizer.epochs(loader):
    model(x).square().mean().backward()
    if optimizer.run.position == 7 and optimizer.replica == 1 and how != "undisturbed" and not struck.exists():
        struck.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    schedule.step()
print("weights", weights_hash(model), flush=True)
"""


def run_epochs(home: Path, how: str) -> tuple[int, str]:
    home.mkdir(exist_ok=True)
    (home / "script.py").write_text(EPOCHS.format(here=str(HERE)))
    argv = ["-m", "rallypoint.cli", "run", "--workers", "2", "--folder", str(home / "run"), "script.py", how]
    return run_program(argv, home / "output", env=dict(os.environ), cwd=home, timeout=240.0)


@pytest.mark.slow
def test_a_loop_over_epochs_goes_on_where_the_job_is(tmp_path: Path) -> None:
    found = []
    for how in ("undisturbed", "killed"):
        status, text = run_epochs(tmp_path / how, how)
        assert status == 0, text
        found += re.findall(r"weights (\w{64})", text)
    assert len(found) == 4
    assert len(set(found)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [
    ("not asked", "this process begins at step 7 of the job, and its loop has not asked where"),
    ("a scheduler that is not given", "give it to rp.wrap(model, optimizer, schedule=scheduler, ...)"),
])  # fmt: skip
def test_a_loop_that_would_go_on_at_the_wrong_place_is_an_error_at_once(tmp_path: Path, how: str, said: str) -> None:
    status, text = run_epochs(tmp_path, how)
    assert status == 1, text
    assert said in text, text
    assert "own_schedule" not in text
