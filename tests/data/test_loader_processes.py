"""Loader processes: the batches are those that the loop would load by itself, whatever dies and whatever is asked."""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.popen_fork
import os
import random
import signal
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import rallypoint as rp
from rallypoint.config import JobConfig
from rallypoint.data.loader import MicroBatches
from rallypoint.data.order import Place, places_from
from rallypoint.data.processes import LoaderProcesses, _is_dead, leave_connections
from rallypoint.data.spec import Loader
from rallypoint.errors import DataError
from rallypoint.launch.embedded import EmbeddedJob
from support.beside import until

CPU = torch.device("cpu")
CONFIG = JobConfig(replicas=4, batch=4, accumulate=2, steps=6)


class Noisy:
    """Samples with random numbers of all three global generators. Some indices do something else first."""

    def __init__(self, dies: Path | None = None, raises: int = -1) -> None:
        self.dies, self.raises = dies, raises

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.dies is not None and self.dies.exists() and multiprocessing.parent_process() is not None:
            self.dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.raises:
            raise ValueError("broken")
        return {"index": index, "drawn": (random.random(), np.random.random(), torch.rand(2))}


@pytest.fixture
def loading() -> Iterator[Any]:
    made: list[LoaderProcesses] = []
    said: list[str] = []

    def make(dataset: Any, **settings: Any) -> LoaderProcesses:
        collate = settings.pop("collate", None)
        batches = MicroBatches(dataset, CONFIG, CPU, collate, loader=Loader(**{"workers": 2, **settings}))
        made.append(LoaderProcesses(batches, said.append))
        made[-1].said = said  # type: ignore[attr-defined]
        return made[-1]

    yield make
    for processes in made:
        processes.close()
    assert not multiprocessing.active_children()


@pytest.fixture(scope="module", autouse=True)
def _a_data_loader_of_the_scripts_own() -> None:
    """From now on torch raises the death of each process that it knows in the main thread."""
    list(torch.utils.data.DataLoader(range(2), num_workers=1))  # type: ignore[arg-type]


def alone(place: Place) -> Any:
    return MicroBatches(Noisy(), CONFIG, CPU).loaded(*place)[0]


def same(found: Any, place: Place) -> bool:
    expected = alone(place)
    drawn = zip(found["drawn"], expected["drawn"], strict=True)
    return bool((found["index"] == expected["index"]).all()) and all(bool((a == b).all()) for a, b in drawn)


def needed(replicas: tuple[int, ...]) -> list[Place]:
    return list(places_from(0, replicas[0], replicas, CONFIG))


def take(processes: LoaderProcesses, place: Place) -> Any:
    processes.expect(place[0], place[1], (1, 3))
    return processes.take(place)


def test_processes_load_what_the_loop_would_load(loading: Any) -> None:
    processes = loading(Noisy())
    assert all(same(take(processes, place), place) for place in needed((1, 3)))


def test_what_is_computed_again_is_loaded_again(loading: Any) -> None:
    """Such as the micro-batch for which the processes were begun."""
    processes = loading(Noisy())
    for place in needed((1, 3))[:4]:
        assert same(take(processes, place), place)
        assert same(take(processes, place), place)


def test_a_killed_process_costs_no_sample(loading: Any, tmp_path: Path) -> None:
    plan = tmp_path / "die"
    processes = loading(Noisy(dies=plan))
    for index, place in enumerate(needed((1, 3))):
        if index == 6:
            plan.touch()
        assert same(take(processes, place), place)
    assert not plan.exists(), "the process has died"


@pytest.mark.parametrize(("workers", "seen_dead"), [(1, True), (2, True), (1, False)])
def test_a_process_killed_in_the_middle_of_a_large_message_is_replaced(
    workers: int, seen_dead: bool, loading: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sends is no tensor, so it goes through the pipe, of which the rest never comes. `seen_dead`: False where
    the end of the pipe is seen before the end of the process."""
    once, whole = tmp_path / "once", Connection._send  # type: ignore[attr-defined]
    if not seen_dead:
        monkeypatch.setattr("rallypoint.data.processes._is_dead", lambda process: False)

    def cut(self: Connection, data: memoryview, *more: Any) -> None:
        if len(data) > 1 << 20 and multiprocessing.parent_process() is not None and once.exists():
            once.unlink()
            os.write(self.fileno(), data[:1000])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, data, *more)

    monkeypatch.setattr(Connection, "_send", cut)
    processes = loading(Noisy(), collate=large, workers=workers)
    indices = MicroBatches(Noisy(), CONFIG, CPU).indices
    for number, place in enumerate(needed((1, 3))):
        if number == 1:
            once.touch()
        assert take(processes, place)[0] == list(indices(*place))
    assert not once.exists(), "the process has died"
    until(lambda: bool(processes.said))
    assert "a loader process died, and new ones go on at its samples" in processes.said[0]
    for place in needed((1, 3))[:4]:
        assert take(processes, place)[0] == list(indices(*place))
    assert len(multiprocessing.active_children()) == workers


def large(samples: list[Any]) -> Any:
    return [sample["index"] for sample in samples], bytes(2 << 20)


def run_on(processes: LoaderProcesses, places: Iterable[Place]) -> None:
    for place in places:
        assert same(take(processes, place), place)


@pytest.mark.slow
def test_processes_that_always_die_end_the_wait_with_a_sentence(loading: Any) -> None:
    """Meanwhile the loop loads by itself."""
    processes = loading(Noisy(), init=lambda number: os._exit(3))
    with pytest.raises(DataError, match=r"loader processes died 3 times in a row .*rp\.Loader\(workers=0\)"):
        run_on(processes, cycle(needed((1, 3))))


def no_memory(*given: Any) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_processes_that_cannot_be_started_end_the_wait_with_a_sentence(
    loading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = loading(Noisy())
    monkeypatch.setattr(multiprocessing.popen_fork.Popen, "_launch", no_memory)
    with pytest.raises(DataError, match=r"loader processes failed 3 times in a row .*Cannot allocate memory"):
        run_on(processes, needed((1, 3)))


class Arrives:
    """Cannot be received once, as with too many open files."""

    def __init__(self, once: Path, index: int) -> None:
        self.once, self.index = once, index

    def __reduce__(self) -> Any:
        return received, (self.once, self.index)


def received(once: Path, index: int) -> int:
    if once.exists():
        once.unlink()
        raise RuntimeError("received 0 items of ancdata")
    return index


def test_a_batch_that_cannot_be_received_is_loaded_again(loading: Any, tmp_path: Path) -> None:
    once = tmp_path / "once"
    processes = loading([Arrives(once, index) for index in range(50)], collate=list, workers=1)
    indices = MicroBatches(Noisy(), CONFIG, CPU).indices
    for number, place in enumerate(needed((1, 3))):
        if number == 1:
            once.touch()
        got = [getattr(sample, "index", sample) for sample in take(processes, place)]  # read here, or received
        assert got == list(indices(*place))
    assert len(processes.said) == (not once.exists())


def test_children_of_the_fork_server_are_not_taken_for_dead(loading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not this process's children: it cannot wait for them."""
    monkeypatch.setattr(os, "waitid", no_child, raising=False)
    processes = loading(Noisy())
    run_on(processes, needed((1, 3))[:2])
    begun = multiprocessing.active_children()
    assert len(begun) == 2
    assert not any(map(_is_dead, begun))
    begun[0].kill()
    assert wait([begun[0].sentinel], timeout=120)
    assert _is_dead(begun[0])


def no_child(*given: Any) -> None:
    raise ChildProcessError


@pytest.mark.slow
def test_what_was_not_forecast_is_loaded_too(loading: Any) -> None:
    """Replicas come and go, steps are computed again, the job is rolled back."""
    processes, chance = loading(Noisy()), random.Random(5)
    for _ in range(12):
        replicas = tuple(sorted(chance.sample(range(4), chance.randrange(1, 4))))
        round, replica = chance.randrange(6), chance.choice(replicas)
        for place in islice(places_from(round, replica, replicas, CONFIG), chance.randrange(1, 9)):
            processes.expect(place[0], place[1], replicas)
            assert same(processes.take(place), place)


def test_what_is_needed_first_comes_though_as_much_is_ready_as_may_be(loading: Any) -> None:
    """Processes have died, so less may be ready than before, and then a replica came that is computed first."""
    processes = loading(Noisy(), ahead=8)
    processes._room = 8  # as after waits
    run_on(processes, needed((1, 3))[:2])
    until(lambda: len(processes._ready) == 8)
    for process in multiprocessing.active_children():
        process.kill()
    for place in needed((1, 3))[2:]:  # what they had sent already comes all the same
        run_on(processes, [place])
        until(lambda: bool(processes.said) or len(processes._ready) == 8)
        if processes.said:
            break
    processes.expect(place[0], 2, (1, 2, 3))
    again = [(place[0], 2, 0), (place[0], 2, 1), (place[0], 3, 1)]
    assert all(same(processes.take(place), place) for place in again)


@pytest.mark.slow
def test_processes_that_are_slow_to_begin_again_are_replaced(loading: Any) -> None:
    """The job is rolled back after all that was forecast has come."""
    processes = loading(Noisy())
    run_on(processes, needed((1, 3)))
    begun = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    for process in begun:
        process.suspend()
    places = needed((2,))
    processes.expect(0, 2, (2,))
    with ThreadPoolExecutor(1) as other:
        batches = other.submit(lambda: [processes.take(place) for place in places])
        until(lambda: bool(processes.said))
        for process in begun:
            process.resume()
        assert all(map(same, batches.result(60), places))


def test_paused_processes_end_with_the_job(loading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, with which torch and Python's exit end them, does nothing, and the exit would wait without a limit."""
    monkeypatch.setattr("rallypoint.data.processes.END_S", 0.1)
    processes = loading(Noisy())
    run_on(processes, needed((1, 3))[:2])
    begun = multiprocessing.active_children()
    for child in begun:
        psutil.Process(child.pid).suspend()
    processes.close()
    try:
        assert all(wait([child.sentinel], timeout=10) for child in begun)
        until(lambda: not processes._thread.is_alive())
        assert not processes.said
    finally:
        for child in begun:
            child.kill()


def test_an_error_in_a_process_is_the_loops_with_its_traceback(loading: Any) -> None:
    processes = loading(Noisy(raises=MicroBatches(Noisy(), CONFIG, CPU).indices(1, 1, 1)[0]))
    with pytest.raises(DataError, match=r"a loader process failed at step 1, replica 1: sample .* broken") as error:
        run_on(processes, needed((1, 3)))
    assert "in __getitem__" in str(error.value.__cause__)


class Threads:
    """Samples that say with how many threads torch computes."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()


def test_samples_are_computed_with_as_many_threads_whoever_loads_them(loading: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        places = needed((1, 3))[:2]
        processes, inline = loading(Threads()), MicroBatches(Threads(), CONFIG, CPU)
        batches = [take(processes, places[0]), inline.load(*places[0]), inline.load(*places[1])]
        counts = [batch.unique().tolist() for batch in batches]
        assert counts == [[1]] * 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_skipped_samples_are_told_once(loading: Any) -> None:
    bad = MicroBatches(Noisy(), CONFIG, CPU).indices(1, 1, 1)[0]
    processes = loading(Noisy(raises=bad), on_error="skip", retries=0)
    sizes = [len(take(processes, place)["index"]) for place in needed((1, 3))]
    assert sizes.count(1) == len(processes.said)
    assert sizes.count(2) == len(sizes) - len(processes.said)
    assert f"sample {bad} of the data set raised ValueError: broken" in processes.said[0]


def test_nothing_is_started_before_the_first_micro_batch(loading: Any) -> None:
    loading(Noisy())
    assert not multiprocessing.active_children()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux forks by default; others do not")
def test_a_loader_process_keeps_no_connection_of_the_worker_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    fork = multiprocessing.get_context("fork")
    left, end = fork.Event(), fork.Event()

    def child() -> None:
        leave_connections()
        left.set()
        end.wait(60)

    process = fork.Process(target=child)
    process.start()
    try:
        assert left.wait(60)
        ours.close()
        peer.settimeout(60)
        assert peer.recv(1) == b"", "the peer sees the end at once"
    finally:
        end.set()
        process.join()
        peer.close()


def test_a_job_ends_with_the_same_bytes_however_it_loads() -> None:
    def train(data: Any, **settings: Any) -> bytes:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        with EmbeddedJob() as job:
            for micro in job.train(model, data, replicas=2, steps=4, seed=3, **settings):
                with micro:
                    loss = model(micro.batch["drawn"][2]).sum(1) * micro.batch["index"]
                    micro.backward(loss.square().mean() / 1000)
        return model.weight.detach().numpy().tobytes()

    expected = train(Noisy(), batch=4)
    assert train(Noisy(), batch=4, loader=rp.Loader(workers=2)) == expected
    assert train(torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1)) == expected  # type: ignore[arg-type]
    assert train(torch.utils.data.DataLoader(Noisy(), batch_size=4)) != expected  # type: ignore[arg-type]
    assert not multiprocessing.active_children()
