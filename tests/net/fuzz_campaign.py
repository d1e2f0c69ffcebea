"""All attacks on the job of one policy: every role, before and after the proof. Counts frames; collects faults."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from fuzz_frames import Corpus, Frame
from fuzz_jobs import PATIENCE_S, POLICIES, WITH_AGGREGATOR, WORKERS, Cluster, running
from fuzz_links import FakeServers
from fuzz_members import ROLES, Faults, Possession, Recorder
from fuzz_strangers import Liar, Stranger

from rallypoint.core.job import JobRecord
from rallypoint.core.protocol import NewView, Propose, decode
from rallypoint.core.view import View
from rallypoint.errors import RallypointError

FROM_A_SERVER = "server after, from a server"
OUTSIDE = ("coordinator before", "server before", "coordinator after", "server after, from a worker", FROM_A_SERVER)
AT_AN_AGGREGATOR = ("aggregator before", "aggregator after, from a worker")  # of a job that has one
WHOLE_JOBS = tuple(
    f"{role} after, its {through}" for role in ROLES for through in ("members", "servers", "coordinator")
    if (through == "members") == (role == "coordinator")
)  # fmt: skip
ATTACKS = (*OUTSIDE, "dialer before", "worker after, its links", *WHOLE_JOBS)
_FROM_OUTSIDE = (*OUTSIDE, *AT_AN_AGGREGATOR)
_SHORT_S = 6.0
HELD_AT = 3  # the step before which workers wait while strangers attack


class Campaign:
    """Attacks jobs of one policy, with TLS if there are `certificates`.

    `thrown` counts mutated frames by attack; `faults` are sentences.
    """

    def __init__(self, policy: str, seed: int, certificates: Path | None = None) -> None:
        self.name, self.policy, self._tls = policy, (POLICIES | WITH_AGGREGATOR)[policy], certificates
        self.numbers = random.Random(f"{policy} {seed}")
        self.thrown: Counter[str] = Counter()
        self.faults: list[str] = []
        self.corpus, self.script, self.undisturbed = Corpus(), list[Frame](), dict[str, str]()

    def _running(self, **options: Any) -> AbstractContextManager[Cluster]:
        return running(self.policy, certificates=self._tls, **options)

    def record(self) -> None:
        """Run the job undisturbed: its frames are the models of all that follow."""
        recorder = Recorder(WORKERS[1])
        with recorder.active(), self._running() as cluster:
            assert cluster.finish(), f"{self.name}: the undisturbed job hangs"
        assert not cluster.errors, cluster.errors
        self.corpus, self.script, self.undisturbed = recorder.corpus, recorder.to_worker, cluster.hashes

    def attack(self, frames: dict[str, int]) -> None:
        """Throw about so many frames in each of these ways, and note what is wrong after them."""
        outside = {which: count for which, count in frames.items() if which in _FROM_OUTSIDE}
        # A server may change the shards of which it is the backup: so the one that lies is the backup of none.
        for some, replication in (([w for w in outside if w != FROM_A_SERVER], None), ([FROM_A_SERVER], 1)):
            if ways := {which: outside[which] for which in some if which in outside}:
                self._watched(", ".join(ways), lambda: self._attack_from_outside(ways, replication))  # noqa: B023
        for which, count in frames.items():
            if which not in _FROM_OUTSIDE:
                self._watched(which, lambda: self._attack(which, count))  # noqa: B023

    def _watched(self, what: str, attack: Callable[[], None]) -> None:
        faults = Faults()
        try:
            with faults.watching():
                attack()
        except AssertionError as error:
            self.faults.append(f"{self.name}, {what}: {error}")
        self.faults += [f"{self.name}, {what}: {fault}" for fault in faults.found]

    def _attack(self, which: str, frames: int) -> None:
        if which == "dialer before":
            liar = Liar(self.corpus, self._seed())
            while liar.thrown < frames:
                liar.greet()
            self.thrown[which] += liar.thrown
        elif which == "worker after, its links":
            self._attack_links(which, frames)
        else:
            role, _, through = which.partition(" after, its ")
            most = self.thrown[which] + frames
            while self.thrown[which] < most:
                self._possess(which, role, through)

    def _seed(self) -> int:
        return self.numbers.randrange(1 << 40)

    # ---- strangers, while the job is held and then goes on ----

    def _attack_from_outside(self, frames: dict[str, int], replication: int | None) -> None:
        gate, here = threading.Semaphore(0), threading.Semaphore(0)

        def held(worker: str, step: int) -> None:
            if step >= HELD_AT:
                here.release()
                assert gate.acquire(timeout=10 * PATIENCE_S)

        with self._running(before_step=held, replication=replication) as cluster:
            stranger = Stranger(cluster, self.corpus, self._seed())
            try:
                assert all(here.acquire(timeout=PATIENCE_S) for _ in WORKERS), "the job does not begin"
                if any("worker" in which for which in frames):
                    stranger.join()
                for which, count in frames.items():
                    self._throw(which, count, cluster, stranger, gate)
            finally:
                gate.release(1 << 20)
                stranger.close()
            assert cluster.finish(), "the job hangs"
        assert not cluster.errors, f"the job has failed: {cluster.errors}"
        failed = [one._views.failure for one in cluster.listeners if " failed: " in str(one._views.failure)]
        assert not failed, failed
        assert all(one.counts[1] for one in cluster.aggregators), "the aggregator has sent nothing upstream"
        if self.policy.same:
            others = [id for id in WORKERS if cluster.hashes.get(id) != self.undisturbed[id]]
            assert not others, f"the job has other bytes on {' and '.join(others)}"

    def _throw(self, which: str, frames: int, cluster: Cluster, stranger: Stranger, gate: threading.Semaphore) -> None:
        ways, before, left = self._ways(which, cluster, stranger), stranger.thrown, 6
        while (thrown := stranger.thrown - before) < frames:
            next(ways)()
            if left > 6 * (frames - thrown) // frames:
                left -= 1
                gate.release()  # the job goes on in the midst of it
        self.thrown[which] += thrown

    def _ways(self, which: str, cluster: Cluster, stranger: Stranger) -> Iterator[Callable[[], None]]:
        while True:
            server = len(cluster.servers) if which in AT_AN_AGGREGATOR else self.numbers.randrange(2)
            view = cluster.listeners[server]._views.view
            assert view is not None
            match which:
                case "coordinator before":
                    yield lambda: stranger.greet_badly(None)
                case "server before" | "aggregator before":
                    yield lambda server=server: stranger.greet_badly(server)  # type: ignore[misc]
                case "coordinator after":
                    yield stranger.at_the_coordinator
                case "server after, from a worker" | "aggregator after, from a worker":
                    assert stranger.standby is not None
                    yield lambda s=server: stranger.at_a_server(s, stranger.standby, "worker")  # type: ignore[misc]
                case _:  # FROM_A_SERVER
                    member = next(m for m in view.servers if m.id != cluster.servers[server].id)
                    yield lambda s=server, m=member: stranger.at_a_server(s, m, "server")  # type: ignore[misc]

    # ---- a worker's links ----

    def _attack_links(self, which: str, frames: int) -> None:
        record, view = self.agreed()
        servers = FakeServers(record, view, WORKERS[1], self.script, self.corpus, self._seed())
        while servers.thrown < frames:
            servers.attack()
        self.thrown[which] += servers.thrown
        assert not servers.faults, servers.faults[:3]

    def agreed(self) -> tuple[JobRecord, View]:
        """The job's record and its last view with both workers."""
        proposal = decode(self.corpus.frames("Propose")[0].payload)
        views = [decode(frame.payload) for frame in self.corpus.frames("NewView")]
        assert isinstance(proposal, Propose)
        whole = [new.view for new in views if isinstance(new, NewView) and len(new.view.workers) == len(WORKERS)]
        # as if the other one were to upload the first state
        return proposal.record, msgspec.structs.replace(whole[0], uploader=WORKERS[0])

    # ---- possessed members ----

    def _possess(self, which: str, role: str, through: str) -> None:
        # What is said in a member's name is believed: that it has left, holds a codec state, or wants the parameters
        # for another replica. A job may wait then, and says for what. Only a worker needs nobody's help to end; but if
        # it is told of a version that does not exist, it sends nothing more for the step of which that is the result.
        lies = role != "worker" or through == "coordinator"
        gentle = self.numbers.choice([0.1, 0.9, 0.98])
        through = "" if through == "members" else through
        possession = Possession(role, self._seed(), rate=4, gentle=gentle, through=through)
        with possession.active(), self._running() as cluster:
            ended = cluster.finish(_SHORT_S if lies else 2 * PATIENCE_S)
        self.thrown[which] += possession.thrown
        odd = {id: error for id, error in cluster.errors.items() if not _is_a_sentence(error)}
        assert not odd, f"a worker has failed: {odd!r}; {possession.last}"
        failures = [str(server._views.failure) for server in cluster.servers] + [str(cluster.coordinator._failure)]
        failed = [failure for failure in failures if " failed: " in failure]
        assert not failed, f"{failed}; {possession.last}"
        assert ended or lies or possession.promised, f"the job hangs: {_waits(possession.corpus)}; {possession.last}"


def _waits(corpus: Corpus) -> list[str]:
    """What members said that they wait for."""
    said = [frame for name in corpus.kinds if name in ("Say", "Waiting") for frame in corpus.frames(name)]
    return sorted({str(msgspec.msgpack.decode(frame.payload).get("text")) for frame in said})


def _is_a_sentence(error: BaseException) -> bool:
    return isinstance(error, RallypointError)
