"""The commands of rendered pods make a job that ends with the same bytes as `rallypoint run`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from manifests import Manifest, rendered, the
from processes import Kubelet, Pod, kubelet, pods_of, told

from rallypoint.launch.engines.kubernetes import certificates, new_secret
from rallypoint.net.certificates import make_certificates
from support.beside import until
from support.programs import run_program

pytestmark = pytest.mark.programs

SCRIPT = """
import hashlib, pathlib, sys, time, torch, rallypoint as rp
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
with rp.join() as job:
    run = job.train(model, data, replicas=4, batch=4, steps=int(sys.argv[2]))
    for micro in run:
        while not pathlib.Path("gate").exists():
            time.sleep(0.01)
        with micro:
            micro.backward(model(micro.batch[0]).square().mean())
if run.lead:
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    pathlib.Path(run.folder, sys.argv[1]).write_text(digest)
"""


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights after `rallypoint run`."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "gate").touch()
    env = {**os.environ, "COLUMNS": "200"}
    command = ["run", "--workers", "2", "--servers", "2", "--folder", "run", "train.py", "digest", "20"]
    argv = ["-m", "rallypoint.cli", *command]
    status, text = run_program(argv, folder / "output", env=env, cwd=folder, timeout=240.0)
    assert status == 0, text
    return (folder / "run" / "digest").read_text()


def secrets() -> dict[str, dict[str, str]]:
    return {"gpt-token": new_secret("gpt-token")["stringData"]}


def as_jobset(manifests: list[Manifest]) -> list[Pod]:
    jobset = the("JobSet", manifests)
    return pods_of(jobset["metadata"]["name"], jobset["spec"])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kubelet]:
    (tmp_path / "train.py").write_text(SCRIPT)
    pods = as_jobset(rendered("train.py", "digest", "20", workers="2", servers=2, save=100))
    with kubelet(tmp_path, pods, secrets()) as made:
        yield made


def files_in(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def finish(cluster: Kubelet) -> None:
    """Wait until every pod has ended, and none with a fault."""
    for name, program in cluster.running.items():
        assert program.wait(100.0) == 0, f"{name}\n{told(cluster)}"


@pytest.mark.slow
def test_the_pods_of_a_jobset_with_tls_make_the_same_bytes(tmp_path: Path, wanted: str) -> None:
    make_certificates(tmp_path / "certificates")
    data = {**secrets(), "gpt-tls": certificates("gpt-tls", tmp_path / "certificates")["stringData"]}
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "gate").touch()
    pods = as_jobset(rendered("train.py", "digest", "20", workers="2", servers=2, save=100, tls="gpt-tls"))
    with kubelet(tmp_path, pods, data) as cluster:
        assert [pod.role for pod in pods] == ["coordinator", "server", "server", "worker", "worker"]
        for pod in reversed(pods):  # in any order
            cluster.start(pod)
        finish(cluster)
        tokens = secrets()["gpt-token"].values()
        assert not [pod.name for pod in pods if any(token in cluster.said(pod) for token in tokens)]
    assert (tmp_path / "volumes/job/gpt/digest").read_text() == wanted
    assert list((tmp_path / "volumes/job/gpt/snapshots").glob("step-00000020-*"))


@pytest.mark.slow
def test_a_job_goes_on_from_another_ones_snapshot_to_the_same_bytes(tmp_path: Path, wanted: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "gate").touch()
    size = {"workers": "2", "servers": 2, "save": 100}
    first = as_jobset(rendered("train.py", "digest", "12", **size))
    with kubelet(tmp_path, first, secrets()) as cluster:
        for pod in first:
            cluster.start(pod)
        finish(cluster)
    theirs = tmp_path / "volumes/job/gpt/snapshots"
    (snapshot,) = theirs.glob("step-00000012-*")
    kept = files_in(theirs)
    (tmp_path / "gate").unlink()
    more = {"name": "more", "claim": "gpt", "secret": "gpt-token", "resume": f"gpt/{snapshot.name}"}
    then = as_jobset(rendered("train.py", "digest", "20", **size, **more, sets=["steps=20"]))
    with kubelet(tmp_path, then, secrets()) as cluster:
        for pod in then:
            cluster.start(pod)
        coordinator = then[0]
        until(lambda: "20 steps" in cluster.said(coordinator), lambda: told(cluster))  # the job has begun
        cluster.running[coordinator.name].kill()
        assert cluster.running.pop(coordinator.name).wait(60.0) != 0
        again = replace(coordinator, name=f"{coordinator.name}-again")  # its pod is replaced: the same command
        cluster.pods.append(again)
        cluster.start(again)
        until(lambda: "which this command has begun" in cluster.said(again), lambda: told(cluster))
        (tmp_path / "gate").touch()
        finish(cluster)
    assert (tmp_path / "volumes/job/more/digest").read_text() == wanted
    assert files_in(theirs) == kept, "the other job's snapshots are only read"
    assert list((tmp_path / "volumes/job/more/snapshots").glob("step-00000020-*"))


@pytest.mark.slow
def test_a_pod_that_is_evicted_makes_room_for_the_next_and_the_bytes_are_the_same(
    cluster: Kubelet, wanted: str
) -> None:  # fmt: skip
    *others, evicted = cluster.pods
    for pod in cluster.pods:
        cluster.start(pod)
    (coordinator,) = [pod for pod in cluster.pods if pod.role == "coordinator"]
    until(lambda: "20 steps" in cluster.said(coordinator), lambda: told(cluster))  # the job has begun
    cluster.running[evicted.name].send_signal(signal.SIGTERM)
    replacement = Pod(f"{evicted.name}-again", evicted.host, evicted.ip, evicted.role, evicted.manifest)
    (cluster.folder / "gate").touch()
    assert cluster.running.pop(evicted.name).wait(60.0) == 143, told(cluster)
    cluster.pods.append(replacement)
    cluster.start(replacement)
    for pod in others:
        assert cluster.running[pod.name].wait(100.0) == 0, told(cluster)
    assert (cluster.folder / "volumes/job/gpt/digest").read_text() == wanted
