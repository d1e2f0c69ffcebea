"""The scripts of docs/store.md under fire: a GAN and REINFORCE, whose workers, servers and coordinator are killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_survival import Cluster, cluster_of

pytestmark = pytest.mark.programs

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS, AT, LATER, LAST = 9, 3, 5, 7
# Runs an example. Each step waits for the gate. Once worker2 has pushed to the discriminator at step AT, for the last
# of its contributors, it waits until that round is complete: it is killed before it pushes to the generator.
SCRIPT = """
import runpy, sys, time
from pathlib import Path
from rallypoint.worker.keys import KeyStore
gate, due, push = Path(sys.argv[1]), KeyStore.due, KeyStore.push
me = lambda store: store._exchange.me
def gated(self, names, steps):
    for one in due(self, names, steps):
        while one.step >= int(gate.read_text()):
            gate.with_name(f"{me(self)} waits before {gate.read_text()}").touch()
            time.sleep(0.005)
        yield one
    self.pull(self.keys[0], step=0)
    gate.with_name(f"version-{me(self)}").write_text(str(self._exchange.machine.lines[0].version))
def between(self, name, values, **named):
    if BETWEEN and me(self) == "worker2" and name == "generator" and named["step"] == AT:
        if named["contributor"] == max(self.contributors) and not gate.with_name("between").exists():
            self.pull("discriminator", step=AT + 1)
            gate.with_name("between").touch()
            time.sleep(1e6)
    return push(self, name, values, **named)
KeyStore.due, KeyStore.push = gated, between
sys.argv[1:] = ["--steps", "STEPS"]
runpy.run_path("EXAMPLE", run_name="__main__")
"""


class ExampleCluster(Cluster):
    """Its workers run an example."""

    def example(self, name: str, *options: str, between: bool = False) -> None:
        script = SCRIPT.replace("BETWEEN", str(between)).replace("AT", str(AT)).replace("STEPS", str(STEPS))
        self.script.write_text(script.replace("EXAMPLE", str(EXAMPLES / name)))
        self.run(*options)

    def strike(self, name: str) -> None:
        """Kill this process, and wait until the launcher has seen it."""
        self.processes()[name].kill()
        self.until(lambda: f"{name} was killed (SIGKILL)" in self.output)

    def ends_well(self) -> set[str]:
        """What the workers have printed at the end: digests."""
        self.open(STEPS)
        assert self.ended() == 0, self.output
        assert "going back" not in self.output
        assert "Traceback" not in self.output
        return set(re.findall(r"(?:models|policy) ([0-9a-f]{16})", self.output))

    @property
    def versions(self) -> set[int]:
        """How many updates the first key has had, as each worker has it."""
        return {int(path.read_text()) for path in self.home.glob("version-*")}


undisturbed, cluster = cluster_of(ExampleCluster, "undisturbed"), cluster_of(ExampleCluster, "disturbed")
THREE = ("--workers", "3", "--servers", "2", "--replication", "2")


@pytest.mark.slow
def test_a_gans_worker_that_dies_between_its_two_pushes_changes_no_byte(
    undisturbed: ExampleCluster, cluster: ExampleCluster
) -> None:
    undisturbed.example("gan.py", "--workers", "1", "--servers", "1")
    expected = undisturbed.ends_well()
    assert len(expected) == 1
    cluster.example("gan.py", *THREE, between=True)
    cluster.open(STEPS)
    cluster.until((cluster.home / "between").exists)
    cluster.processes()["worker2"].kill()
    assert cluster.ends_well() == expected


def killed(cluster: ExampleCluster, name: str, *options: str) -> set[str]:
    """Run an example while a worker, a server and the coordinator are killed; what its workers print at the end."""
    cluster.example(name, *THREE, *options)
    cluster.until_at(AT, workers=3)
    cluster.until(lambda: cluster.members["exposed"] == 0)  # every shard is on both servers
    cluster.strike("server0")
    cluster.until_at(LATER, workers=3)
    cluster.strike("worker1")
    cluster.until_at(LAST)  # another worker1 may be late
    cluster.strike("coordinator")
    return cluster.ends_well()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gan.py", "reinforce.py"])
def test_whatever_is_killed_the_examples_end_with_the_same_bytes(
    undisturbed: ExampleCluster, cluster: ExampleCluster, name: str
) -> None:
    undisturbed.example(name, "--workers", "1", "--servers", "1")
    expected = undisturbed.ends_well()
    assert len(expected) == 1
    assert killed(cluster, name) == expected


@pytest.mark.slow
def test_whatever_is_killed_each_push_of_an_asynchronous_actor_counts_once(cluster: ExampleCluster) -> None:
    assert killed(cluster, "reinforce.py", "--set", "sync.type=async")
    assert cluster.versions == {6 * STEPS}
