"""The members of a job: its workers and servers, and what the coordinator knows of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rallypoint.core.view import Member, View


@dataclass(slots=True)
class Membership:
    """The members by id, those who have been here longest first.

    Attributes:
        incarnations: how many numbers have been given to processes that joined.
        workers, servers: who is here.
        proposed: workers that have proposed the job's record, the earliest first.
        leaving: members that were told to go: workers hand their replicas back, servers their shards.
        done: workers that hold the last version.
        awaited: members known to an earlier coordinator that have not come back yet.
        given_up: workers given up for their silence, and until when the job's end is put off for them: most were only
            slow, and come back.
    """

    incarnations: int = 0
    workers: dict[str, Member] = field(default_factory=dict)
    servers: dict[str, Member] = field(default_factory=dict)
    proposed: dict[str, None] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    given_up: dict[str, float] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)

    def __contains__(self, id: str) -> bool:
        return id in self.servers or id in self.workers

    # ---- coming and going ----

    def expect(self, view: View) -> None:
        """An earlier coordinator published `view`: its members are taken to be here, and awaited."""
        self.workers = {member.id: member for member in view.workers}
        self.servers = {member.id: member for member in view.servers}
        self.proposed = dict.fromkeys(self.workers)
        self.awaited = {*self.workers, *self.servers}

    def join(self, member: Member, role: str) -> int:
        """A process came as "worker" or "server"; its incarnation."""
        self.incarnations += 1
        self._of(role)[member.id] = msgspec.structs.replace(member, incarnation=self.incarnations)
        return self.incarnations

    def is_taken(self, id: str, role: str) -> bool:
        """Is there a member of that id and role?"""
        return id in self._of(role)

    def is_back(self, member: Member, role: str) -> bool:
        """Is this an awaited member, the very process?"""
        known = self._of(role).get(member.id)
        return known is not None and known.incarnation == member.incarnation and member.id in self.awaited

    def is_same(self, id: str, role: str, incarnation: int) -> bool:
        """Is the member of that id and role the process with this number? A process that has none is new."""
        known = self._of(role).get(id)
        return known is not None and 0 < incarnation == known.incarnation

    def remove(self, id: str) -> None:
        """The member is gone, with all that is known of it."""
        self.workers.pop(id, None)
        self.servers.pop(id, None)
        self.proposed.pop(id, None)
        for members in (self.leaving, self.done, self.awaited):
            members.discard(id)
        self._heard.pop(id, None)

    @property
    def staying(self) -> dict[str, Member]:
        """The servers that were not told to go; all of them, if all were."""
        staying = {id: server for id, server in self.servers.items() if id not in self.leaving}
        return staying or self.servers

    def _of(self, role: str) -> dict[str, Member]:
        return self.servers if role == "server" else self.workers

    # ---- signs of life ----

    def heard(self, id: str, now: float) -> None:
        """A sign of life."""
        self._heard[id] = now

    def all_heard(self, now: float) -> None:
        """Nobody is known to have been silent before `now`."""
        self._heard = dict.fromkeys((*self.workers, *self.servers), now)

    def silent(self, now: float, patience: float) -> list[tuple[str, float]]:
        """Who has given no sign of life for more than `patience` seconds, and for how long."""
        silences = [(id, now - self._heard.get(id, now)) for id in (*self.workers, *self.servers)]
        return [(id, seconds) for id, seconds in silences if seconds > patience]

    def give_up(self, id: str, until: float) -> None:
        """A silent member is about to be removed; a worker may come back until then, and find the job not over."""
        if id in self.workers:
            self.given_up[id] = until

    def propose(self, worker: str) -> None:
        """A worker has proposed the job's record."""
        self.proposed[worker] = None
        self.given_up.pop(worker, None)

    def is_complete(self, now: float) -> bool:
        """Does everybody who is here hold the last version, and need nobody be waited for?"""
        return self.all_done and all(until <= now for until in self.given_up.values())

    # ---- who computes ----

    def active(self, at_least: int, at_most: int) -> list[str]:
        """The workers that compute; the others stand by. Nobody does while fewer than `at_least` could."""
        able = [worker for worker in self.proposed if worker in self.workers and worker not in self.leaving]
        return able[:at_most] if len(able) >= at_least else []

    @property
    def present(self) -> set[str]:
        """The workers that are here and have proposed the job's record."""
        return self.proposed.keys() & self.workers.keys()

    @property
    def all_done(self) -> bool:
        """Is there nobody left who is to fetch the last version, and anybody at all?"""
        present = self.present
        return bool(present) and present <= self.done
