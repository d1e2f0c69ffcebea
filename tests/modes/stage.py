"""A cluster of processes whose members a test starts, kills and replaces one by one."""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from cell_jobs import POLL_S, CellJob, train_cell

from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.state import Resumed
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Message
from rallypoint.net.handshake import Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.tcp import TcpTransport
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.testing.processes import ClusterProcess, ProcessCluster, aggregator_main, server_main, worker_main
from support.beside import until

PATIENCE_S = 60.0  # only for a wait that fails: everything comes within a few seconds on a quiet machine


class Stage(ProcessCluster):
    """One job in a folder. `worker` and `server` start members, `kill` ends them, `result` is what a worker returns."""

    def __init__(self, folder: Path, terms: Terms, cell: CellJob, *, resume: str = "") -> None:
        super().__init__(workers=0, servers=0, terms=terms, folder=str(folder), timeout=PATIENCE_S)
        folder.mkdir(exist_ok=True)
        self.home, self.cell, self.members = folder, cell, dict[str, ClusterProcess]()
        about = JoinInfo(folder=str(folder), snapshots=f"{folder}/snapshots")
        self.coordinator = self.start(_coordinator_main, terms, about, resume)
        self.address = self.answer(self.coordinator)

    def servers_come(self, *names: str) -> None:
        for name in names:
            self.members[name] = self.start(server_main, name, self.address)

    def aggregators_come(self, *names: str) -> None:
        """They are members when this returns."""
        for name in names:
            self.members[name] = self.start(aggregator_main, name, self.address)
            self.answer(self.members[name])

    def workers_come(self, *names: str) -> None:
        for name in names:
            self.members[name] = self.start(worker_main, name, self.address, train_cell, (self.cell,))

    def kill(self, *names: str) -> None:
        """End them with SIGKILL."""
        for name in names:
            self.members[name].process.kill()
            self.members[name].process.join()

    def stop(self, *names: str) -> None:
        """Suspend them with SIGSTOP, to the end."""
        for name in names:
            pid = self.members[name].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)

    def open(self) -> None:
        """Let everybody go on."""
        (Path(self.cell.gate) / "open").touch()

    def result(self, worker: str) -> str:
        """The hash of its weights at the end."""
        answer: str = self.answer(self.members[worker])
        return answer

    def until_over(self) -> None:
        """Until the coordinator has ended: it has written down everything."""
        self.coordinator.process.join(PATIENCE_S)
        assert not self.coordinator.process.is_alive(), "the coordinator does not end"

    def until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait until something has happened."""
        said = lambda: [event.get("text") or event for event in self.events()[-12:]]  # noqa: E731
        until(happened, lambda: f"{what}: the last events are {said()}", within=PATIENCE_S, pause=POLL_S)

    def until_held(self, *workers: str) -> Self:
        """Until these workers wait at the gate."""
        for worker in workers:
            path = Path(self.cell.gate) / f"{worker} waits"
            self.until(path.exists, f"{worker} waits at the gate")
        return self

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What the coordinator has written down, of one type or all."""
        path = self.home / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        return [entry for entry in entries if kind in ("", entry["type"])]

    def said(self, text: str) -> bool:
        """Has the coordinator said this?"""
        return any(text in event["text"] for event in self.events("Say"))

    def order(self, wanted: Message) -> None:
        """As `rallypoint snapshot` and commands like it do."""
        said: queue.SimpleQueue[object] = queue.SimpleQueue()
        link = CoordinatorLink(
            transport=TcpTransport(), address=self.address, me=Identity("observer", "asking", self.token),
            handlers=Handlers(said.put, said.put),
        )  # fmt: skip
        link.start()
        try:
            link.send(wanted)
        finally:
            link.close()

    def close(self) -> None:
        """End whoever is left of them."""
        self.__exit__()
        self.started.clear()


def _coordinator_main(pipe: Any, token: str, terms: Terms, about: JoinInfo, resume: str) -> None:
    start = None
    if resume:
        manifest = SnapshotStore(resume).latest_usable(lambda text: None)
        start = Resumed(manifest.job, manifest.id, manifest.version)
    service = CoordinatorService(terms=terms, token=token, join_info=about, resume=start)
    service.start()
    pipe.send(("value", service.address))
    service.wait()
    service.close()


