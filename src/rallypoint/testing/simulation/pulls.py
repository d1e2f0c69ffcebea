"""Pulls of rows in the simulation: a worker's, and those that wait at a server.

What decides is real: `RowPull` in `worker/exchange/arrivals.py`, and `core/shard/pulls.py`. `RowPulls` there and in
`server/parts.py` are the counterparts of what stands around them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rallypoint.core.policy import BoundedStaleness
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.pulls import Request, Requests
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Wire
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Content
from rallypoint.worker.exchange.arrivals import RowPull

_NO_BYTES = (memoryview(b""), 0)  # names are as long as nothing


class SimulatedRowPulls:
    """One worker's pull. `send(server, message)` sends to a server, or nowhere if its link is lost."""

    def __init__(self, job: SimulatedJob, shell: WorkerShell, send: Callable[[str, Any], None]) -> None:
        self._job, self._shell, self._send = job, shell, send
        self._pull: RowPull | None = None
        self._pulls = 0
        self._got: dict[int, Content] = {}
        self._replica = -1

    def begin(self, replica: int, shards: Iterable[int]) -> None:
        """The forward pass of the replica in progress needs rows of these parts of tables."""
        self._pulls += 1
        self._replica = replica
        self._pull = RowPull.of(
            self._pulls, self._shell.machine, dict.fromkeys(shards, _NO_BYTES),
            newest=not self._shell.machine.computing,
        )  # fmt: skip

    def whole(self, version: int) -> None:
        """All shards are needed at a version that is to be evaluated, and may not exist yet."""
        self._pulls += 1
        self._replica = -1
        wanted = dict.fromkeys(range(self._job.shards), _NO_BYTES)
        own = {shard: self._job.cadence.updates_before(shard, version) for shard in wanted}
        self._pull = RowPull(self._pulls, version, False, wanted, own=own)

    def whole_model(self) -> list[Content]:
        """What has come of all shards."""
        return [content for _, content in sorted(self._got.items())]

    @property
    def outdated(self) -> bool:
        """Do the servers not keep the step in progress any more?"""
        return self._pull is not None and self._pull.outdated

    def ready(self) -> bool:
        """Is there nothing (more) to wait for? If there is, ask whoever was not asked yet."""
        pull, shell = self._pull, self._shell
        if pull is None or pull.over:
            return True
        for shard in list(pull.unasked(shell.number, shell.view.primary, shell.links.connections)):
            home = shell.view.primary[shard]
            pull.ask(shard, shell.number, home, shell.links.connections[home])
            asked = (pull.version_of(shard), pull.newest, pull.number, shell.machine.step, self._replica)
            self._send(home, ("pull", shell.number, shard, *asked))
        return False

    def end(self) -> None:
        """The replica is over, or stale."""
        self._pull, self._got = None, {}

    def arrived(self, shard: int, number: int, content: Content, *, outdated: bool) -> None:
        """A server has answered."""
        taken = self._pull is not None and self._pull.answered(shard, number, bytearray(), outdated=outdated)
        if taken and not outdated:
            self._got[shard] = content

    def seen(self, model: Sequence[Content]) -> list[Content]:
        """What the replica computes with: the model, and of tables what was pulled."""
        tables = self._job.table_shards
        return [self._got.get(shard, self._job.nothing) if shard in tables else c for shard, c in enumerate(model)]


class ServerPulls:
    """The pulls that wait at one server."""

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        self._requests: Requests[Wire, tuple[int, int, int]] = Requests()

    def add(self, wire: Wire, message: tuple[Any, ...]) -> None:
        """A worker asks."""
        _, _, shard, version, newest, number, step, replica = message
        self._requests.add(shard, Request(wire, version, newest, (number, step, replica)))

    def gone(self, wire: Wire) -> None:
        """The link is closed."""
        self._requests.gone(wire)

    def answer(self, machine_of: Callable[[int], ShardMachine | None], wires_of: Callable[[int], Any]) -> None:
        """Answer what can be answered. `wires_of`: the contents of a shard that are kept, by version."""
        for shard in self._requests.shards:
            machine = machine_of(shard)
            if machine is None or not machine.primary:
                self._requests.refuse(shard)
                continue
            kept = wires_of(shard)
            for request, version in self._requests.answered(shard, machine.published, kept.__contains__):
                number, step, replica = request.what
                content = GARBAGE if version is None else kept[version]
                if version is not None:
                    self._check(shard, machine, version, content, step, replica)
                at = request.version if version is None else version
                request.link.send(1, ("rows", shard, number, content, version is None, at))

    def _check(
        self, shard: int, machine: ShardMachine, version: int, content: Content, step: int, replica: int
    ) -> None:
        """AssertionError unless these rows are what the replica may compute this step with."""
        job = self._job
        if job.same_bytes:
            job.check_version(shard, version, content)
        elif machine.policy.streaming:
            bound = step - job.sync.staleness if isinstance(job.sync, BoundedStaleness) else 0
            for other in range(job.replicas):
                missing = sorted(job.written(shard, other, step if other == replica else bound) - content)
                assert not missing, f"rows of shard {shard} for step {step} of replica {replica} lack {missing}"
        elif not job.skip:
            came = f"rows of shard {shard} at version {version} are of {len(content)} contributions"
            assert len(content) == version * (job.config.quorum or job.replicas), came
