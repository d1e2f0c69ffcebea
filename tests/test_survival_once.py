"""A stream that comes only once, and workers that die: each item is used once, or was lost with a worker. None twice.

The model counts: sample n adds 1 to its weight n, so at the end the weights say how often each item was used.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from test_survival import AT, SCRIPT, STEPS, Cluster

pytestmark = pytest.mark.programs

ITEMS, USED = 4000, STEPS * 3 * 4
COUNTING = (
    SCRIPT.replace("job.train(model, data,", "job.train(model, rp.Stream(items, once=True),")
    .replace("clip=0.5, shard_bytes=256,", "")
    .replace("rp.AdamW(lr=1e-2)", "rp.SGD(lr=12.0)")  # the mean over 3 x 4 samples, 12 times
    .replace("with rp.join() as job:", f"""
import fcntl
given = Path(sys.argv[1]).with_name("given")
model = torch.nn.Sequential(torch.nn.Embedding({ITEMS}, 1), torch.nn.Identity())
torch.nn.init.zeros_(model[0].weight)

def items():
    while True:  # a queue: each number goes to one process, and who got it is written down
        with given.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            number = len(file.readlines())
            file.write(f"{{number}} {{os.getpid()}}\\n")
        yield number

with rp.join() as job:""")
    .replace("torch.nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1])", "-model(micro.batch).mean()")
    .replace("while micro", "(gate.parent / f'pid {job.id} {os.getpid()}').touch()\n            while micro")
    .replace("    if run.lead:", """    if run.lead:
        (run.folder / "ledger").write_text("".join(f"{one.name} {one.used} {one.read}\\n" for one in run.ledger))""")
)  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.script.write_text(COUNTING)
    yield cluster
    cluster.close()


def check_the_ledger(cluster: Cluster, used_in_all: int = USED) -> None:
    """Each item is used once or not at all, and the ledger has exactly, for each process, what the model has of it."""
    weight = next(iter(torch.load(cluster.folder / "model.pt").values())).flatten()
    counts = weight.round().long().tolist()
    assert torch.allclose(weight, weight.round(), atol=1e-3)
    assert set(counts) == {0, 1}, "no item is used twice, nor in part"
    assert sum(counts) == used_in_all
    reader = dict(map(int, line.split()) for line in (cluster.home / "given").read_text().splitlines())
    assert all(number in reader for number, count in enumerate(counts) if count)
    used = Counter(reader[number] for number, count in enumerate(counts) if count)
    given = Counter(reader.values())
    ledger = [line.split() for line in (cluster.folder / "ledger").read_text().splitlines()]
    names = {int(path.name.split()[2]): path.name.split()[1] for path in cluster.home.glob("pid *")}
    assert sorted((name, int(count)) for name, count, _ in ledger) == sorted((names[pid], n) for pid, n in used.items())
    for name, count, read in ledger:
        pids = [pid for pid in used if names[pid] == name and used[pid] == int(count)]
        assert any(used[pid] <= int(read) <= given[pid] for pid in pids)
    said = (cluster.folder / "events.jsonl").read_text()  # a console may miss what is said while it connects again
    assert f"the stream: {used_in_all} samples used; read and not used:" in said


def test_a_worker_dies_and_its_samples_are_lost_and_no_other(cluster: Cluster) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    cluster.processes()["worker1"].kill()
    cluster.until_caught_up(AT + 3)
    cluster.open(STEPS)
    assert cluster.ended() == 0, cluster.output
    check_the_ledger(cluster)


@pytest.mark.slow
def test_the_ledger_goes_back_with_the_version_that_a_resume_begins_with(cluster: Cluster) -> None:
    cluster.run("--workers", "2", "--servers", "1", "--snapshot-steps", "4")
    cluster.until_caught_up(AT + 2)
    cluster.until(lambda: any(event["version"] for event in cluster.events("Snapshotted")))
    assert cluster.launcher is not None
    cluster.launcher.send_signal(signal.SIGKILL)
    assert cluster.ended() == -signal.SIGKILL
    cluster.open(STEPS)
    assert cluster.ask("resume", "--workers", "3", str(cluster.folder)) == 0, cluster.answer.read_text()
    check_the_ledger(cluster)


@pytest.mark.slow
def test_servers_and_the_coordinator_die(cluster: Cluster) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--snapshot-steps", "4")
    cluster.until_caught_up(AT)
    cluster.until(lambda: any(event["version"] for event in cluster.events("Snapshotted")))
    cluster.processes()["server0"].kill()
    cluster.processes()["server1"].kill()
    cluster.until_caught_up(AT + 2)
    cluster.processes()["coordinator"].kill()
    cluster.open(STEPS)
    assert cluster.ended() == 0, cluster.output
    check_the_ledger(cluster)


def test_a_worker_dies_with_the_last_samples_and_the_job_ends_with_the_step_before(cluster: Cluster) -> None:
    given, items = cluster.home / "given", (AT + 2) * 3 * 4  # of the step in which it dies, and the next one
    ended = COUNTING.replace("once=True)", "once=True, passes=1)").replace(
        "            file.write(", f"            if number == {items}:\n                return\n            file.write("
    )
    cluster.script.write_text(ended)
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    cluster.until(lambda: len(given.read_text().splitlines()) == items)
    cluster.processes()["worker1"].kill()
    cluster.open(STEPS)
    assert cluster.ended() == 0, cluster.output
    assert [event["stopped_at"] for event in cluster.events("Finished")][-1] == AT
    check_the_ledger(cluster, AT * 3 * 4)
