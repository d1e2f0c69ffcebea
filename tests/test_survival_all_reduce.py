"""Kill anything while workers have the state: still the bytes of an undisturbed run, and of Sync."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from test_survival import AT, STEPS, Cluster, alive, cluster_of, undisturbed_of, undisturbed_run

pytestmark = pytest.mark.programs

LOOKS_S = 1.5  # several times as long as the coordinator leaves between two looks at the clock
ALL_REDUCE = ("--set", "sync.type=all-reduce")
OWN_SCRIPT = f"""
import math, sys, time
from pathlib import Path
import torch, rallypoint as rp
from rallypoint.worker.tensors import weights_hash
gate = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3))
data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 3))
matrices, others = [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]
own = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.RMSprop(others, lr=1e-2, momentum=0.9)]
schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {STEPS}) for optimizer in own]
with rp.join() as job:
    run = job.train(model, data, replicas=3, batch=8, steps={STEPS}, accumulate=2, nonfinite="skip", clip=0.5,
                    network=rp.Network(shard_bytes=256), sync=rp.AllReduce(), own_optimizer=own, own_schedule=schedules)
    for micro in run:
        with micro:
            loss = torch.nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1])
            while micro.replica > 0 and micro.step >= int(gate.read_text()):
                time.sleep(0.005)
            micro.backward(loss * math.nan if (micro.step, micro.replica) == (5, 1) else loss)
    if run.lead:
        (run.folder / "hash").write_text(weights_hash(model))
"""


cluster = cluster_of(Cluster)
under_sync = undisturbed_of(Cluster)


def _ends_like(cluster: Cluster, other: Cluster) -> None:
    cluster.ends(other.hash)
    assert "Traceback" not in cluster.output


def _computing(cluster: Cluster) -> list[str]:
    computing: list[str] = cluster.members["workers"]
    return computing


@pytest.fixture(scope="module")
def undisturbed_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A run with optimizers of its own that nothing happened to."""
    own = Cluster(tmp_path_factory.mktemp("own"))
    own.script.write_text(OWN_SCRIPT)
    with undisturbed_run(own) as cluster:
        yield cluster


def _until_stored(cluster: Cluster) -> None:
    """Until there is a snapshot of more than the first weights.

    It is taken at a version a little ahead of the step in which the coordinator looks at the clock: in each step it is
    given the time to do so, or the last step would come first.
    """
    for step in range(AT, STEPS - 1):
        cluster.until_caught_up(step)
        looked = time.monotonic() + LOOKS_S
        while time.monotonic() < looked:
            if cluster.events("Snapshotted")[-1]["version"] > 0:
                return
            time.sleep(0.02)
    pytest.fail(f"no snapshot was taken:\n{cluster.output}")


@pytest.mark.slow
def test_a_worker_that_is_told_to_go_hands_the_state_to_the_one_that_stands_by(
    cluster: Cluster, under_sync: Cluster
) -> None:
    cluster.run("--workers", "1", "--servers", "1", "--standby", "1", *ALL_REDUCE)
    cluster.open(AT)
    cluster.until(lambda: [len(cluster.members[part]) for part in ("workers", "standby")] == [1, 1])
    members = cluster.members
    (leaving,), (taking_over,) = members["workers"], members["standby"]
    victim = cluster.processes()[leaving]
    victim.terminate()
    cluster.until(lambda: _computing(cluster) == [taking_over])
    assert alive(victim), "it is asked to go, not shot"
    _ends_like(cluster, under_sync)
    assert "going back" not in cluster.output


@pytest.mark.slow
def test_what_is_exported_is_what_is_exported_under_sync(cluster: Cluster, under_sync: Cluster) -> None:
    cluster.run("--workers", "2", "--servers", "2", *ALL_REDUCE)
    _ends_like(cluster, under_sync)
    exported = []
    for run in (cluster, under_sync):
        to = run.home / "exported.pt"
        assert run.ask("export", str(run.folder), "--to", str(to)) == 0, run.answer.read_text()
        exported.append(torch.load(to, weights_only=True))
    ours, theirs = exported
    assert ours["step"] == theirs["step"] == STEPS
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    for name, kept in theirs["optimizer"].items():
        same = ours["optimizer"][name]
        assert kept.keys() == same.keys()
        assert all(torch.equal(torch.as_tensor(same[key]), torch.as_tensor(kept[key])) for key in kept)
    assert all(torch.equal(ours["model"][name], value) for name, value in theirs["model"].items())


@pytest.mark.some("('worker0',)")
@pytest.mark.parametrize("victims", [("worker0",), ("server0",), ("worker0", "worker1")], ids=str)
def test_what_own_optimizers_keep_survives_with_buffers_schedules_and_skipped_steps(
    cluster: Cluster, undisturbed_own: Cluster, victims: tuple[str, ...]
) -> None:
    cluster.script.write_text(OWN_SCRIPT)
    cluster.run("--workers", "2", "--servers", "2", "--snapshot-steps", "3")
    _until_stored(cluster)
    for victim in victims:
        cluster.processes()[victim].kill()
    cluster.until(lambda: cluster.output.count("starting another") == len(victims))
    _ends_like(cluster, undisturbed_own)
    assert ("going back" in cluster.output) == (len(victims) == 2)
    assert cluster.events("Skipped")


@pytest.mark.slow
def test_a_worker_that_joins_is_set_like_the_others_in_its_own_optimizer(
    cluster: Cluster, undisturbed_own: Cluster
) -> None:
    """It loads the others' state and schedule in the middle of the job: nobody takes it for one that was set apart."""
    cluster.script.write_text(OWN_SCRIPT)
    cluster.run("--workers", "2", "--servers", "1")
    cluster.until_caught_up(AT)
    assert len(_computing(cluster)) == 2
    resizing = cluster.start_to_ask("resize", str(cluster.folder), "--workers", "3")
    cluster.until(lambda: len(_computing(cluster)) == 3)
    cluster.until_caught_up(AT + 3)
    _ends_like(cluster, undisturbed_own)
    resizing.wait()
    assert "going back" not in cluster.output
    assert "same settings" not in cluster.output
