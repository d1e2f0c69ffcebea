"""Several workers on one machine: each sees its own GPUs."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rallypoint.errors import ConfigError
from rallypoint.launch.commands import by_hand
from rallypoint.launch.engines.cluster import GROUP, Command, GpuShare, devices_of, shares_of
from rallypoint.launch.engines.local import LocalCluster
from rallypoint.launch.environment import COORDINATOR, RANKS
from rallypoint.net.transport import InprocTransport
from rallypoint.recipes.recipe import choose_device, place_among_gpus
from support.cluster_contract import Started


def test_the_gpus_are_those_that_are_visible_or_the_driver_s(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert devices_of({"CUDA_VISIBLE_DEVICES": "3, 5,GPU-ab"}, tmp_path) == ["3", "5", "GPU-ab"]
    assert devices_of({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert devices_of({}, tmp_path) == ["0", "1"]
    assert devices_of({}, tmp_path / "no driver") == []


@pytest.mark.parametrize(
    ("devices", "ranks", "shares"),
    [("01234567", 4, ["0123", "4567"]), ("01234", 2, ["01", "23"]), ("0", 2, []), ("", 2, []), ("01", 2, ["01"])],
)
def test_a_share_has_as_many_gpus_as_a_worker_has_ranks(devices: str, ranks: int, shares: list[str]) -> None:
    assert ["".join(share) for share in shares_of(list(devices), ranks)] == shares


def test_each_worker_of_a_job_gets_another_share_and_gives_it_back(tmp_path: Path) -> None:
    job, devices = str(tmp_path), ["0", "1", "2", "3"]
    first, second = GpuShare(2, job, devices), GpuShare(2, job, devices)
    try:
        assert (first.visible, first.shared, second.visible, second.shared) == ("0,1", False, "2,3", False)
        third = GpuShare(2, job, devices)
        assert (third.visible, third.shared) == ("0,1", True)
        third.close()
        first.close()
        third = GpuShare(2, job, devices)
        assert (third.visible, third.shared) == ("0,1", False)
        third.close()
    finally:
        first.close()
        second.close()


SEES = "import os, time; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'), flush=True); time.sleep(1000)"


def test_each_worker_of_a_machine_sees_one_gpu_and_one_that_comes_later_that_of_one_that_has_gone() -> None:
    with LocalCluster(gpus=["3", "5"]) as cluster:
        workers = [Started(cluster, SEES, name=f"worker{number}") for number in range(3)]
        assert [worker.line() for worker in workers] == ["3", "5", "3"]
        workers[1].handle.signal(signal.SIGKILL)
        assert workers[1].exit().died
        assert Started(cluster, SEES, name="worker3").line() == "5"


def test_a_group_of_ranks_sees_all_gpus_and_servers_see_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with LocalCluster(gpus=["3", "5"]) as cluster:
        assert first_line(cluster, "worker", GROUP) == "3,5"
        assert first_line(cluster, "server") == ""


def first_line(cluster: LocalCluster, role: str, *arguments: str) -> str:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    cluster.start(Command(name=role, role=role, argv=(sys.executable, "-c", SEES, *arguments)), lines.put)
    return lines.get(timeout=60.0)


def test_each_process_of_a_machine_takes_its_own_gpu_and_ranks_do_not_share() -> None:
    torchrun = {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    assert [place_among_gpus(torchrun, gpus) for gpus in (8, 4, 1)] == [5, 1, 0]
    assert place_among_gpus({}, 4) == 0
    rank = {RANKS: "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert place_among_gpus(rank, 4) == 3
    with pytest.raises(ConfigError, match="4 ranks and sees 2 GPUs: each rank needs one of its own; give --ranks 2"):
        place_among_gpus(rank, 2)


@pytest.mark.parametrize(("name", "index"), [("auto", 5), ("cuda", 5), ("cuda:1", 1)])
def test_a_recipe_s_gpu_is_the_current_one_before_anything_is_on_it(
    name: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DeviceMesh takes the current device, if CUDA has begun: that was GPU 0 for all ranks."""
    current: list[torch.device] = []
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [choose_device(name)] == current == [torch.device("cuda", index)]


def test_a_worker_of_several_ranks_sees_the_next_gpus_that_no_other_has(tmp_path: Path) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3", COORDINATOR: f"{tmp_path}:1"}
    prints = "import os; os.write(1, '{CUDA_VISIBLE_DEVICES} {LOCAL_RANK}\\n'.format_map(os.environ).encode())"
    other = GpuShare(2, env[COORDINATOR], ["0", "1", "2", "3"])
    try:
        argv = [sys.executable, "-m", GROUP, "2", sys.executable, "-c", prints]
        lines = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    finally:
        other.close()
    assert (other.visible, sorted(lines.splitlines())) == ("0,1", ["2,3 0", "2,3 1"])


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_without_a_choice_a_worker_sees_what_its_launcher_sees(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with LocalCluster(gpus=gpus) as cluster:
        assert Started(cluster, SEES).line() == "all"


def test_without_enough_gpus_nothing_is_changed(tmp_path: Path) -> None:
    share = GpuShare(4, str(tmp_path), ["0"])
    assert share.visible is None
    share.close()


class Begins(Exception):
    """A server begins."""


def test_a_server_sees_no_gpu_however_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 asks the current device at each step of an optimizer, also on the CPU: that takes memory of it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(by_hand, "hold_lifeline", lambda: True)
    monkeypatch.setattr(by_hand, "keep_stacks", lambda role: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)

    def begins() -> None:
        raise Begins(os.environ["CUDA_VISIBLE_DEVICES"])

    service: Any = SimpleNamespace(role="server", id="s", start=begins, leave=None)
    health: Any = SimpleNamespace(metrics=SimpleNamespace(), ready=None)
    with pytest.raises(Begins, match=r"^$"):
        by_hand.run_server(service, "nobody:1", health, InprocTransport())
