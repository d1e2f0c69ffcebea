"""All attacks on the job of one policy: every role, before and after the proof. Counts frames; collects faults."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
from fuzz_frames import Corpus, Frame
from fuzz_jobs import PATIENCE_S, POLICIES, WORKERS, Cluster, running
from fuzz_links import FakeServers
from fuzz_members import Faults, Possession, Recorder
from fuzz_strangers import Liar, Stranger

from rallypoint.core.job import JobRecord
from rallypoint.core.view import View
from rallypoint.errors import RallypointError
from rallypoint.net.messages import NewView, Propose, decode

ATTACKS = (
    "coordinator before", "server before", "dialer before",
    "coordinator after", "server after, from a worker", "server after, from a server",
    "worker after, its links", "coordinator after, its members", "server after, its members",
    "worker after, its servers", "worker after, its coordinator", "server after, its coordinator",
)  # fmt: skip
HELD_AT = 3  # the step before which workers wait while strangers attack


class Campaign:
    """Attacks jobs of one policy. `thrown` counts mutated frames by attack; `faults` are sentences."""

    def __init__(self, policy: str, seed: int) -> None:
        self.name, self.policy = policy, POLICIES[policy]
        self.numbers = random.Random(f"{policy} {seed}")
        self.thrown: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()  # how jobs with possessed members end
        self.faults: list[str] = []
        self.corpus, self.script, self.undisturbed = Corpus(), list[Frame](), dict[str, str]()

    def record(self) -> None:
        """Run the job undisturbed: its frames are the models of all that follow."""
        recorder = Recorder(WORKERS[1])
        with recorder.active(), running(self.policy) as cluster:
            assert cluster.finish(), f"{self.name}: the undisturbed job hangs"
        assert not cluster.errors, cluster.errors
        self.corpus, self.script, self.undisturbed = recorder.corpus, recorder.to_worker, cluster.hashes

    def attack(self, which: str, frames: int) -> None:
        """Throw about so many frames in this way, and note what is wrong after it."""
        faults = Faults()
        try:
            with faults.watching():
                self._attack(which, frames)
        except AssertionError as error:
            self.faults.append(f"{self.name}, {which}: {error}")
        self.faults += [f"{self.name}, {which}: {fault}" for fault in faults.found]

    def _attack(self, which: str, frames: int) -> None:
        role, _, how = which.partition(" ")
        if which == "dialer before":
            liar = Liar(self.corpus, self._seed())
            while liar.thrown < frames:
                liar.greet()
            self.thrown[which] += liar.thrown
        elif which == "worker after, its links":
            self._attack_links(which, frames)
        elif how.startswith("after, its"):
            through = {"its coordinator": "coordinator", "its servers": "servers"}.get(how.removeprefix("after, "), "")
            most = self.thrown[which] + frames
            while self.thrown[which] < most:
                self._possess(which, role, through or ("servers" if role == "server" else ""))
        else:
            self._attack_from_outside(which, frames)

    def _seed(self) -> int:
        return self.numbers.randrange(1 << 40)

    # ---- strangers, while the job is held and then goes on ----

    def _attack_from_outside(self, which: str, frames: int) -> None:
        gate = threading.Semaphore(0)

        def held(worker: str, step: int) -> None:
            if step >= HELD_AT:
                assert gate.acquire(timeout=10 * PATIENCE_S)

        replication = 1 if which.endswith("from a server") else None  # a server may change the shards it is backup of
        with running(self.policy, before_step=held, replication=replication) as cluster:
            try:
                self._until_held(cluster)
                stranger = Stranger(cluster, self.corpus, self._seed())
                ways = self._ways(which, cluster, stranger)
                while stranger.thrown < frames:
                    next(ways)()
                    if self.numbers.random() < 0.02:
                        gate.release()  # the job goes on in the midst of it
                self.thrown[which] += stranger.thrown
            finally:
                gate.release(1 << 20)
            self._must_be_undisturbed(cluster, which)

    def _until_held(self, cluster: Cluster) -> None:
        """Until servers have the view and both workers have come to where they wait."""
        reached = threading.Event()
        for _ in range(int(PATIENCE_S / 0.01)):
            progress = [server._views.view is not None for server in cluster.servers]
            if all(progress) and all(server._intake is not None for server in cluster.servers):
                return
            reached.wait(0.01)
        raise AssertionError("the job does not begin")

    def _ways(self, which: str, cluster: Cluster, stranger: Stranger) -> Iterator[Callable[[], None]]:
        while True:
            server = self.numbers.randrange(2)
            view = cluster.servers[server]._views.view
            assert view is not None
            match which:
                case "coordinator before":
                    yield lambda: stranger.greet_badly(None)
                case "server before":
                    yield lambda server=server: stranger.greet_badly(server)  # type: ignore[misc]
                case "coordinator after":
                    yield stranger.at_the_coordinator
                case "server after, from a worker":
                    member = self.numbers.choice(view.workers)
                    yield lambda s=server, m=member: stranger.at_a_server(s, m, "worker")  # type: ignore[misc]
                case _:
                    member = next(m for m in view.servers if m.id != cluster.servers[server].id)
                    yield lambda s=server, m=member: stranger.at_a_server(s, m, "server")  # type: ignore[misc]

    def _must_be_undisturbed(self, cluster: Cluster, which: str) -> None:
        assert cluster.finish(), "the job hangs"
        assert not cluster.errors, f"the job has failed: {cluster.errors}"
        assert not self.policy.same or cluster.hashes == self.undisturbed, "the job has other bytes"

    # ---- a worker's links ----

    def _attack_links(self, which: str, frames: int) -> None:
        record, view = self._agreed()
        servers = FakeServers(record, view, WORKERS[1], self.script, self.corpus, self._seed())
        while servers.thrown < frames:
            servers.attack()
        self.thrown[which] += servers.thrown
        assert not servers.faults, servers.faults[:3]

    def _agreed(self) -> tuple[JobRecord, View]:
        """The job's record and its last view with both workers."""
        proposal = decode(self.corpus.frames("Propose")[0].payload)
        views = [decode(frame.payload) for frame in self.corpus.frames("NewView")]
        assert isinstance(proposal, Propose)
        whole = [new.view for new in views if isinstance(new, NewView) and len(new.view.workers) == len(WORKERS)]
        # as if the other one were to upload the first state
        return proposal.record, msgspec.structs.replace(whole[0], uploader=WORKERS[0])

    # ---- possessed members ----

    def _possess(self, which: str, role: str, through: str) -> None:
        gentle = self.numbers.choice([0.1, 0.9, 0.98])
        possession = Possession(role, self._seed(), rate=4, gentle=gentle, through=through)
        with possession.active(), running(self.policy) as cluster:
            ended = cluster.finish(2 * PATIENCE_S)
        self.thrown[which] += possession.thrown
        self.ends[f"{which}: {_end(cluster)}"] += 1
        odd = {id: error for id, error in cluster.errors.items() if not _is_a_sentence(error)}
        assert not odd, f"a worker has failed: {odd!r}; {possession.last}"
        failures = [str(server._views.failure) for server in cluster.servers] + [str(cluster.coordinator._failure)]
        failed = [failure for failure in failures if " failed: " in failure]
        assert not failed, f"{failed}; {possession.last}"
        assert ended, f"the job hangs; {possession.last}"


def _end(cluster: Cluster) -> str:
    return "an error" if cluster.errors else "done"


def _is_a_sentence(error: BaseException) -> bool:
    return isinstance(error, RallypointError)
