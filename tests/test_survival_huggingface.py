"""A streaming data set of Hugging Face's own library: a worker dies, everything dies, and no byte changes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from test_survival import AT, SCRIPT, Cluster, undisturbed_run

pytestmark = [
    pytest.mark.programs, pytest.mark.slow,
    pytest.mark.skipif(find_spec("datasets") is None, reason="Hugging Face's streams need `pip install datasets`"),
]  # fmt: skip

ENDS = 20  # with this step: each of three parts has 80 rows in two passes, and a step takes four
STREAM = "rp.Stream(rows.shuffle(seed=4, buffer_size=10), parts=3, passes=2)"
STREAMED = (
    SCRIPT.replace("job.train(model, data,", f"job.train(model, {STREAM}, collate_fn=pairs,")
    .replace("steps=24", "steps=100")
    .replace(
        "with rp.join() as job:",
        """
import datasets
here = Path(__file__).parent
rows = datasets.load_dataset("json", data_files=[str(here / f"{n}.jsonl") for n in range(3)], split="train",
                             streaming=True, cache_dir=str(here / f"cache{os.getpid()}"))
rows = rows.map(lambda row: {"twice": 2 * row["n"]})

def pairs(rows):
    return tuple(torch.stack([data[row[key] % 50][at] for row in rows]) for at, key in enumerate(("n", "twice")))

with rp.join() as job:""",
    )
)


def opened(home: Path) -> Cluster:
    cluster = Cluster(home)
    for file in range(3):
        lines = [f'{{"n": {file * 40 + row}}}\n' for row in range(40)]
        (home / f"{file}.jsonl").write_text("".join(lines))
    cluster.script.write_text(STREAMED)
    return cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = opened(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights, of one worker."""
    with undisturbed_run(opened(tmp_path_factory.mktemp("undisturbed"))) as done:
        assert f"the job ends with step {ENDS}" in done.output
        return done.hash


def test_a_killed_worker_changes_no_byte(cluster: Cluster, wanted: str) -> None:
    cluster.run("--workers", "2", "--servers", "1")
    cluster.until_caught_up(AT)
    cluster.processes()["worker1"].kill()
    cluster.open(100)
    assert cluster.ended() == 0, cluster.output
    assert cluster.hash == wanted


def test_a_resume_on_another_number_of_workers_changes_no_byte(cluster: Cluster, wanted: str) -> None:
    cluster.run("--workers", "2", "--servers", "1", "--snapshot-steps", "4")
    cluster.until_caught_up(AT + 2)
    cluster.until(lambda: any(event["version"] for event in cluster.events("Snapshotted")))
    assert cluster.launcher is not None
    cluster.launcher.send_signal(signal.SIGKILL)
    assert cluster.ended() == -signal.SIGKILL
    cluster.open(100)
    assert cluster.ask("resume", "--workers", "3", str(cluster.folder)) == 0, cluster.answer.read_text()
    assert cluster.hash == wanted
