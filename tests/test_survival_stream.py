"""A job that reads a stream to its end: loader processes, workers and the coordinator die, and no byte changes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_survival import AT, SCRIPT, Cluster, alive, undisturbed_run

pytestmark = [pytest.mark.programs, pytest.mark.slow]

ENDS = 20  # with this step: each of three parts has 80 items in two passes, and a step takes four
STREAM = "rp.Stream(items, parts=3, passes=2), loader=rp.Loader(workers=1)"
STREAMED = (
    SCRIPT.replace("job.train(model, data,", f"job.train(model, {STREAM},")
    .replace("steps=24", "steps=100")
    .replace(
        "with rp.join() as job:",
        """
def items(part, epoch):
    for sample in range(part, 120, 3):
        x, y = data[(sample * 7 + epoch) % 50]
        yield x + torch.rand(6), y

with rp.join() as job:""",
    )
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.script.write_text(STREAMED)
    yield cluster
    cluster.close()


@pytest.fixture
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights, of one worker that loads on its training thread."""
    assert STREAM in STREAMED
    assert "steps=100" in STREAMED
    alone = Cluster(tmp_path_factory.mktemp("undisturbed"))
    alone.script.write_text(STREAMED.replace("workers=1", "workers=0"))
    with undisturbed_run(alone) as done:
        assert f"done: {ENDS} of " in done.output
        assert "(the stream is over, replica " in done.output
        return done.hash


def test_a_loader_process_a_worker_and_the_coordinator_are_killed(cluster: Cluster, wanted: str) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    cluster.until(lambda: bool(cluster.processes()["worker0"].children()))
    (loader,) = cluster.processes()["worker0"].children()
    loader.kill()
    cluster.until(lambda: not alive(loader))
    cluster.until_caught_up(AT + 2)
    cluster.processes()["worker1"].kill()
    cluster.until_caught_up(AT + 4)
    cluster.processes()["coordinator"].kill()
    cluster.open(100)
    assert cluster.ended() == 0, cluster.output
    assert [event["stopped_at"] for event in cluster.events("Finished")][-1] == ENDS
    assert cluster.hash == wanted


def test_all_are_killed_and_another_number_of_workers_goes_on(cluster: Cluster, wanted: str) -> None:
    cluster.run("--workers", "3", "--servers", "1", "--snapshot-steps", "4")
    cluster.until_caught_up(AT + 2)
    cluster.until(lambda: any(event["version"] for event in cluster.events("Snapshotted")))
    assert cluster.launcher is not None
    cluster.launcher.send_signal(signal.SIGKILL)
    assert cluster.ended() == -signal.SIGKILL
    cluster.open(100)
    assert cluster.ask("resume", "--workers", "2", str(cluster.folder)) == 0, cluster.answer.read_text()
    assert "2 workers" in cluster.answer.read_text()
    assert cluster.hash == wanted
