"""The members of a job: its workers, servers and aggregators, and what the coordinator knows of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rallypoint.core.view import Member, View, ViewNumber


@dataclass(slots=True)
class Membership:
    """The members by id, in the order in which they joined.

    Attributes:
        incarnations: the highest incarnation given to a member so far.
        workers, servers, aggregators: the members that are here.
        proposed: the workers that have proposed the job's record, the earliest first.
        leaving: members that were told to leave: their replicas and shards move to others.
        done: workers that hold the last version.
        says_done: worker that says so -> the generation and the version that it says it of; see `Completion`.
        left: worker whose script has left its loop -> the last version that needs nothing more of it (-1:
            none any more, after a roll-back). It computes no more.
        awaited: members without a connection that are expected to connect again: those of an earlier coordinator's
            view, and those whose connection broke without a word.
        resets: member whose connection was reset -> why it may be gone; looked at with the next tick.
        given_up: worker given up for its silence -> the time (s) until which the job's end waits for it. Most of them
            were only slow, and come back.
        apart: members that hold the job up, by id: see `health.reach`. Such a worker stands by, also if it comes back;
            such a server hands its shards over.
    """

    incarnations: int = 0
    workers: dict[str, Member] = field(default_factory=dict)
    servers: dict[str, Member] = field(default_factory=dict)
    aggregators: dict[str, Member] = field(default_factory=dict)
    proposed: dict[str, None] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    says_done: dict[str, tuple[ViewNumber, int]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)
    resets: dict[str, str] = field(default_factory=dict)
    given_up: dict[str, float] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    _heard: dict[str, float] = field(default_factory=dict)
    _processes: dict[str, bytes] = field(default_factory=dict)  # what a member calls its process, if it was told

    def __contains__(self, id: str) -> bool:
        return id in self.servers or id in self.workers or id in self.aggregators

    # ---- coming and going ----

    def expect(self, view: View) -> None:
        """Count the members of `view`, which an earlier coordinator published, as here and awaited."""
        self.workers = {member.id: member for member in view.workers}
        self.servers = {member.id: member for member in view.servers}
        self.aggregators = {member.id: member for member in view.aggregators}
        self.proposed = dict.fromkeys(self.workers)
        self.awaited = {*self.everybody}

    @property
    def everybody(self) -> list[str]:
        """The ids of all members."""
        return [*self.workers, *self.servers, *self.aggregators]

    def join(self, member: Member, role: str, process: bytes = b"") -> int:
        """Add a process that joined as "worker", "server" or "aggregator". Returns its new incarnation, never the one
        that it has: it would not notice that it is new."""
        self.incarnations += 1 + (member.incarnation == self.incarnations + 1)
        self._processes.pop(member.id, None)
        if process:
            self._processes[member.id] = process
        self._of(role)[member.id] = msgspec.structs.replace(member, incarnation=self.incarnations)
        return self.incarnations

    def is_taken(self, id: str, role: str) -> bool:
        return id in self._of(role)

    def role_of(self, id: str) -> str:
        return "server" if id in self.servers else "aggregator" if id in self.aggregators else "worker"

    def unlinked(self, id: str, reset: str = "") -> None:
        """The member's connection broke, and it may live. `reset`: its system sent a reset, with this reason."""
        self.awaited.add(id)
        if reset:
            self.resets[id] = reset

    def returned(self, id: str) -> None:
        """The same process has connected again."""
        self.awaited.discard(id)
        self.resets.pop(id, None)

    def same(self, id: str, role: str, incarnation: int, process: bytes = b"") -> Member | None:
        """The member of that id and role if it has this incarnation, else None.

        With 0 a process says that it has not heard of its admission. It is the same if the member has that `process`,
        and has not spoken yet.
        """
        known = self._of(role).get(id)
        if known is None or (incarnation and incarnation != known.incarnation):
            return None
        return known if incarnation or (process and process == self._processes.get(id)) else None

    def remove(self, id: str) -> None:
        """Remove the member and all that is known of it."""
        here = (self.workers, self.servers, self.aggregators)
        for known in (*here, self.proposed, self.resets, self.says_done, self.left, self._heard, self._processes):
            known.pop(id, None)
        for members in (self.leaving, self.done, self.awaited):
            members.discard(id)

    @property
    def staying(self) -> dict[str, Member]:
        """The servers that were not told to leave, and are not set apart; if there is none, all of them."""
        staying = {id: server for id, server in self.servers.items() if id not in self.leaving | self.apart}
        return staying or self.servers

    def _of(self, role: str) -> dict[str, Member]:
        return {"server": self.servers, "aggregator": self.aggregators}.get(role, self.workers)

    # ---- signs of life ----

    def heard(self, id: str, now: float) -> None:
        """Note a sign of life of the member at time `now` (s)."""
        self._heard[id] = now

    def spoke(self, id: str, now: float) -> None:
        """Note a message of the member: it has heard that it is admitted, so its process's name says no more. Nothing
        is noted of one that is gone: each tick would look at it."""
        if id not in self:
            return
        self.heard(id, now)
        self._processes.pop(id, None)

    def all_heard(self, now: float) -> None:
        """Count all members as heard at time `now` (s): a new coordinator does not know of earlier silence."""
        self._heard = dict.fromkeys(self.everybody, now)

    def silent(self, now: float, patience: float) -> list[tuple[str, float]]:
        """The (id, seconds) of each member that gave no sign of life for more than `patience` seconds."""
        if now - min(self._heard.values(), default=now) <= patience:
            return []  # asked with each tick
        silences = [(id, now - self._heard.get(id, now)) for id in self.everybody]
        return [(id, seconds) for id, seconds in silences if seconds > patience]

    def heard_within(self, id: str, now: float, seconds: float) -> bool:
        """True if the member gave a sign of life in the last `seconds`."""
        return now - self._heard.get(id, now) <= seconds

    def give_up(self, id: str, until: float) -> None:
        """Note that a silent member is about to be removed. If it is a worker, the job does not end before `until`."""
        if id in self.workers:
            self.given_up[id] = until

    def propose(self, worker: str) -> None:
        """Note that a worker has proposed the job's record."""
        self.proposed[worker] = None
        self.given_up.pop(worker, None)

    def is_complete(self, now: float) -> bool:
        """True if all workers hold the last version and the job's end waits for no worker that was given up."""
        return self.all_done and all(until <= now for until in self.given_up.values())

    # ---- who computes ----

    def active(self, at_least: int, at_most: int, last: int | None = None) -> list[str]:
        """The workers that compute: at most `at_most`, the earliest first; none while fewer than `at_least` could.

        Who has left its loop before version `last` computes only if there is nobody else.
        """
        able = [worker for worker in self.proposed if worker in self.workers and worker not in self.leaving]
        sound = [worker for worker in able if worker not in self.apart]
        chosen = sound if len(sound) >= at_least and sound else able
        enough = len(chosen) >= at_least
        if last is not None and self.left:
            chosen = [worker for worker in chosen if self.left.get(worker, last) >= last] or chosen
        return chosen[:at_most] if enough else []

    @property
    def present(self) -> set[str]:
        """The workers that are here and have proposed the job's record."""
        return self.proposed.keys() & self.workers.keys()

    @property
    def all_done(self) -> bool:
        """True if there are workers and all of them hold the last version."""
        return bool(self.done) and bool(self.present) and self.finishing <= self.done

    @property
    def finishing(self) -> set[str]:
        """The workers that the job's end waits for. Who is set apart may be unable to fetch the last version: they
        count only if there is nobody else."""
        return self.present - self.apart or self.present
