"""A whole cluster inside this process, for a script that was started without a launcher."""

from __future__ import annotations

import torch

from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.state import Resumed
from rallypoint.core.cluster.terms import Terms
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.console import RunConsole
from rallypoint.net.handshake import LAUNCHER, Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.transport import InprocTransport
from rallypoint.observe.lenient import say
from rallypoint.server.service import ServerService
from rallypoint.worker.loop.run import Run
from rallypoint.worker.loop.session import Job


class EmbeddedJob(Job):
    """A worker with its own coordinator and server on threads of this process, over the in-process transport.

    With a `console` the run's progress is shown there. The process has as many intra-op threads as before when the job
    is closed.
    """

    def __init__(
        self, *, servers: int = 1, folder: str = "", console: RunConsole | None = None, about: JoinInfo | None = None,
        resume: Resumed | None = None,
    ) -> None:  # fmt: skip
        """`resume`: the snapshot to begin with, which `about` says where to find. None are taken."""
        transport = InprocTransport()
        self._threads_before = torch.get_num_threads()
        self._coordinator = CoordinatorService(
            terms=Terms(servers=servers), bind="coordinator:0", transport=transport,
            join_info=about or JoinInfo(folder=folder), resume=resume,
        )  # fmt: skip
        self._coordinator.start()
        self._servers = [
            ServerService(id=f"server{i}", coordinator=self._coordinator.address, bind="server:0", transport=transport)
            for i in range(servers)
        ]
        for server in self._servers:
            server.start()
        self._console = console
        self._observer = None if console is None else CoordinatorLink(
            transport=transport, address=self._coordinator.address, me=Identity("observer", LAUNCHER),
            handlers=Handlers(console.show, _ended),
        )  # fmt: skip
        if self._observer is not None:
            self._observer.start()
        super().__init__(id="worker0", coordinator=self._coordinator.address, transport=transport)
        if console is not None and (few := fewer_threads(torch.get_num_threads(), self._threads_before)):
            self._say(few)

    def _finish(self, run: Run | None) -> None:
        try:
            super()._finish(run)
        except UsageError as error:
            say(f"warning: {error}. On a cluster the job would fail", error=True)
            return
        if run is not None and not self._finished:
            say("warning: the loop has not begun. On a cluster the job would fail", error=True)

    def close(self) -> None:
        """End the worker, then its cluster."""
        super().close()
        for server in self._servers:
            server.close()
        self._coordinator.close()
        if self._observer is not None and self._console is not None:
            self._observer.close()
            self._console.close()
        torch.set_num_threads(self._threads_before)


def fewer_threads(now: int, before: int) -> str:
    """Return what is said when a job alone computes with fewer intra-op threads than its process had; "" if not."""
    if now >= before:
        return ""
    return (
        f"computing with {now} intra-op thread{'s' if now > 1 else ''} (torch had {before} here): OMP_NUM_THREADS="
        f"{before} gives the job as many, and other bytes"
    )


def _ended(error: RallypointError) -> None:
    """Do nothing: the coordinator closes the observer's link when the job is over."""
