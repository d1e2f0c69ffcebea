"""A job that reads a stream to its end: loader processes, workers and the coordinator die, and no byte changes.

The stream is the script's own, read by loader processes, or a streaming data set of Hugging Face's library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from test_survival import AT, SCRIPT, Cluster, alive, undisturbed_run

pytestmark = [pytest.mark.programs, pytest.mark.slow]

ENDS = 20  # with this step: each of three parts has 80 items in two passes, and a step takes four
STREAMS = {
    "own": "rp.Stream(items, parts=3, passes=2), loader=rp.Loader(workers=1)",
    "huggingface": "rp.Stream(rows.shuffle(seed=4, buffer_size=10), parts=3, passes=2), collate_fn=pairs",
}
BEFORE = {
    "own": """
def items(part, epoch):
    for sample in range(part, 120, 3):
        x, y = data[(sample * 7 + epoch) % 50]
        yield x + torch.rand(6), y
""",
    "huggingface": """
import datasets
here = Path(__file__).parent
rows = datasets.load_dataset("json", data_files=[str(here / f"{n}.jsonl") for n in range(3)], split="train",
                             streaming=True, cache_dir=str(here / f"cache{os.getpid()}"))
rows = rows.map(lambda row: {"twice": 2 * row["n"]})

def pairs(rows):
    return tuple(torch.stack([data[row[key] % 50][at] for row in rows]) for at, key in enumerate(("n", "twice")))
""",
}
NEEDED = pytest.mark.skipif(find_spec("datasets") is None, reason="Hugging Face's streams need `pip install datasets`")


def opened(home: Path, kind: str) -> Cluster:
    script = SCRIPT.replace("job.train(model, data,", f"job.train(model, {STREAMS[kind]},")
    assert script.count("rp.Stream(") == script.count("steps=24") == 1
    for file in range(3):
        lines = [f'{{"n": {file * 40 + row}}}\n' for row in range(40)]
        (home / f"{file}.jsonl").write_text("".join(lines))
    script = script.replace("steps=24", "steps=100")
    return Cluster(home, script.replace("with rp.join() as job:", f"{BEFORE[kind]}\nwith rp.join() as job:"))


@pytest.fixture(params=["own", pytest.param("huggingface", marks=NEEDED)])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = opened(tmp_path, request.param)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def hash_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The hash of the weights that a script ends with, of one worker that loads on its training thread."""
    hashes: dict[str, str] = {}

    def of(script: str) -> str:
        if script not in hashes:
            alone = opened(tmp_path_factory.mktemp("undisturbed"), "huggingface")  # with its files
            alone.script.write_text(script.replace("Loader(workers=1)", "Loader(workers=0)"))
            with undisturbed_run(alone) as done:
                assert [event["stopped_at"] for event in done.events("Finished")] == [ENDS]
                assert any("the stream is over, replica" in event["text"] for event in done.events("Say"))
                hashes[script] = done.hash
        return hashes[script]

    return of


def test_a_loader_process_a_worker_and_the_coordinator_are_killed(
    cluster: Cluster, hash_of: Callable[[str], str]
) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    if "Loader(workers=1)" in cluster.script.read_text():
        cluster.until(lambda: bool(cluster.processes()["worker0"].children()))
        (loader,) = cluster.processes()["worker0"].children()
        loader.kill()
        cluster.until(lambda: not alive(loader))
        cluster.until_caught_up(AT + 2)
    cluster.processes()["worker1"].kill()
    cluster.until_caught_up(AT + 4)
    cluster.processes()["coordinator"].kill()
    cluster.ends()
    assert cluster.hash == hash_of(cluster.script.read_text())
    assert [event["stopped_at"] for event in cluster.events("Finished")][-1] == ENDS


def test_all_are_killed_and_another_number_of_workers_goes_on(cluster: Cluster, hash_of: Callable[[str], str]) -> None:
    cluster.run("--workers", "3", "--servers", "1", "--snapshot-steps", "4")
    cluster.until_caught_up(AT + 2)
    cluster.until(lambda: any(event["version"] for event in cluster.events("Snapshotted")))
    cluster.kill_everything()
    cluster.open(100)
    assert cluster.ask("resume", "--workers", "2", str(cluster.folder)) == 0, cluster.answer.read_text()
    assert "2 workers" in cluster.answer.read_text()
    assert cluster.hash == hash_of(cluster.script.read_text())
