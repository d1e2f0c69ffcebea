"""Ray on this machine for tests: several nodes, each a raylet of its own, and nothing left of them afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

STORE_BYTES = 80 * 2**20  # the least that Ray takes for its object store: nothing of ours goes through it
_OFF = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",  # 15 is Ray's own choice: beside other tests its processes would hardly be run
}  # fmt: skip


@contextmanager
def ray_nodes(*cpus: float, connect: bool = True) -> Iterator[Any]:
    """While in the body, a Ray cluster with a node for each number of CPUs. This process is on the first."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    folder = tempfile.mkdtemp(prefix="ray")  # a short path: Ray's sockets are in it
    os.environ.update(_OFF, RAY_TMPDIR=folder)
    known = set(psutil.Process().children(recursive=True))
    cluster = Cluster(shutdown_at_exit=False)
    try:
        for number, count in enumerate(cpus):
            add_node(cluster, count, **({"include_dashboard": False} if number == 0 else {}))
        os.environ["RAY_ADDRESS"] = cluster.address
        if connect:
            _connect(cluster.address)
        yield cluster
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()
        cluster.global_state.disconnect()
        ours = set(psutil.Process().children(recursive=True)) - known
        left = psutil.wait_procs(ours, timeout=10)[1]
        for process in left:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        assert not left, f"Ray has left {left}"


def add_node(cluster: Any, cpus: float, **options: Any) -> None:
    """Start one more node, on loopback."""
    cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, **options)


def no_leaks() -> Iterator[None]:
    """The body of a fixture: no thread and no process is left, but for Ray's own, which stay from test to test.

    So do Ray's connections: sockets are not looked at.
    """
    before, threads = set(psutil.Process().children(recursive=True)), set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(2.0)
    assert set(threading.enumerate()) <= threads
    left = [child for child in psutil.Process().children(recursive=True) if child not in before and not _is_rays(child)]
    assert psutil.wait_procs(left, timeout=10)[1] == []


def _is_rays(child: psutil.Process) -> bool:
    try:
        words = " ".join(child.cmdline())
    except psutil.Error:
        return True
    return not words or "ray::" in words or "/ray/" in words or "multiprocessing." in words


def _connect(address: str) -> None:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="rallypoint")
