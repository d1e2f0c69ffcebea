"""What a run records of its contributions and versions: the digests of the very floats of plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rallypoint.codec.base import digest_of
from rallypoint.config import resolve
from rallypoint.coordinator.claims import Claims
from rallypoint.coordinator.fingerprints import FINGERPRINTS, FingerprintLog, KeptFingerprints
from rallypoint.core.protocol import Contributed, Updated
from rallypoint.core.sums import DIGEST_BYTES, pieces_of
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.errors import ConfigError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.testing.reference import _Reference
from rallypoint.worker.exchange.locked import LockedShell
from rallypoint.worker.exchange.pushes import ReplicaPushes
from rallypoint.worker.tensors import ModelTensors

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).view(32, 3))
SETTINGS: dict[str, Any] = {
    "replicas": 3, "batch": 4, "steps": 5, "network.shard_bytes": 64, "audit.fingerprints": 2, "clip": 0.1
}


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 2))


def weight_of(step: int, replica: int) -> float:
    return 1.0 + replica / 3


def train(folder: Path, settings: dict[str, Any] = SETTINGS) -> None:
    model = net()
    with EmbeddedJob(servers=2, folder=str(folder)) as job:
        for micro in job.train(model, DATA, **settings):
            with micro:
                micro.backward(loss_of(model, micro.batch), weight=weight_of(micro.step, micro.replica))


def not_needed_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers hear that servers have shard 1 of every replica already; what is recorded beside is then sent after all.
    """
    claim, not_needed = LockedShell.claim, ReplicaPushes.not_needed

    def claims_all_but_one(locked: LockedShell, shard: int, describe: Callable[[], str]) -> bool:
        return claim(locked, shard, describe) and shard != 1

    def sends(pushes: ReplicaPushes, shard: int, gradient: torch.Tensor) -> None:
        slot = pushes._pushes.words(shard)
        if shard == 1 and gradient.data_ptr() != slot.data_ptr():
            slot.copy_(gradient)
            pushes.filled(shard)
        not_needed(pushes, shard, gradient)

    monkeypatch.setattr(LockedShell, "claim", claims_all_but_one)
    monkeypatch.setattr(ReplicaPushes, "not_needed", sends)


@pytest.mark.some("local")
@pytest.mark.parametrize("how", ["local", "streamed", "not needed"])
def test_the_record_has_the_digests_of_plain_pytorch(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS | {"memory.parameters": "streamed" if how == "streamed" else "local"}
    if how == "not needed":
        not_needed_at_first(monkeypatch)
        settings["audit.fingerprints"] = 1  # at a step that is not recorded nothing is kept beside
    train(tmp_path, settings)
    model = net()
    reference = _Reference(model, DATA, loss_of, resolve(SETTINGS), weight_of)
    layout = ModelTensors(model, resolve(SETTINGS)).layout
    with KeptFingerprints(tmp_path) as kept:
        assert kept.versions() == ([1, 2, 3, 4, 5] if how == "not needed" else [2, 4])
        for step in range(5):
            found = kept.contributions(step)
            assert sorted(found) == ([0, 1, 2] if step % 2 == 0 or how == "not needed" else [])
            start = [b.clone() for b in reference.buffers]
            for replica, contribution in found.items():
                for buffer, value in zip(reference.buffers, start, strict=True):
                    buffer.copy_(value)
                loss, gradients = reference.replica(step, replica)
                vector = torch.zeros(layout.words)
                for placed, gradient in zip(reference.tensors.parameters, gradients, strict=True):
                    placed.of(vector).copy_(gradient)
                shards = [shard for shard in layout.shards if shard.role == "parameters"]
                digests = [digest_of(vector[s.start : s.stop], weight_of(step, replica)) for s in shards]
                assert contribution.digests == b"".join(digests)
                assert contribution.loss == loss
            for buffer, value in zip(reference.buffers, start, strict=True):
                buffer.copy_(value)
            reference.step(step)
            if (version := kept.version(step + 1)) != {}:
                named = {name: p.detach().reshape(-1) for name, p in model.named_parameters()}
                for shard, pieces in enumerate(pieces_of(layout)):
                    if layout.shards[shard].role == "parameters":
                        for number, piece in enumerate(pieces):
                            entry = next(e for e in layout.entries if e.spec.name == piece.name)
                            first = layout.shards[shard].start + piece.start - entry.start
                            digest = digest_of(named[piece.name][first : first + piece.stop - piece.start])
                            assert version[shard][number * DIGEST_BYTES :][:DIGEST_BYTES] == digest


def test_nothing_is_recorded_by_default(tmp_path: Path) -> None:
    train(tmp_path, {"replicas": 1, "batch": 4, "steps": 2})
    assert not (tmp_path / FINGERPRINTS).exists()


def test_modes_in_which_a_step_cannot_be_computed_again_refuse() -> None:
    with pytest.raises(ConfigError, match=r"fingerprints= is not supported under rp\.Async"):
        resolve({"sync": {"type": "async"}, "audit.fingerprints": 1})


def kept_after(folder: Path, *claims: Contributed | Updated, most: int = 1 << 30) -> list[str]:
    said: list[str] = []
    log = FingerprintLog(str(folder), said.append, most=most)
    for number, claim in enumerate(claims):
        log.add(f"member{number}", claim)
    for thread, _ in log.stop():
        thread.join()
    return said


def test_a_server_may_claim_only_what_it_holds_now() -> None:
    view = View(
        ViewNumber(3), ViewNumber(2), (), (Member("s0", "here", "127.0.0.1:1"),), assignments=(),
        primary={0: "s0", 1: "s1"}, backup={1: "s0"},
    )  # fmt: skip
    may = Claims().may_hold
    assert may("s0", Updated(8, 0, ONE, ViewNumber(2)), view)
    assert may("s0", Updated(8, 1, ONE, ViewNumber(2)), view)
    assert not may("s1", Updated(8, 0, ONE, ViewNumber(2)), view)
    assert not may("s0", Updated(8, 7, ONE, ViewNumber(2)), view)
    assert not may("s0", Updated(8, 0, ONE, ViewNumber(1)), view)
    assert not may("s0", Updated(8, 0, ONE, ViewNumber(2)), None)


ONE, OTHER = bytes(range(16)), bytes(range(1, 17))


def test_a_claim_that_comes_twice_is_kept_once(tmp_path: Path) -> None:
    claim = Contributed(4, 1, 0.5, ONE, ViewNumber(1, 2))
    assert kept_after(tmp_path, claim, claim) == []
    with KeptFingerprints(tmp_path) as kept:
        assert kept.contributions(4) == {1: ("member0", 0.5, ONE)}


def test_claims_of_one_generation_that_differ_are_told_and_the_first_stays(tmp_path: Path) -> None:
    said = kept_after(tmp_path, Updated(4, 7, ONE, ViewNumber(1, 2)), Updated(4, 7, OTHER, ViewNumber(1, 2)))
    assert said == ["shard 7 at version 4: member1 has other bytes than member0 had for the same: see "
                    "`rallypoint replay`"]  # fmt: skip
    with KeptFingerprints(tmp_path) as kept:
        assert kept.version(4) == {7: ONE}


def test_whoever_differs_in_everything_is_told_of_once_for_each_and_not_without_end(tmp_path: Path) -> None:
    first = [Contributed(4, replica, 0.5, ONE) for replica in range(400)]
    said = kept_after(tmp_path, *first, *(3 * [Contributed(4, r, 0.5, OTHER) for r in range(400)]))
    assert len(said) == len(set(said)) == 101
    assert said[1].startswith("the contribution of replica 1 to step 4: member401 has other bytes than member1 had")
    assert said[-1] == "more digests differ from those that were there before: only the first 100 are told"


def test_a_newer_generation_counts_and_an_older_one_does_not(tmp_path: Path) -> None:
    """After `rallypoint resume --set optimizer.lr=...` a step has other bytes."""
    old, new = Updated(4, 7, ONE, ViewNumber(1, 9)), Updated(4, 7, OTHER, ViewNumber(10, 1))
    assert kept_after(tmp_path, old, new, old) == []
    with KeptFingerprints(tmp_path) as kept:
        assert kept.version(4) == {7: OTHER}


def test_the_oldest_steps_go_when_there_is_no_more_room(tmp_path: Path) -> None:
    for first in range(0, 2000, 500):
        claims = [Updated(n, 0, bytes(400), ViewNumber(1)) for n in range(first, first + 500)]
        kept_after(tmp_path, *claims, most=400_000)
    size = (tmp_path / FINGERPRINTS).stat().st_size
    with KeptFingerprints(tmp_path) as kept:
        versions = kept.versions()
    assert versions[-1] == 1999
    assert 0 < len(versions) < 1500
    assert size < 800_000


def test_a_claim_of_a_far_step_makes_no_true_one_go(tmp_path: Path) -> None:
    claims = [Updated(n, 0, bytes(400), ViewNumber(1)) for n in range(800)]
    kept_after(tmp_path, Updated(1_000_000, 0, bytes(400), ViewNumber(1)), *claims, most=300_000)
    with KeptFingerprints(tmp_path) as kept:
        versions = kept.versions()
    assert versions[-2:] == [799, 1_000_000]
    assert 300 < len(versions) < 800


def test_a_disk_that_is_full_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FINGERPRINTS).mkdir()
    with caplog.at_level(logging.WARNING, "rallypoint"):
        assert kept_after(tmp_path, Updated(4, 7, ONE), Updated(5, 7, ONE)) == []
    assert len(caplog.records) == 1
    assert "the job goes on without" in caplog.text
