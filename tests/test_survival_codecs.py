"""Codec states move with their replica: as long as no worker is killed, moving a replica changes no byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from rallypoint.core.protocol import Resize
from rallypoint.launch.folder import CLUSTER_FILE
from rallypoint.net.handshake import Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.tcp import TcpTransport
from test_survival import AT, SCRIPT, STEPS, Cluster, alive, undisturbed_run

pytestmark = pytest.mark.programs

CODECS = {
    "int8": "codec={'type': 'int8', 'block': 32}, clip=0.5,",
    "topk": "codec={'type': 'topk', 'ratio': 0.1, 'sampled': False}, clip=0.5,",
    "powersgd": "codec={'type': 'powersgd', 'rank': 2}, clip=0.5,",
    "dgc": "codec={'type': 'dgc', 'ratio': 0.1, 'warmup_steps': 12},",
}
every_codec = pytest.mark.parametrize("codec", CODECS)


class CodecStateCluster(Cluster):
    """Its codec keeps a state for each replica."""

    def __init__(self, home: Path, codec: str) -> None:
        super().__init__(home)
        script = SCRIPT.replace("clip=0.5, ", f"{CODECS[codec]} ").replace("shard_bytes=256", "shard_bytes=768")
        if codec == "dgc":
            script = script.replace("rp.AdamW(lr=1e-2)", "rp.SGD(lr=1e-2)")
        assert CODECS[codec] in script
        self.script.write_text(script)

    def resize(self, workers: int) -> None:
        """So many workers compute from now on, as far as the launcher's ear is concerned."""
        where = msgspec.json.decode((self.folder / CLUSTER_FILE).read_bytes(), type=dict[str, str])
        link = CoordinatorLink(
            transport=TcpTransport(), address=where["coordinator"], me=Identity("observer", "test", where["token"]),
            handlers=Handlers(lambda _: None, lambda _: None),
        )  # fmt: skip
        link.start()
        link.send(Resize(workers))
        self.until(lambda: len(self.members["workers"]) == workers)
        link.close()


@pytest.fixture
def cluster_of(tmp_path: Path) -> Iterator[Callable[[str], CodecStateCluster]]:
    made: list[CodecStateCluster] = []

    def make(codec: str) -> CodecStateCluster:
        made.append(CodecStateCluster(tmp_path, codec))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The hash of a run with that codec to which nothing happened."""
    hashes: dict[str, str] = {}

    def of(codec: str) -> str:
        if codec not in hashes:
            with undisturbed_run(CodecStateCluster(tmp_path_factory.mktemp("undisturbed"), codec)) as cluster:
                hashes[codec] = cluster.hash
        return hashes[codec]

    return of


Make = Callable[[str], CodecStateCluster]
Hashes = Callable[[str], str]


def told_to_go(cluster: CodecStateCluster, *options: str) -> psutil.Process:
    """One of two workers, both at the gate, is told to go: the cluster's worker1."""
    cluster.run("--workers", "2", "--servers", "2", *options)
    cluster.until_caught_up(AT)
    victim = cluster.processes()["worker1"]
    victim.terminate()
    return victim


def ends_a_step_and_leaves(cluster: CodecStateCluster) -> None:
    """On a busy machine the run would be over before it has left: the gate opens for one more step first."""
    cluster.until(lambda: cluster.members["workers"] == ["worker0"])
    cluster.open(AT + 1)
    cluster.until(lambda: "worker1 has left" in cluster.output)
    cluster.ends()


def check_that_it_has_left(cluster: CodecStateCluster, victim: psutil.Process) -> None:
    assert "worker1 has left" in cluster.output
    assert not alive(victim)
    for wrong in ("starting another", "codec states", "Traceback"):
        assert wrong not in cluster.output


@pytest.mark.some("powersgd-True")
@pytest.mark.parametrize(("codec", "ends_its_step"), [
    *((codec, True) for codec in CODECS), ("topk", False), ("powersgd", False),
])  # fmt: skip
def test_a_worker_that_is_told_to_go_leaves_its_codec_states_behind_also_if_it_cannot_end_its_step(
    cluster_of: Make, undisturbed: Hashes, codec: str, ends_its_step: bool
) -> None:
    """It ended after ten seconds without a word, its replicas went on from zero, and the run ended with other bytes."""
    cluster = cluster_of(codec)
    victim = told_to_go(cluster)
    if ends_its_step:
        ends_a_step_and_leaves(cluster)
    else:
        cluster.until(lambda: not alive(victim))  # the gate is shut
        cluster.ends()
    assert cluster.hash == undisturbed(codec)
    check_that_it_has_left(cluster, victim)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [("bounded-staleness", "--set", "sync.staleness=2"), ("async",)])
def test_in_a_streaming_job_too_a_worker_that_goes_holds_nobody_up(cluster_of: Make, policy: tuple[str, ...]) -> None:
    cluster = cluster_of("topk")
    victim = told_to_go(cluster, "--set", f"sync.type={policy[0]}", *policy[1:])
    ends_a_step_and_leaves(cluster)
    check_that_it_has_left(cluster, victim)
    account = cluster.events("Accounted")[-1]
    assert (account["applied"] + account["folded"], account["dropped"]) == (3 * STEPS, 0)


@pytest.mark.slow
@every_codec
def test_replicas_that_move_between_living_workers_take_their_codec_states_along(
    cluster_of: Make, undisturbed: Hashes, codec: str
) -> None:
    cluster = cluster_of(codec)
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    cluster.resize(1)  # what worker 1 has goes to worker 0 at once
    cluster.until_caught_up(AT + 4)
    cluster.resize(2)  # and back, from a step to come
    cluster.ends()
    assert cluster.hash == undisturbed(codec)
    assert "Traceback" not in cluster.output


@pytest.mark.slow
@every_codec
def test_a_snapshot_has_the_codec_states_and_a_resumed_run_ends_with_the_same_bytes(
    cluster_of: Make, undisturbed: Hashes, codec: str
) -> None:
    cluster = cluster_of(codec)
    cluster.run("--workers", "2", "--servers", "2")
    taken = cluster.snapshot_from(AT)
    cluster.kill_everything()
    cluster.open(STEPS)
    cluster.resume()
    assert cluster.ended() == 0, cluster.output
    assert f": snapshot {taken['snapshot']}" in cluster.output
    assert cluster.hash == undisturbed(codec)


@pytest.mark.some("topk")
@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_a_paused_job_is_stored_with_its_codec_states_and_goes_on_with_the_same_bytes(
    cluster_of: Make, undisturbed: Hashes, codec: str
) -> None:
    """Copies of codec states went only with the next step's contributions: the snapshot waited for them."""
    cluster = cluster_of(codec)
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    assert cluster.ask("pause", str(cluster.folder)) == 0
    cluster.open(STEPS)
    cluster.until(lambda: f"before step {AT + 1}" in cluster.output and cluster.events("StepDone")[-1]["step"] == AT)
    assert cluster.ask("snapshot", str(cluster.folder)) == 0
    assert cluster.events("Snapshotted")[-1]["version"] == AT + 1
    cluster.kill_everything()
    cluster.resume()
    assert cluster.ended() == 0, cluster.output
    assert cluster.hash == undisturbed(codec)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["topk", "dgc"])
def test_after_a_roll_back_a_run_ends_with_the_same_bytes(cluster_of: Make, undisturbed: Hashes, codec: str) -> None:
    cluster = cluster_of(codec)
    cluster.run("--workers", "2", "--servers", "2", "--replication", "1")
    taken = cluster.snapshot_from(AT)
    cluster.processes()["server0"].kill()
    cluster.until(lambda: "going on from snapshot" in cluster.output)
    cluster.ends()
    assert cluster.hash == undisturbed(codec)
    assert f"going on from snapshot {taken['snapshot']}: version {taken['version']}" in cluster.output
    assert "Traceback" not in cluster.output
