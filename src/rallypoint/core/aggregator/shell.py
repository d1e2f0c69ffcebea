"""The bookkeeping between an aggregator's machine and its links, without any input or output.

It knows the workers' newest links, and decides which incoming frames reach the machine (I10). `aggregator.py`
runs it over TCP channels, `testing/simulation` over simulated links. Its methods return the machine's
effects, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from rallypoint.core.aggregator.effects import BlockContribution, DismissWorkers, DropPayload, Effect
from rallypoint.core.aggregator.machine import AggregatorMachine
from rallypoint.core.shard.shell import Fence, L
from rallypoint.core.view import Member, View, ViewNumber


@dataclass(slots=True)
class AggregatorShell(Generic[L]):
    """One aggregator in one job. Not thread-safe: only the owner thread calls it.

    Attributes:
        workers: each worker's newest link.
    """

    machine: AggregatorMachine
    fence: Fence = field(default_factory=Fence)
    workers: dict[str, L] = field(default_factory=dict)

    def adopt(self, view: View) -> list[Effect]:
        """Adopt a new view. Returns nothing if it is not newer."""
        return self.machine.viewed(view) if self.fence.adopt(view) else []

    # ---- workers ----

    def linked(self, link: L, worker: str) -> list[Effect]:
        """A worker connected (again). Ignores the link if a newer one from this worker is known."""
        other = self.workers.get(worker)
        if other is not None and other.number >= link.number:
            return []
        self.workers[worker] = link
        return self.machine.gone(worker)

    def gone(self, link: L, worker: str) -> list[Effect]:
        """The link is closed."""
        if self.workers.get(worker) is not link:
            return []
        del self.workers[worker]
        return self.machine.gone(worker)

    def followed(self, link: L, worker: str, round: int, number: ViewNumber) -> list[Effect]:
        """A worker says, under view `number`, that from `round` on everything that it contributes comes here."""
        if self.workers.get(worker) is not link or self.fence.is_stale(number):
            return []
        return self.machine.followed(worker, round)

    def unfollowed(self, link: L, worker: str) -> list[Effect]:
        """The worker wants no more versions."""
        return self.machine.gone(worker) if self.workers.get(worker) is link else []

    def fetched(self, link: L, worker: str, shard: int, version: int) -> list[Effect]:
        """The worker needs one version again."""
        return self.machine.fetched(worker, shard, version) if self.workers.get(worker) is link else []

    def contributed(self, worker: str, new: BlockContribution, number: ViewNumber) -> list[Effect]:
        """A worker's contribution has arrived that was sent under view `number`. Others' replicas are not taken: a
        server could not tell any more who has pushed them."""
        view = self.machine.view
        taken = view is not None and view.takes(worker, range(*new.block))
        if self.fence.is_stale(number) or not taken:
            return [DropPayload(new.ticket)]
        return self.machine.contributed(new)

    # ---- servers ----

    def server_up(self, server: Member) -> list[Effect]:
        """The link to a server is up. Ignored if the current view does not have that incarnation of the server."""
        return self.machine.server_up(server.id) if self._has(server) else []

    def server_lost(self, server: Member) -> list[Effect]:
        """The link to a server has ended; it will be made again."""
        return self.machine.server_lost(server.id) if self._has(server) else []

    def arrived(self, shard: int, version: int, ticket: int, number: ViewNumber) -> list[Effect]:
        """A version has arrived that a server sent under view `number`."""
        return [DropPayload(ticket)] if self.fence.is_stale(number) else self.machine.arrived(shard, version, ticket)

    def dismissed(self, effect: DismissWorkers) -> Sequence[L]:
        """The links to end for this effect. They count as gone from now on."""
        links = [self.workers.pop(worker, None) for worker in effect.workers]
        return [link for link in links if link is not None]

    def _has(self, server: Member) -> bool:
        return self.machine.view is not None and server in self.machine.view.servers
