"""Loader processes and their workers die: the run ends with the bytes of one that loads on its training thread."""

from __future__ import annotations

import psutil
import pytest

from test_survival import AT, SCRIPT, Cluster, alive, cluster_of, undisturbed_run

pytestmark = [pytest.mark.programs, pytest.mark.slow]

LOADER = "torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=1)"
LOADED = SCRIPT.replace("job.train(model, data,", f"job.train(model, {LOADER},").replace("batch=4, ", "")
cluster = cluster_of(lambda home: Cluster(home, LOADED))


def test_a_loader_process_and_then_a_worker_are_killed_and_no_byte_changes(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "num_workers=1), replicas=3, steps=24" in LOADED
    with undisturbed_run(Cluster(tmp_path_factory.mktemp("undisturbed"))) as alone:
        wanted = alone.hash

    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    loader = child_of(cluster, "worker0")
    loader.kill()
    cluster.until(lambda: not alive(loader))
    cluster.until_caught_up(AT + 2)
    orphan = child_of(cluster, "worker1")
    cluster.processes()["worker1"].kill()
    cluster.ends(wanted)
    assert "worker1 was killed (SIGKILL): starting another" in cluster.output
    assert "Traceback" not in cluster.output
    cluster.until(lambda: not alive(orphan))


def child_of(cluster: Cluster, worker: str) -> psutil.Process:
    """The loader process of a worker; waits for it."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = cluster.processes()[worker].children()
        return bool(found)

    cluster.until(look)  # one look: a view that comes between two may end this process and begin another
    return found[0]
