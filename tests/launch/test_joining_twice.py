"""Who joins a job for the second time is told at once: the next stage of a script, and a child process that imports the
script anew (multiprocessing's spawn)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import run_program

pytestmark = pytest.mark.programs

TWICE = """
import os
import rallypoint as rp
from rallypoint.coordinator.service import CoordinatorService
from rallypoint.core.cluster.terms import Terms
from rallypoint.errors import UsageError

services = [CoordinatorService(terms=Terms(), token="secret") for _ in range(2)]
os.environ |= {"RALLYPOINT_TOKEN": "secret", "RALLYPOINT_ID": "worker0"}
for service in services:  # another launcher's job is another job
    service.start()
    os.environ["RALLYPOINT_COORDINATOR"] = service.address
    job = rp.join()
    for state in ("open", "closed"):
        try:
            rp.join()
        except UsageError as error:
            print("refused while it is", state, error, flush=True)
        job.close()
for service in services:
    service.close()
"""


def test_a_second_stage_under_a_launcher_is_refused_at_once(tmp_path: Path) -> None:
    status, said = run_program(["-c", TWICE], tmp_path / "output", env=dict(os.environ))
    assert status == 0, said
    for state in ("open", "closed"):
        assert said.count(f"refused while it is {state} this process has joined the job of its launcher already") == 2
    assert "start another run with a script of its own" in said


def test_alone_a_script_may_have_several_jobs() -> None:
    import torch

    import rallypoint as rp

    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    model = torch.nn.Linear(4, 1)
    for _ in range(2):
        before = model.weight.detach().clone()
        with rp.join() as job:
            for micro in job.train(model, data, replicas=1, batch=4, steps=1, optimizer=rp.SGD(lr=0.1)):
                with micro:
                    micro.backward(model(micro.batch[0]).mean())
        assert not torch.equal(model.weight, before)


SCRIPT = """
import multiprocessing, sys
import rallypoint as rp

def work(queue):
    queue.put("worked")

def begin():
    job = rp.join()
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    child.join()
    print("the child ended with", child.exitcode, "" if queue.empty() else queue.get(), flush=True)
    job.close()

{start}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("start", "ended"), [
    ("begin()", "the child ended with 1"),
    ("if __name__ == '__main__':\n    begin()", "the child ended with 0 worked"),
], ids=["without a main guard", "with it"])  # fmt: skip
def test_a_child_that_imports_the_script_does_not_join(tmp_path: Path, start: str, ended: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(start=start))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert ended in done.stdout
    said = 'Put all that the script does below if __name__ == "__main__":'
    assert (said in done.stderr) is ("with 1" in ended)
    assert "Traceback" not in done.stderr


def test_only_a_process_that_imports_the_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    import rallypoint as rp
    from rallypoint.errors import UsageError
    from rallypoint.launch.embedded import EmbeddedJob

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="imports the script anew"):
        rp.join()
    monkeypatch.undo()
    with rp.join() as job:
        assert isinstance(job, EmbeddedJob)
