"""Losses are read late, as from a GPU; what is not finite is known before anything of its gradient is sent."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rallypoint.config import resolve
from rallypoint.core.policy import LocalSteps
from rallypoint.errors import JobAborted, NonFiniteLoss
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.testing.reference import train_reference
from rallypoint.worker.loop import session
from rallypoint.worker.tensors import weights_hash
from support.beside import until
from support.gathering import DATA, SETTINGS, build, gathering, loss_of, reference_hash

STEP, REPLICA = 3, 2
LEFT_OUT = f"step {STEP} of replica {REPLICA} is skipped: its loss"
AT_ONCE = session.staging_for  # a CPU's


class LateStaging:
    """As `DeviceStaging`: copies are made in order by a thread. It begins only when somebody waits for it."""

    eager = False
    waited = 0

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed, self._open = failed, threading.Event()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="late staging")
        self._thread.start()

    def write(self, slot: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
        assert not add
        self._queue.put(lambda: slot.copy_(gradient))  # type: ignore[arg-type, return-value]

    def then(self, call: Callable[[], None]) -> None:
        self._queue.put(call)

    def drain(self) -> None:
        LateStaging.waited += 1
        self._open.set()
        drained = threading.Event()
        self.then(drained.set)
        while not drained.wait(0.01) and self._thread.is_alive():
            pass
        self._open.clear()

    def close(self) -> None:
        self._open.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._open.wait() and (call := self._queue.get()) is not None:
            try:
                with torch.no_grad():
                    call()
            except Exception as error:
                self._failed(error)
                return


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")
    monkeypatch.setattr(LateStaging, "waited", 0)
    monkeypatch.setattr(session, "staging_for", lambda device, failed: LateStaging(failed))


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """The (step, replica) of every contribution that left."""
    found: set[tuple[int, int]] = set()
    send = Channel.send

    def noted(self: Channel, header: Header, *args: Any, **kwargs: Any) -> None:
        if header.kind is Kind.PUSH:
            found.add((header.step, header.replica))
        send(self, header, *args, **kwargs)

    monkeypatch.setattr(Channel, "send", noted)
    return found


class Poison:
    """One worker's loss. For (STEP, REPLICA) its value is not a number, and its gradient is right."""

    def __init__(self) -> None:
        self._here = False

    def at(self, step: int, replica: int) -> None:
        self._here = (step, replica) == (STEP, REPLICA)

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        return loss + math.nan if self._here else loss


def reference(**settings: Any) -> str:
    config, poison, calls = resolve({**SETTINGS, **settings}), Poison(), itertools.count()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        poison.at(*divmod(next(calls), config.replicas))
        return poison(model, batch)

    model = build()
    train_reference(model, DATA, loss, config)
    return weights_hash(model)


def test_the_main_thread_waits_once_for_each_replica_and_not_for_each_micro_batch() -> None:
    with gathering(2) as cluster:
        worker = cluster.add_worker(batch=8, accumulate=4)
        assert worker.result() == reference_hash(batch=8, accumulate=4)
    replicas = SETTINGS["replicas"] * SETTINGS["steps"]
    assert LateStaging.waited <= 2 * replicas + 1, f"{LateStaging.waited} waits for {4 * replicas} micro-batches"


@pytest.mark.parametrize("presum_bytes", [0, 1 << 20])
def test_stop_sends_nothing_of_a_replica_whose_loss_is_not_finite(
    presum_bytes: int, pushed: set[tuple[int, int]]
) -> None:
    poison = Poison()
    with gathering(2) as cluster:
        worker = cluster.add_worker(poison.at, loss=poison, clip=None, **{"network.presum_bytes": presum_bytes})
        with pytest.raises(NonFiniteLoss, match="loss of replica 2 at step 3 is nan: nothing of that step was applied"):
            worker.result()
    assert (STEP, REPLICA) not in pushed
    assert max(step for step, _ in pushed) == STEP


def test_the_workers_that_did_nothing_wrong_hear_which_loss_it_was() -> None:
    with gathering(2, workers_start=2, workers_max=2) as cluster:
        for poison in (Poison(), Poison()):
            cluster.add_worker(poison.at, loss=poison)
        errors = []
        for worker in cluster.workers:
            with pytest.raises((NonFiniteLoss, JobAborted), match="replica 2 at step 3 is nan") as caught:
                worker.result()
            errors.append(caught.type)
    assert NonFiniteLoss in errors


def test_skip_marks_every_contribution_of_that_replica() -> None:
    poison = Poison()
    with gathering(2) as cluster:
        worker = cluster.add_worker(poison.at, loss=poison, nonfinite="skip")
        assert worker.result() == reference(nonfinite="skip") != reference_hash()


def test_under_local_steps_a_step_whose_loss_is_not_finite_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for staging in (session.staging_for, AT_ONCE):
        monkeypatch.setattr(session, "staging_for", staging)
        poison = Poison()
        with gathering(1) as cluster:
            hashes.append(cluster.add_worker(poison.at, loss=poison, sync=LocalSteps(4), nonfinite="skip").result())
            until(lambda cluster=cluster: any(LEFT_OUT in said for said in cluster.sentences()))  # type: ignore[misc]
    assert hashes[0] == hashes[1]
