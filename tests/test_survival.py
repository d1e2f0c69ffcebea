"""Kill anything, at any time: a real run through the real command line ends with the bytes of an undisturbed one.

Workers stop at a gate in the middle of a step, where the test strikes; nothing here depends on how long anything takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import safetensors.torch
import torch

from support.programs import Program

pytestmark = pytest.mark.programs

PATIENCE_S = 200.0
STEPS = 24
AT = 9  # the step in which the test strikes
SCRIPT = f"""
import os, sys, time
from pathlib import Path
import torch, rallypoint as rp
from rallypoint.worker.tensors import weights_hash
gate = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Dropout(0.2), torch.nn.Linear(30, 3),
                            torch.nn.Identity())
data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 3))
with rp.join() as job:
    run = job.train(model, data, replicas=3, batch=4, steps={STEPS}, clip=0.5, network=rp.Network(shard_bytes=256),
                    optimizer=rp.AdamW(lr=1e-2))
    for micro in run:
        with micro:
            loss = torch.nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1])
            while micro.replica > 0 and micro.step >= int(gate.read_text()):
                time.sleep(0.005)  # replica 0 of this step is on the servers, the others are not
                model[-1](loss)  # the forward goes on, layer by layer: a roll-back ends it here
            micro.backward(loss)
    if run.lead:
        torch.save(model.state_dict(), run.folder / "model.pt")
        (run.folder / "hash").write_text(weights_hash(model))
"""


AnyCluster = TypeVar("AnyCluster", bound="Cluster")


class Cluster:
    """``rallypoint`` with a run's folder, as a user starts it; its workers stop at the step that the gate says.

    Its processes are forked from a warm start, or `cold`: each imports torch for itself.
    """

    def __init__(self, home: Path, script: str = SCRIPT, *, cold: bool = False) -> None:
        self.home, self.folder, self._cold = home, home / "run", cold
        self._gate, self._output, self.answer = home / "gate", home / "output", home / "answer"
        self.script = home / "script.py"
        self.script.write_text(script)
        self.launcher: Program | subprocess.Popen[bytes] | None = None
        self.seen: dict[int, psutil.Process] = {}
        self.members_seen: set[int] = set()  # pids of coordinators, servers and workers
        self.open(0)

    # ---- starting and ending ----

    def run(self, *options: str) -> None:
        self.launcher = self._start(
            self._output, "run", "--folder", str(self.folder), *options, str(self.script), str(self._gate)
        )

    def resume(self, *options: str) -> None:
        self.launcher = self._start(self._output, "resume", *options, str(self.folder))

    def ask_for_a_snapshot(self) -> Program | subprocess.Popen[bytes]:
        """``rallypoint snapshot``, which ends once there is one; it says to `answer` which."""
        return self.start_to_ask("snapshot", str(self.folder))

    def snapshot_from(self, step: int) -> dict[str, Any]:
        """Ask for a snapshot in this step; what is said of it. It is taken at a version a little ahead, and the workers
        come as far as that takes."""
        self.until_caught_up(step)
        before = len(self.events("Snapshotted"))
        asked = self.ask_for_a_snapshot()
        asking = psutil.Process(asked.pid)  # on a busy machine it starts for longer than the steps that are left take
        self.until(lambda: any(link.status == "ESTABLISHED" for link in asking.net_connections("tcp")))
        for later in range(step, STEPS - 1):
            self.until_caught_up(later)
            with contextlib.suppress(subprocess.TimeoutExpired):
                asked.wait(0.5)
                break
        assert asked.wait(PATIENCE_S) == 0, self.output
        taken = self.events("Snapshotted")[before:]
        assert taken[-1]["version"] >= step
        return taken[-1]

    def start_to_ask(self, *arguments: str) -> Program | subprocess.Popen[bytes]:
        """Start another command, which says to `answer` what it has to say."""
        return self._start(self.answer, *arguments)

    def ask(self, *arguments: str) -> int:
        """Run another command to its end, which says to `answer` what it has to say; its exit status."""
        self.answer.unlink(missing_ok=True)
        return self._start(self.answer, *arguments).wait(PATIENCE_S)

    def _start(self, output: Path, *arguments: str) -> Program | subprocess.Popen[bytes]:
        env = {**os.environ, "COLUMNS": "200"}
        if not self._cold:
            return Program(["-m", "rallypoint.cli", *arguments], output, env)
        with output.open("ab") as file:
            return subprocess.Popen(command(*arguments), stdout=file, stderr=subprocess.STDOUT, env=env)

    def until_at(self, step: int, workers: int = 2) -> list[str]:
        """Until so many workers have said that they wait in front of this step, or in it; those that have."""

        def waiting() -> list[str]:
            return sorted(path.name.split()[0] for path in self.home.glob(f"* waits before {step}"))

        self.open(step)
        self.until(lambda: len(waiting()) >= workers)
        return waiting()

    def ended(self) -> int:
        """The launcher's exit status, once it and all of its children are gone."""
        assert self.launcher is not None
        self.until(lambda: self.launcher.poll() is not None and not self._alive())  # type: ignore[union-attr]
        return self.launcher.returncode

    def ends(self, wanted: str = "") -> None:
        """Let everybody go on to the end: the run ends well, with the weights of this hash."""
        self.open(10_000)
        assert self.ended() == 0, self.output
        assert not wanted or self.hash == wanted

    def kill_everything(self) -> None:
        """Kill the launcher: nothing outlives it."""
        before = self.processes()
        self.launcher.send_signal(signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL
        assert not [name for name, process in before.items() if alive(process)], "a lifeline was not held"

    def close(self) -> None:
        if self.launcher is not None:
            self.processes()
            self.launcher.kill()
            self.launcher.wait()
        for process in self._alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(list(self.seen.values()), timeout=PATIENCE_S)

    # ---- looking ----

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def hash(self) -> str:
        return (self.folder / "hash").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "events.jsonl").read_text().splitlines(keepends=True)
            entries = [json.loads(line) for line in lines if line.endswith("\n")]
            return [entry for entry in entries if entry["type"] == kind]
        return []

    @property
    def members(self) -> dict[str, Any]:
        """Those that were announced last; nobody before that."""
        return (self.events("Members") or [{"workers": [], "standby": [], "exposed": -1}])[-1]

    def processes(self) -> dict[str, psutil.Process]:
        """The living children, by their names in the job."""
        assert self.launcher is not None
        found: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, KeyError):  # gone, or not yet what it will be
                    self.seen[child.pid] = child
                    name = child.environ()["RALLYPOINT_ID"] if self._cold else child.name()
                    if name == "coordinator" or name.startswith(("server", "worker")):
                        found[name] = child
                        self.members_seen.add(child.pid)
        return found

    def _alive(self) -> list[psutil.Process]:
        return [process for process in self.seen.values() if alive(process)]

    # ---- waiting ----

    def open(self, step: int) -> None:
        """Let the workers come as far as this step."""
        partial = self._gate.with_suffix(".partial")
        partial.write_text(str(step))
        partial.replace(self._gate)

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            self.processes()
            assert time.monotonic() < deadline, f"it has not happened; the run says:\n{self.output}"
            time.sleep(0.02)

    def until_caught_up(self, step: int) -> None:
        """Until replica 0 of this step has been pushed, and the others wait at the gate."""
        self.open(step)
        self.until(lambda: self._is_caught_up(step))

    def _is_caught_up(self, step: int) -> bool:
        assert self.launcher.poll() is None, self.output
        done = [event["step"] for event in self.events("StepDone")]
        return bool(done) and max(done) == step - 1


@contextlib.contextmanager
def undisturbed_run(cluster: AnyCluster) -> Iterator[AnyCluster]:
    """The cluster, when it has come to its end on one worker and one server with its gate open; closed afterwards."""
    try:
        cluster.open(STEPS)
        cluster.run("--workers", "1", "--servers", "1")
        assert cluster.ended() == 0, cluster.output
        yield cluster
    finally:
        cluster.close()


def cluster_of(make: Callable[[Path], Cluster], folder: str = "") -> Any:
    """The fixture `cluster` of a module: one for each test, in this folder of it."""

    @pytest.fixture
    def cluster(tmp_path: Path) -> Iterator[Cluster]:
        (place := tmp_path / folder).mkdir(exist_ok=True)
        cluster = make(place)
        yield cluster
        cluster.close()

    return cluster


def undisturbed_of(make: Callable[[Path], Cluster]) -> Any:
    """The fixture `undisturbed` of a module: a run that nothing happened to."""

    @pytest.fixture(scope="module")
    def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
        with undisturbed_run(make(tmp_path_factory.mktemp("undisturbed"))) as cluster:
            yield cluster

    return undisturbed


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rallypoint.cli", *arguments]


# All plays with forked processes, two of them also with processes that import torch for themselves
also_cold = pytest.mark.parametrize("cluster", ["warm", pytest.param("cold", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, cold=getattr(request, "param", "warm") == "cold")
    yield cluster
    cluster.close()


undisturbed = undisturbed_of(Cluster)


@pytest.mark.some("worker1")
@pytest.mark.parametrize("victim", ["worker0", "worker1"])
def test_a_worker_killed_mid_step_changes_no_byte(cluster: Cluster, undisturbed: Cluster, victim: str) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    cluster.processes()[victim].kill()
    cluster.ends(undisturbed.hash)
    assert f"{victim} was killed (SIGKILL): starting another" in cluster.output
    assert "Traceback" not in cluster.output


@pytest.mark.some("server0")
@pytest.mark.parametrize("victim", ["server0", "server1"])
def test_a_server_killed_mid_step_changes_no_byte_and_nothing_is_rolled_back(
    cluster: Cluster, undisturbed: Cluster, victim: str
) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2")
    cluster.until_caught_up(AT)
    cluster.until(lambda: cluster.members["exposed"] == 0)  # every shard is on both
    cluster.processes()[victim].kill()
    cluster.ends(undisturbed.hash)
    assert f"{victim} was killed (SIGKILL): starting another" in cluster.output
    assert "snapshot" not in cluster.output.partition("was killed")[2].partition("step 24/24")[0]
    assert "Traceback" not in cluster.output


@pytest.mark.slow
def test_a_server_killed_while_threads_make_its_updates_changes_no_byte(tmp_path: Path) -> None:
    """Five shards of 1 MiB, whose updates servers make beside their owner's thread."""
    hashes = []
    for home in (tmp_path / "undisturbed", tmp_path / "killed"):
        home.mkdir()
        with contextlib.closing(Cluster(home)) as cluster:
            cluster.script.write_text(SCRIPT.replace("30", "130_000").replace("shard_bytes=256", "shard_bytes=1 << 20"))
            cluster.run("--workers", "2", "--servers", "2")
            if home.name == "killed":
                cluster.until_caught_up(AT)
                cluster.processes()["server0"].kill()
            cluster.open(STEPS)
            assert cluster.ended() == 0, cluster.output
            assert "Traceback" not in cluster.output
            hashes.append(cluster.hash)
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_a_server_that_alone_held_its_shards_costs_steps_but_no_byte(cluster: Cluster, undisturbed: Cluster) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--replication", "1")
    cluster.until_caught_up(AT)
    cluster.processes()["server0"].kill()
    cluster.until(lambda: "going on from snapshot" in cluster.output)
    cluster.ends(undisturbed.hash)
    assert "parameters are lost with their servers: going back to the last snapshot" in cluster.output
    assert "Traceback" not in cluster.output


@also_cold
def test_the_coordinator_killed_mid_step_changes_no_byte(cluster: Cluster, undisturbed: Cluster) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    before = cluster.processes()
    before["coordinator"].kill()
    cluster.ends(undisturbed.hash)
    assert "coordinator was killed (SIGKILL): starting another" in cluster.output
    assert "Traceback" not in cluster.output
    started = cluster.members_seen - {process.pid for process in before.values()}
    assert len(started) == 1, "something else was started again"


@pytest.mark.slow
def test_a_worker_that_is_told_to_go_hands_its_work_over(cluster: Cluster, undisturbed: Cluster) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    victim = cluster.processes()["worker1"]
    victim.terminate()
    cluster.until(lambda: cluster.members["workers"] == ["worker0"])
    cluster.open(STEPS - 2)  # it goes now; or before that, if it had not begun to send anything of the step
    cluster.until(lambda: not alive(victim))
    cluster.ends(undisturbed.hash)
    assert "worker1 has left" in cluster.output
    assert "starting another" not in cluster.output


@pytest.mark.slow
def test_a_job_grows_from_its_least_to_its_most_workers(cluster: Cluster, undisturbed: Cluster) -> None:
    cluster.run("--workers", "1:2", "--servers", "1", "--standby", "1")
    cluster.until_caught_up(AT)
    cluster.until(lambda: len(cluster.members["workers"]) == 2)
    cluster.until(lambda: len(cluster.members["standby"]) == 1)
    standby = cluster.members["standby"][0]
    cluster.processes()[cluster.members["workers"][0]].kill()
    cluster.until(lambda: standby in cluster.members["workers"])
    cluster.ends(undisturbed.hash)


@also_cold
def test_everything_dies_and_resume_needs_nothing_but_the_folder(cluster: Cluster, undisturbed: Cluster) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    taken = cluster.snapshot_from(AT)
    assert cluster.answer.read_text().startswith(f"{taken['snapshot']}: version {taken['version']}, ")
    assert len(cluster.processes()) == 5
    cluster.kill_everything()
    cluster.open(STEPS)
    cluster.resume()
    assert cluster.ended() == 0, cluster.output
    assert f": snapshot {taken['snapshot']}" in cluster.output
    assert cluster.hash == undisturbed.hash


def test_an_exported_snapshot_is_the_model(undisturbed: Cluster) -> None:
    expected = torch.load(undisturbed.folder / "model.pt", weights_only=True)
    for name in ("exported.safetensors", "exported.pt"):
        to = undisturbed.home / name
        assert undisturbed.ask("export", str(undisturbed.folder), "--to", str(to)) == 0, undisturbed.answer.read_text()
        exported = safetensors.torch.load_file(to) if to.suffix != ".pt" else torch.load(to, weights_only=True)["model"]
        assert exported.keys() == expected.keys()
        assert all(torch.equal(exported[key], expected[key]) for key in expected)


def test_a_run_that_is_over_cannot_be_asked_for_a_snapshot(undisturbed: Cluster) -> None:
    assert undisturbed.ask("snapshot", str(undisturbed.folder)) == 1
    assert undisturbed.answer.read_text() == f"error: no run is under way in {undisturbed.folder}\n"
