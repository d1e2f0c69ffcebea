"""The learning rate of a running job is changed, then a server and the coordinator die: the bytes of plain PyTorch
whose rate changes at the version that the run has recorded, also in a replay and in a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rallypoint.config import resolve
from rallypoint.core.deciding.scales import scale_at
from rallypoint.core.view import Scale
from rallypoint.testing.reference import train_reference
from rallypoint.worker.tensors import weights_hash
from test_survival import AT, SCRIPT, STEPS, Cluster

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]  # seven commands, and two members that are given up


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.script.write_text(SCRIPT.replace("clip=0.5", "clip=0.5, fingerprints=1"))
    yield cluster
    cluster.close()


def reference(scales: list[Scale]) -> str:
    """The hash of plain PyTorch's weights, with the rate changed at these versions."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Dropout(0.2), torch.nn.Linear(30, 3),
                                torch.nn.Identity())  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 3))
    config = resolve({
        "replicas": 3, "batch": 4, "steps": STEPS, "clip": 0.5, "shard_bytes": 256,
        "optimizer": {"type": "adamw", "lr": 1e-2},
    })  # fmt: skip
    loss_of = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    train_reference(model, data, loss_of, config, scales=scales)
    return weights_hash(model)


def scales_of(cluster: Cluster) -> list[Scale]:
    """What the run has recorded."""
    events = cluster.events("RateScaled")
    return [Scale(event["step"], event["factor"], number) for number, event in enumerate(events, 1)]


@pytest.mark.slow
def test_the_rate_changes_at_the_recorded_version_whoever_dies_and_in_a_replay(
    cluster: Cluster,
) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2", "--snapshot-steps", "4", "--keep-last", "9")
    cluster.until_caught_up(AT)
    cluster.until(lambda: cluster.members["exposed"] == 0)  # every shard is on both
    assert cluster.ask("learning-rate", str(cluster.folder), "0.25") == 0, cluster.answer.read_text()
    assert f"the learning rate is multiplied by 0.25 from step {AT}" in cluster.answer.read_text()
    cluster.processes()["server0"].kill()
    cluster.processes()["coordinator"].kill()
    cluster.until_caught_up(AT + 4)
    cluster.until(lambda: cluster.members["exposed"] == 0)
    assert cluster.ask("learning-rate", str(cluster.folder), "2") == 0, cluster.answer.read_text()
    cluster.processes()["server1"].kill()
    cluster.open(STEPS)
    assert cluster.ended() == 0, cluster.output
    scales = scales_of(cluster)
    assert [scale.factor for scale in scales] == [0.25, 2.0]
    assert AT <= scales[0].version <= AT + 1
    assert AT + 4 <= scales[1].version <= AT + 5
    wanted = reference(scales)
    assert cluster.hash == wanted
    assert wanted != reference([])
    rates = {event["step"]: event["lr"] for event in cluster.events("StepDone")}
    assert {step: rate for step, rate in rates.items() if rate != 1e-2 * scale_at(scales, step)} == {}
    assert set(rates.values()) == {1e-2, 0.25e-2, 0.5e-2}

    step = scales[1].version + 1
    assert cluster.ask("replay", str(cluster.folder), "--step", str(step), "--json") == 0, cluster.answer.read_text()
    replayed = json.loads(cluster.answer.read_text().splitlines()[-1])
    assert replayed["version"]["equal"]
    assert not replayed["version"]["differ"]
    assert not replayed["departs"]


@pytest.mark.slow
def test_everybody_dies_after_the_rate_has_changed_and_a_run_resumed_from_before_that_changes_it_again(
    cluster: Cluster,
) -> None:
    """The change is in the journal, and not in the snapshot: that is older."""
    cluster.run("--workers", "2", "--servers", "2")
    at = max(AT, cluster.snapshot_from(3)["version"] + 2)
    cluster.until_caught_up(at)
    assert cluster.ask("learning-rate", str(cluster.folder), "0.25") == 0, cluster.answer.read_text()
    cluster.until_caught_up(at + 2)
    assert cluster.launcher is not None
    cluster.processes()
    cluster.launcher.kill()
    assert cluster.ended() < 0
    (scale,) = scales_of(cluster)
    assert at <= scale.version <= at + 1
    assert max(taken["version"] for taken in cluster.events("Snapshotted")) <= scale.version
    cluster.open(STEPS)
    cluster.resume()
    assert cluster.ended() == 0, cluster.output
    assert cluster.hash == reference([scale])
