"""Your own training script under kills, inside this process: does it end with the same bytes as undisturbed?

A worker that is killed loses what its process has; the one that takes over runs the script from its beginning, and goes
on at the step in progress. So does `simulate`: it calls the script again, on the same coordinator and servers.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch

from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.terms import Terms
from rallypoint.data.randomness import untouched
from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.launch.observing.replay import Difference, diff, words_of
from rallypoint.net.transport import InprocTransport
from rallypoint.server.service import ServerService
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.run import Run
from rallypoint.worker.loop.session import Job

Place = tuple[int, int]  # a step and a replica of it


@dataclass(frozen=True)
class Simulated:
    """What came of it. As a text: a sentence that says where the two runs first differ.

    Attributes:
        kills: the step and the replica before whose first micro-batch the worker was killed.
        found: the first version and the tensors that differ, and the contribution that differs first.
    """

    kills: tuple[Place, ...]
    found: Difference

    @property
    def same(self) -> bool:
        """Have all versions the same bytes as undisturbed?"""
        return self.found.version < 0

    def __str__(self) -> str:
        killed = ", ".join(f"step {step} before replica {replica}" for step, replica in self.kills)
        return f"killed at {killed or 'no step'}: {words_of(self.found)}"


def simulate(train: Callable[[], Any], *, kills: int = 3, seed: int = 0, servers: int = 2) -> Simulated:
    """Call `train`, which calls `rallypoint.join`, undisturbed, and again with `kills` kills of its worker.

    `seed` decides when. For a script: ``simulate(lambda: runpy.run_path("train.py", run_name="__main__"))``.

    Raises ConfigError in a mode whose bytes are not promised, UsageError under a launcher, and what `train` raises.
    """
    if os.environ.get(environment.COORDINATOR):
        raise UsageError("simulate makes a cluster of its own: start it without a launcher")
    with tempfile.TemporaryDirectory(prefix="rallypoint-simulate-") as folder:
        undisturbed, killed = Path(folder) / "undisturbed", Path(folder) / "killed"
        places = _play(train, undisturbed, servers, [])
        planned = sorted(random.Random(seed).sample(places, min(kills, len(places))))
        left = list(planned)
        _play(train, killed, servers, left)
        return Simulated(tuple(planned[: len(planned) - len(left)]), diff(undisturbed, killed))


class _Killed(BaseException):
    """SIGKILL: no Exception, which a script might catch."""


def _play(train: Callable[[], Any], folder: Path, servers: int, kills: list[Place]) -> list[Place]:
    """Call `train` until it ends, again after each of the `kills`, which are removed. Returns what was computed."""
    seen: dict[Place, None] = {}

    class KilledRun(Run):
        def __iter__(self) -> Iterator[Micro]:
            for micro in super().__iter__():
                place = micro.step, micro.replica
                if kills and place >= kills[0]:
                    del kills[0]
                    raise _Killed
                seen[place] = None
                yield micro

    with closing(_Cluster(folder, servers)) as join, mock.patch("rallypoint.launch.join.EmbeddedJob", join):
        join.run_type = KilledRun
        while True:
            try:
                with untouched():  # each life begins with the random states of a new process
                    train()
                return list(seen)
            except _Killed:
                continue
            finally:
                join.end()


class _Life(Job):
    """One process's membership."""

    _closed = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, _Killed):
            self.close()
        else:
            super().__exit__(kind, error, tb)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            super().close()


class _Cluster:
    """A coordinator and servers in this process; called as `EmbeddedJob` is, it gives a worker that joins them."""

    run_type: type[Run] = Run

    def __init__(self, folder: Path, servers: int) -> None:
        folder.mkdir()
        self._transport, self._lives = InprocTransport(), list[_Life]()
        about = JoinInfo({"audit": {"fingerprints": 1}}, str(folder), threads=torch.get_num_threads())
        self._coordinator = CoordinatorService(
            terms=Terms(servers=servers), bind="coordinator:0", transport=self._transport, join_info=about
        )
        self._coordinator.start()
        at = self._coordinator.address
        self._servers = [
            ServerService(id=f"server{i}", coordinator=at, bind="server:0", transport=self._transport)
            for i in range(servers)
        ]
        for server in self._servers:
            server.start()

    def __call__(self, **_: Any) -> _Life:
        life = _Life(id=f"worker{len(self._lives)}", coordinator=self._coordinator.address, transport=self._transport)
        life.run_type = self.run_type
        self._lives.append(life)
        return life

    def end(self) -> None:
        """The process ends, in one way or another."""
        for life in self._lives:
            life.close()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._coordinator.close()
