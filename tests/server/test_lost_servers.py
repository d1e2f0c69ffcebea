"""Servers that die, come and fail, in one process: the same bytes, or a sentence that says who and why."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rallypoint.codec.spec import Bf16, Raw, TopK
from rallypoint.core.optimizer import SGD
from rallypoint.core.policy import Async, BoundedStaleness, LocalSteps
from rallypoint.core.protocol import Aborted, Applied, Members, Report, Snapshotted, SnapshotWanted
from rallypoint.core.view import ViewNumber
from rallypoint.errors import JobAborted, LinkError
from rallypoint.net.transport import InprocTransport
from rallypoint.server.service import ServerService, run_servers
from rallypoint.server.shard import OwnedShard
from rallypoint.store import files
from rallypoint.store.manifest import Manifest, age
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotStore
from support.beside import until
from support.gathering import DATA, SETTINGS, Gathering, Once, Worker, build, gathering, loss_of, reference_hash


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return reference_hash()


@pytest.mark.some("0")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_lost_in_the_middle_of_a_step_changes_no_byte_and_rolls_nothing_back(
    undisturbed: str, victim: int
) -> None:
    with gathering(2, replication=2, workers_start=2, workers_max=2) as cluster:
        lose = Once(4, 1, lambda: cluster.safely_lose(victim))
        for _ in range(2):
            cluster.add_worker(lose)
        assert [worker.result() for worker in cluster.workers] == [undisturbed] * 2
        assert lose.done
        assert not [said for said in cluster.sentences() if "going back" in said]
        assert [said for said in cluster.sentences() if said.startswith(f"server{victim} is gone: ")]


@pytest.mark.slow
def test_a_server_that_joins_is_given_shards_and_outlives_the_one_it_took_them_from(undisturbed: str) -> None:
    with gathering(2, replication=2) as cluster:

        def replace() -> None:
            cluster.safely_lose(0)
            cluster.add_servers(1)
            until(lambda: "server2" in {member.id for member in view(cluster).servers})
            cluster.safely_lose(1)

        swap = Once(3, 2, replace)
        worker = cluster.add_worker(swap)
        assert worker.result() == undisturbed
        assert swap.done
        assert set(view(cluster).primary.values()) == {"server2"}


def test_a_server_that_hands_over_leaves_no_shard_with_one_copy_and_who_took_over_may_die(undisturbed: str) -> None:
    """Its shards go to those who have them already, it is their backup until server2 is, and no byte differs."""
    with gathering(3, replication=2, workers_start=2, workers_max=2) as cluster:
        exposed: list[int] = []

        def go() -> None:
            until(lambda: cluster.coordinator._shell.machine.exposed == 0)
            exposed.append(len(announced(cluster)))
            cluster.servers[0].leave()

        def lose() -> None:
            until(lambda: "server0" not in view(cluster).holders, "server0 still has shards")
            exposed[:] = announced(cluster)[exposed[0] :]
            cluster.safely_lose(1)

        told, lost = Once(2, 1, go), Once(7, 1, lose)
        for _ in range(2):
            cluster.add_worker(lambda *where: [once(*where) for once in (told, lost)] and None)
        assert [worker.result() for worker in cluster.workers] == [undisturbed] * 2
        assert told.done
        assert lost.done
        assert set(exposed) == {0}
        assert not [said for said in cluster.sentences() if "going back" in said]


def announced(cluster: Gathering) -> list[int]:
    """How many shards had one copy, in each view that was announced."""
    return [message.exposed for message in cluster.heard(Members)]


def view(cluster: Gathering) -> Any:
    assert cluster.coordinator._shell.machine.view is not None
    return cluster.coordinator._shell.machine.view


@pytest.mark.some("a shard file")
@pytest.mark.parametrize("damage", ["a shard file", "the manifest"])
def test_when_the_newest_snapshot_is_damaged_the_one_before_it_gives_the_same_bytes(
    undisturbed: str, tmp_path: Path, damage: str
) -> None:
    damaged: list[str] = []

    def flip(newest: Path) -> None:
        file = newest / "manifest.json" if damage == "the manifest" else next(newest.glob("*.shards"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
        damaged.append(newest.name)

    said = said_without_the_newest_snapshot(undisturbed, tmp_path, flip)
    assert [one for one in said if one.startswith(f"snapshot {damaged[0]} is damaged: file ")], said


def test_when_the_newest_snapshot_is_damaged_after_it_was_verified_the_one_before_it_gives_the_same_bytes(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, damaged = SnapshotStore.read, list[str]()

    def reads(self: SnapshotStore, manifest: Manifest, shards: Iterable[int]) -> Iterator[ShardRecord]:
        if not damaged:  # the coordinator has chosen it
            damaged.append(manifest.id)
            file = next((tmp_path / manifest.id).glob("*.shards"))
            file.write_bytes(bytes(byte ^ 4 for byte in file.read_bytes()))
        return read(self, manifest, shards)

    said = said_without_the_newest_snapshot(
        undisturbed, tmp_path, lambda newest: monkeypatch.setattr(SnapshotStore, "read", reads)
    )
    assert [one for one in said if f"cannot go on from snapshot {damaged[0]}: " in one], said


def said_without_the_newest_snapshot(undisturbed: str, folder: Path, damage: Callable[[Path], object]) -> list[str]:
    """The only server is lost when there are two snapshots, and the newest is damaged: what the coordinator says."""
    with gathering(1, folder) as cluster:

        def lose() -> None:
            until(lambda: len(committed(folder)) >= 2 and len(cluster.heard(Snapshotted)) >= 2, "there are no two")
            damage(committed(folder)[-1])
            cluster.servers[0].close()
            cluster.add_servers(1)

        ask, trap = Once(1, 0, lambda: ask_for_a_snapshot(cluster)), Once(6, 3, lose)
        worker = cluster.add_worker(lambda step, replica: (ask(step, replica), trap(step, replica))[1])
        assert worker.result() == undisturbed
        said = cluster.sentences()
        assert [one for one in said if one.startswith("going on from snapshot step-00000000-")], said
        return said


def test_a_store_that_does_not_answer_for_a_moment_while_shards_are_restored_costs_no_job(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "DELAYS_S", (0.0, 0.0))
    silent, read = [2, 1], SnapshotStore.read

    def reads(self: SnapshotStore, *of: Any) -> Any:
        if silent and silent.pop():
            raise files.StoreSilent("the bucket cannot be read: timed out")
        return read(self, *of)

    with gathering(1, tmp_path) as cluster:

        def lose() -> None:
            monkeypatch.setattr(SnapshotStore, "read", reads)
            cluster.servers[0].close()
            cluster.add_servers(1)

        trap = Once(4, 1, lose)
        assert cluster.add_worker(trap).result() == undisturbed
        said = [said for said in cluster.sentences() if "restores" in said]
        assert len(said) == 2
        assert all(said.endswith("the bucket cannot be read: timed out; trying again in 0 s") for said in said)


def ask_for_a_snapshot(cluster: Gathering) -> None:
    """It is of a version a little ahead: returns once the server knows."""
    before = cluster.servers[0]._reducer.capture.snapshot
    cluster._observer.send(SnapshotWanted())
    until(lambda: cluster.servers[0]._reducer.capture.snapshot != before, "the server was never asked")


def committed(folder: Path) -> list[Path]:
    """The snapshots that have a manifest, oldest first."""
    found = [path.parent for path in folder.glob("step-*/manifest.json")]
    return sorted(found, key=lambda path: age(path.name) or (-1, -1))


@pytest.mark.slow
def test_a_roll_back_forgets_what_a_codec_remembers_of_the_void_past(tmp_path: Path) -> None:
    """Back to the beginning: error feedback begins anew too, or the second life would end with other bytes."""
    settings: dict[str, Any] = {"codec": TopK(ratio=0.25, sampled=False)}
    hashes = []
    for disturbed in (False, True):
        with gathering(1, tmp_path / str(disturbed)) as cluster:

            def lose(cluster: Gathering = cluster) -> None:
                cluster.servers[0].close()
                cluster.add_servers(1)

            trap = Once(5, 1, lose if disturbed else lambda: None)
            worker = cluster.add_worker(trap, **settings)
            hashes.append(worker.result())
            assert trap.done
            assert (worker.computed.count((2, 0)) == 2) == disturbed
    assert hashes[0] == hashes[1]


# ---- servers that fail -----------------------------------------------------------------------------------------


def test_a_server_that_cannot_apply_an_update_ends_the_job_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = OwnedShard.apply, itertools.count(10, -1)

    def apply(self: OwnedShard, *args: Any, **options: Any) -> Any:
        if next(left) == 0:
            raise MemoryError("no more")
        return real(self, *args, **options)

    monkeypatch.setattr(OwnedShard, "apply", apply)
    with gathering(1) as cluster:
        worker = cluster.add_worker()
        with pytest.raises(JobAborted, match=r"server0: server server0 failed: MemoryError: no more"):
            worker.result()
        assert cluster.servers[0].wait() == "server server0 failed: MemoryError: no more"
        until(lambda: bool(cluster.heard(Aborted)))


@pytest.mark.slow
def test_servers_end_with_their_job_and_say_why(undisturbed: str) -> None:
    with gathering(0, servers=2) as cluster:
        worker = cluster.add_worker()
        assert run_servers([cluster.server(f"s{i}") for i in range(2)]) is None
        assert worker.result() == undisturbed
    with gathering(1) as cluster:
        cluster.add_worker(Once(1, 1, lambda: cluster.coordinator.abort("enough")))
        assert run_servers([cluster.server("extra")]) == "enough"


def test_a_server_without_a_coordinator_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.net.member.JOIN_TIMEOUT_S", 0.05)
    server = ServerService(id="s", coordinator="nowhere:1", bind="server:0", transport=InprocTransport())
    with pytest.raises(LinkError, match="nobody answers at nowhere:1"):
        server.start()


def test_the_ledger_has_every_step_with_all_of_its_contributions(undisturbed: str) -> None:
    with gathering(2, replication=2, workers_start=2, workers_max=2) as cluster:
        lose = Once(4, 1, lambda: cluster.safely_lose(0))
        for _ in range(2):
            cluster.add_worker(lose)
        entries: list[Applied] = []
        write = cluster.coordinator._log.write
        cluster.coordinator._log.write = lambda event: (entries.append(event), write(event))[1]  # type: ignore
        assert [worker.result() for worker in cluster.workers] == [undisturbed] * 2
        applied = [entry for entry in entries if isinstance(entry, Applied)]
        assert {entry.step for entry in applied} == set(range(SETTINGS["steps"]))
        assert {entry.replicas for entry in applied} == {SETTINGS["replicas"]}


# ---- the state is lost before anything is computed: the first weights come once more ----


def lose_reports(worker: Worker) -> None:
    """What it reports of the first generation does not come: the coordinator sees first that the server is lost."""
    send = worker.job._link.send
    first = ViewNumber(1, 1)
    worker.job._link.send = lambda m: None if isinstance(m, Report) and m.generation == first else send(m)  # type: ignore


def lose_the_only_server_in(cluster: Gathering, forward: int, *, other: bool = True) -> Any:
    """A loss that loses the server within this worker's forward pass of that number, after the model has computed.

    other: another server comes at once.
    """
    forwards = itertools.count(1)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        found, number = loss_of(model, batch), next(forwards)
        if number == 1 and forward:
            lose_reports(cluster.workers[0])
        if number == forward:
            cluster.servers[0].close()
            cluster.add_servers(other)
        return found

    return loss


def test_the_first_weights_come_once_more_as_they_were_before_any_forward_pass(undisturbed: str) -> None:
    with gathering(1) as cluster:
        worker = cluster.add_worker(loss=lose_the_only_server_in(cluster, 1))
        assert worker.result() == undisturbed  # with the statistics of its batch norm
        assert len(cluster.servers) == 2


@pytest.mark.slow
def test_the_first_weights_come_once_more_although_a_round_of_local_steps_has_moved_them() -> None:
    settings = {"sync": LocalSteps(steps=4, outer=SGD(lr=0.7, momentum=0.9)), "clip": None}
    hashes = []
    for forward in (0, 3):
        with gathering(1) as cluster:
            hashes.append(cluster.add_worker(loss=lose_the_only_server_in(cluster, forward), **settings).result())
            assert len(cluster.servers) == 1 + (forward > 0)
    assert hashes[0] == hashes[1]


@pytest.mark.some("{'keep_inner': False}")
@pytest.mark.parametrize("mode", [{}, {"keep_inner": False}, {"fragments": 2}], ids=str)
def test_the_first_weights_come_once_more_after_all_of_a_round_s_replicas_are_computed(mode: dict[str, Any]) -> None:
    """The model then holds the last replica's own parameters. The server is lost before it has the round's sum."""
    sync = LocalSteps(steps=4, outer=SGD(lr=0.7, momentum=0.9), **mode)
    hashes = []
    last = 4 * SETTINGS["replicas"] // mode.get("fragments", 1)  # forward passes of the first round
    for lost in (False, True):
        with gathering(1) as cluster:
            worker = cluster.add_worker(loss=lose_the_only_server_in(cluster, last * lost, other=False), sync=sync)
            if lost:
                until(lambda worker=worker: len(worker.computed) == last and idles(worker))  # type: ignore[misc]
                cluster.add_servers(1)
            hashes.append(worker.result())
    assert hashes[0] == hashes[1]


def idles(worker: Worker) -> bool:
    """True while its main thread waits."""
    return worker.job._exchange.beat().waited > 0


@pytest.mark.some("first of step 1")
@pytest.mark.parametrize(
    ("settings", "forward"),
    [
        ({}, 5), ({}, 9), ({"sync": LocalSteps(steps=2)}, 10), ({"sync": LocalSteps(steps=2, fragments=2)}, 10),
        ({"sync": Async(), "optimizer": SGD(lr=0.1), "replicas": 2}, 2),
        ({"sync": BoundedStaleness(staleness=1), "optimizer": SGD(lr=0.1), "replicas": 2}, 5),
    ],
    ids=["first of step 1", "first of step 2", "local steps", "fragments", "async", "bounded staleness"],
)  # fmt: skip
def test_a_model_that_has_an_update_is_not_taken_for_the_first_weights(settings: dict[str, Any], forward: int) -> None:
    """The coordinator sees that the server is lost before any word of the update, and asks for the first weights."""
    with gathering(1) as cluster:
        lose = lose_the_only_server_in(cluster, forward)
        worker = cluster.add_worker(loss=lose, **{"clip": None, **settings})
        with pytest.raises(JobAborted, match="parameters were lost with their servers and there is no snapshot"):
            worker.result()


@pytest.mark.parametrize(
    "settings", [{"down": Bf16()}, {"down": Raw(), "precision": "bf16", "memory.hold": "bf16"}], ids=["down", "hold"]
)
def test_first_weights_that_came_back_rounded_are_not_taken_for_the_first_ones(settings: dict[str, Any]) -> None:
    with gathering(1) as cluster:
        worker = cluster.add_worker(loss=lose_the_only_server_in(cluster, 1), **settings)
        with pytest.raises(JobAborted, match=r"the servers' state is lost, and here the first weights are rounded"):
            worker.result()


def test_a_server_that_was_sent_one_record_never_computes_with_another() -> None:
    """The only worker dies before its first weights are there; another member leaves; then comes another record."""
    with gathering(1) as cluster:
        course = cluster.coordinator._shell.machine.course
        first = cluster.member("first")
        first.train(build(), DATA, **{**SETTINGS, "optimizer": SGD(lr=0.5)})
        first._link.close()  # as if the process were killed
        first.close()
        until(lambda: "first" not in course.members.workers)
        second = cluster.member("second")
        until(lambda: "second" in course.members.workers)
        second.close()
        until(lambda: "second" not in course.members.workers)
        with pytest.raises(JobAborted, match=r"optimizer.lr is 0.01 here, 0.5 there \(worker0 is here, the job is"):
            cluster.add_worker(optimizer=SGD(lr=0.01)).result()
