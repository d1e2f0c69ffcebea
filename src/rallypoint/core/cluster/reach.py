"""Who is given up, and why: `Silence` finds members that do not beat, `Reach` those that beat and hold the job up
(pairs that cannot reach each other, threads that hang). A new reason from what beats say: cases of `Reach.look`.

Each beat says whom its sender cannot reach, and for how long its main thread has waited for others. A worker that waits
for three heartbeats and cannot reach a server, or a server that cannot reach another one while every worker waits, is a
pair that stalls the job. The smallest set of members that ends all such pairs is set apart: the member in most pairs
first, a worker before a server.

    w0 cannot reach s1                  w0 is set apart (s1, if nobody could compute in w0's place)
    w0 and w1 cannot reach s1           s1
    w0 cannot reach s0 and s1           w0
    s0 cannot reach s1                  the one that the job can do without

A worker set apart is given up; it comes back at once and stands by. A server set apart keeps what it holds until its
shards are elsewhere; if the stall lasts, no more of them move and the job can go on without it (from a snapshot, if
need be), it is given up too. Both take part again when nobody has missed them for ten heartbeats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect, Refuse
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.state import Phase
from rallypoint.core.cluster.terms import LIVING_S
from rallypoint.core.placing.view_change import surviving_primaries
from rallypoint.core.protocol import Aborted, Beat, Disproved, Say

STALLED = 3.0  # heartbeats without progress
MISSED = 1.5  # heartbeats for which a peer could not be reached: a link that comes back sooner is no reason
SOUND = 10.0  # heartbeats without trouble, after which a member takes part again
SLOW = 10.0  # a step may take so many times the median before its thread counts as hanging
FIRST = 10.0  # a worker's first step may take so many times longer: it may compile its model
_STEPS = 32

Pairs = dict[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Case:
    """A member to set apart, and the sentence that says why."""

    member: str
    why: str


@dataclass(slots=True)
class Reach:
    """What the last beats said. Every `now` is in seconds."""

    course: Course
    _beats: dict[str, Beat] = field(default_factory=dict)
    _waits: set[str] = field(default_factory=set)  # whose last beat said that it waits
    _misses: set[str] = field(default_factory=set)  # whose last beat named somebody whom it could not reach
    _moved: dict[str, float] = field(default_factory=dict)  # worker -> when its main thread last got on
    _reported: set[str] = field(default_factory=set)  # workers that have computed a replica
    _trouble: dict[str, float] = field(default_factory=dict)  # member set apart -> when it was last missed
    _hung: dict[str, int] = field(default_factory=dict)  # worker set apart for hanging -> its activity by then
    _rises: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _risen: tuple[int, float] = (-1, 0.0)  # the furthest step, and when it was first reported
    _to_move: dict[str, int] = field(default_factory=dict)  # server set apart -> its shards that no other server has
    _calm: float = 0.0  # do not look before this time: the last remedy has to work first

    # ---- what is heard ----

    def beat(self, member: str, beat: Beat) -> None:
        before, now = self._beats.get(member), self.course.now
        if before is None or before.activity != beat.activity or beat.waited > 0:
            self._moved[member] = now
        self._beats[member] = beat
        (self._waits.add if beat.waited > 0 else self._waits.discard)(member)
        (self._misses.add if beat.unreachable else self._misses.discard)(member)

    def computed(self, worker: str, step: int) -> None:
        """Note that a worker has computed a replica of `step`."""
        self._reported.add(worker)
        if step > self._risen[0]:
            if self._risen[0] >= 0:
                self._rises.append((self.course.now - self._risen[1]) / (step - self._risen[0]))
            self._risen = step, self.course.now

    def forget(self, member: str) -> None:
        """Drop what is known of a process that is gone."""
        for known in (self._beats, self._moved, self._to_move):
            known.pop(member, None)
        for among in (self._reported, self._waits, self._misses):
            among.discard(member)

    # ---- what follows from it ----

    def look(self) -> list[Case]:
        """Find the members to set apart now."""
        course = self.course
        view, now = course.view, course.now
        if view is None or now < self._calm:
            return []
        patience = STALLED * course.terms.heartbeat
        # Asked with each tick: only those who say something are looked at
        waited = {worker: self._beats[worker].waited for worker in self._waits if self._fresh(worker)}
        waited = waited and {worker: waited[worker] for worker in self._assigned() & waited.keys()}
        waiting = {worker for worker, seconds in waited.items() if seconds >= patience}
        soon = {worker for worker, seconds in waited.items() if 0 < seconds < patience}
        found = self._pairs(waiting)
        pairs = self._ripe(found, soon)
        if found and not pairs:
            return []
        if pairs and self._shards_move(pairs):
            self._calm = now + patience
            return []
        cases = self._cover(pairs) if pairs else self._hanging(waiting)
        if cases:
            self._calm = now + patience
            self._trouble |= {case.member: now for case in cases}
            self._to_move |= {case.member: self._held_alone(case.member) for case in cases}
        return cases

    def _shards_move(self, pairs: Pairs) -> bool:
        """True if a server in `pairs` hands its shards over: it holds fewer of them alone than at the last look."""
        before = dict(self._to_move)
        for server in {member for pair in pairs for member in pair} & self.course.members.apart & before.keys():
            self._to_move[server] = self._held_alone(server)
        return any(left < before[server] for server, left in self._to_move.items())

    def _held_alone(self, server: str) -> int:
        """The number of shards that would be lost with this server."""
        assert self.course.view is not None
        return len(set(self.course.view.shards_of(server)) - self.course.views.caught_up)

    def sound(self) -> list[str]:
        """The members that were set apart, and that nobody has missed for long enough. They take part again."""
        members, now, heartbeat = self.course.members, self.course.now, self.course.terms.heartbeat
        for name in self._misses:
            missed = [peer for peer in self._beats[name].unreachable if peer in members] if self._fresh(name) else []
            for member in {*missed, name} & self._trouble.keys() if missed else ():
                self._trouble[member] = now
        for worker, activity in self._hung.items():
            if worker not in self._beats or self._beats[worker].activity == activity:
                self._trouble[worker] = now
        sound = [id for id, when in self._trouble.items() if now - when > SOUND * heartbeat]
        for member in sound:
            del self._trouble[member]
            self._hung.pop(member, None)
            self._to_move.pop(member, None)
        return sound

    # ---- pairs ----

    def _assigned(self) -> set[str]:
        """The workers that the job waits for."""
        course, view = self.course, self.course.view
        assert view is not None
        if view.orders.ending:  # all who have not got the last version
            return course.members.present - course.members.done - course.members.apart
        if not view.assignments:
            return {view.uploader} & course.members.workers.keys()
        return {worker for worker, own in view.assigned(course.furthest + 1).items() if own}

    def _fresh(self, member: str) -> bool:
        """True if the member is heard: silence is looked for elsewhere."""
        heartbeat = self.course.terms.heartbeat
        return member in self._beats and self.course.members.heard_within(member, self.course.now, heartbeat / 2)

    def _needed(self) -> set[str]:
        """The servers that hold shards."""
        view = self.course.view
        assert view is not None
        return view.holders & self.course.members.servers.keys()

    def _ripe(self, pairs: Pairs, soon: set[str]) -> Pairs:
        """The pairs to judge now. The workers `soon` will have waited long enough in a moment: then they, and servers,
        may add pairs with the same peers, and another member may be the one to set apart."""
        seen: set[str] = set()
        for member in (*soon, *(self._needed() if soon else ())):
            if self._fresh(member) and (missed := self._beats[member].unreachable.keys() & self._needed()):
                seen |= {member, *missed}
        return {pair: seconds for pair, seconds in pairs.items() if seen.isdisjoint(pair)}

    def _pairs(self, waiting: set[str]) -> Pairs:
        if not waiting:
            return {}
        needed = self._needed()
        whole = waiting == self._assigned()
        found: Pairs = {}
        for member in (*sorted(waiting), *(sorted(needed) if whole else ())):
            for peer, seconds in self._beats[member].unreachable.items() if self._fresh(member) else ():
                late = seconds >= MISSED * self.course.terms.heartbeat
                if late and peer in needed and self._fresh(peer) and (peer, member) not in found:
                    found[member, peer] = seconds
        return found

    def _cover(self, pairs: Pairs) -> list[Case]:
        cases: list[Case] = []
        apart: set[str] = set()
        left = dict(pairs)
        while left:
            able = [member for member in sorted({m for pair in left for m in pair}) if self._can_spare(member, apart)]
            if not able:
                break  # the job cannot go on without any of them: wait
            chosen = max(able, key=lambda member: self._rank(member, left))
            mine = {pair: seconds for pair, seconds in left.items() if chosen in pair}
            apart.add(chosen)
            cases.append(Case(chosen, self._sentence(chosen, mine)))
            left = {pair: seconds for pair, seconds in left.items() if chosen not in pair}
        return cases

    def _rank(self, member: str, pairs: Pairs) -> tuple[int, bool, bool, int, str]:
        """The higher, the rather it is set apart."""
        course = self.course
        assert course.view is not None
        is_worker = member in course.members.workers
        held = 0 if is_worker else len(course.view.shards_of(member))
        return sum(member in pair for pair in pairs), is_worker, is_worker or self._is_safe(member), -held, member

    def _is_safe(self, server: str) -> bool:
        """True if nothing would be lost with this server."""
        course = self.course
        if course.recovery.workers_store:
            return True
        assert course.view is not None
        others = {id: member for id, member in course.members.servers.items() if id != server}
        return surviving_primaries(course.view, others, course.views.caught_up) is not None

    def _can_spare(self, member: str, apart: set[str]) -> bool:
        course, members = self.course, self.course.members
        if member in members.apart:  # its shards have not moved in time: go on without it, if the job can
            return member in members.servers and (self._is_safe(member) or course.terms.snapshots)
        if member in members.servers:
            return bool(members.servers.keys() - members.leaving - members.apart - apart - {member})
        able = members.present - members.leaving - members.apart - apart - {member}
        return len(able) >= max(1, course.terms.workers_min)

    def _sentence(self, chosen: str, pairs: Mapping[tuple[str, str], float]) -> str:
        words = " and ".join(
            f"{one} has not reached {other} for {seconds:.1f} s" for (one, other), seconds in sorted(pairs.items())
        )
        return f"{words}, and the job has made no progress for {STALLED:.0f} heartbeats"

    def _hanging(self, waiting: set[str]) -> list[Case]:
        """Workers whose main threads do nothing, if all others wait for them."""
        course = self.course
        if not course.terms.hang_after or not course.begun or course.view is None or course.view.orders.ending:
            return []
        busy = self._assigned() - waiting
        # That two hang and nobody waits is less likely than that they do something long at the same time.
        if not busy or (len(busy) > 1 and not waiting) or not all(map(self._hangs, busy)):
            return []
        able = course.members.present - course.members.leaving - course.members.apart - busy
        if len(able) < max(1, course.terms.workers_min):
            return []
        self._hung |= {worker: self._beats[worker].activity for worker in busy}
        return [
            Case(worker, f"its main thread hangs: nothing for {course.now - self._moved[worker]:.0f} s while all wait")
            for worker in sorted(busy)
        ]

    def _hangs(self, worker: str) -> bool:
        if not self._fresh(worker) or self._beats[worker].waited > 0:
            return False
        usual = SLOW * median(self._rises) if self._rises else 0.0
        patience = max(self.course.terms.hang_after, usual) * (1 if worker in self._reported else FIRST)
        return self.course.now - self._moved[worker] > patience


# Which silent members to give up. Silence is not death: who hears nearly nobody presumes itself cut off (I12).
#
# Example, with a heartbeat of 3 s: 1 of 4 members is silent for 3 s: it is given up. 3 or 4 of 4 are silent: nobody is,
# because it is far more likely that the coordinator's own network is down. Members go on without a coordinator, connect
# again when they can reach it, and keep their incarnation and with it all that they hold.
#
#     hears enough -> cut off     all but a few members are silent, and one of them for longer than the heartbeat
#     cut off -> hears enough     more than a few are heard: for a while nobody is given up, so that the others can
#     return
#
# A member under whose name another process has come counts as heard here: the network is well, and the member is dead.
# Containers that a machine starts again in place come like that, all of them at once.

FEW = 4  # at most one member in so many is heard: the coordinator presumes itself cut off
RETURN_S = 3.0  # after a cut, TCP may wait so long before it tries again: members that come back need that time


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong at this moment.

    Attributes:
        given_up: (member, reason) of each member to remove.
        dead: those among them whose connection was reset: they will not come back as the same process.
        said: a sentence for the observers; "" if there is nothing new.
    """

    given_up: tuple[tuple[str, str], ...] = ()
    said: str = ""
    dead: frozenset[str] = frozenset()


@dataclass(slots=True)
class Silence:
    """Looks at the members at every tick.

    Attributes:
        heartbeat: seconds without a sign of life after which a member is given up.
        living: seconds for which members go on without a coordinator.
        cut_off: the coordinator presumes itself cut off.
    """

    heartbeat: float
    living: float = LIVING_S
    cut_off: bool = False
    _patient_until: float = field(default=0.0)

    def look(self, members: Membership, now: float, replaced: frozenset[str] = frozenset()) -> Finding:
        """Find the members to give up at `now` (s). `replaced`: other processes have come under these names. They have
        the job's token and are connected, so the network to where they run is well, and the member itself is silent."""
        resets, members.resets = members.resets, {}
        quiet = {id for id, _ in members.silent(now, self.heartbeat / 2)} | resets.keys()
        everybody = len(members.everybody)
        silent = members.silent(now, self.heartbeat)
        reached = everybody - len(quiet - replaced)
        lonely = len(quiet) > 1 and reached * FEW <= everybody
        if lonely and (self.cut_off or silent):
            return self._isolated(members, silent, now)
        said = ""
        if self.cut_off:
            self.cut_off, self._patient_until = False, now + max(self.heartbeat, RETURN_S)
            how = "have been replaced" if quiet & replaced else "are heard again"
            said = f"{reached} of {everybody} members {how}: the coordinator is no longer cut off"
        gone = [] if lonely else list(resets.items())
        dead = frozenset(id for id, _ in gone)
        gone += [(id, _why(seconds)) for id, seconds in silent if now >= self._patient_until or id in replaced]
        return Finding(tuple(gone), said, dead)

    def _isolated(self, members: Membership, silent: list[tuple[str, float]], now: float) -> Finding:
        said, everybody = "", len(members.everybody)
        if not self.cut_off:
            self.cut_off = True
            said = (
                f"no sign of life from {len(members.silent(now, self.heartbeat / 2))} of {everybody} members: the "
                "coordinator presumes that it is cut off itself, and gives nobody up"
            )
        ended = [(id, seconds) for id, seconds in silent if seconds > self.living + self.heartbeat]
        return Finding(tuple((id, _why(seconds)) for id, seconds in ended), said)


def _why(seconds: float) -> str:
    return f"no sign of life for {seconds:.1f} s"


# Sets members apart that hold the job up (`Reach` finds them), lets them take part again, refuses others.


def set_apart(reach: Reach, course: Course, left: Callable[[str, str], list[Effect]]) -> list[Effect]:
    """Set members apart that hold the job up; let those take part again that nobody has missed for long.

    A worker is given up and stands by when it comes back. A server keeps what it holds, and is to hold no shards.
    `left(member, why)` is what happens when a member is gone. The caller publishes the view that follows, if anything
    is returned.
    """
    effects: list[Effect] = []
    for case in reach.look():
        if course.phase is not Phase.RUNNING:
            break  # the loss of the member before has ended the job, or lost its state
        again = case.member in course.members.apart
        course.members.apart.add(case.member)
        if again or case.member in course.members.workers or course.recovery.workers_store:
            effects.append(Refuse(case.member, f"given up: {case.why}"))
            effects += left(case.member, case.why)
        else:
            effects.append(Say(f"{case.member} is to hold no shards for now: {case.why}"))
    returned = reach.sound()
    course.members.apart.difference_update(returned)
    return effects + [Say(f"{id} takes part again") for id in returned if id in course.members]


def disproved(server: str, said: Disproved, course: Course, left: Callable[[str, str], list[Effect]]) -> list[Effect]:
    """Give up a backup that does not hold what it has acknowledged, and let it hold nothing if it comes back.

    Believed only of the shard's primary, and of the pair that the view in force names.
    """
    view = course.view
    if view is None or course.phase is not Phase.RUNNING or view.primary.get(said.shard) != server:
        return []
    backup = view.beside(said.shard, said.paired)
    if backup not in course.members.servers:
        return []
    why = (
        f"it acknowledged version {said.version} of shard {said.shard}, and does not hold what {server} sent "
        "it: it is not what it says it is, its processor is of another kind and rounds otherwise (`rallypoint doctor` "
        "compares them), or one of the two machines computes wrong; test the memory of both"
    )
    course.members.apart.add(backup)
    return [Refuse(backup, f"given up: {why}"), *left(backup, why)]


def disagrees(worker: str, why: str, course: Course, left: Callable[[str, str], list[Effect]]) -> list[Effect]:
    """Refuse a worker that has proposed another record; `why` is a phrase. Before the job begins, end the job."""
    members = course.members
    host = members.workers[worker].host
    other = min(members.proposed, default="the job")
    sentence = f"{worker} on {host} brought {why} ({worker} is here, {other} is there)"
    if course.phase is Phase.GATHERING:
        return course.end(Aborted(sentence))
    said: list[Effect] = [Refuse(worker, sentence, final=True), Say(f"refused: {sentence}")]
    if worker in members.proposed:  # it takes part, and has proposed the job's record before
        return [*said, *left(worker, "it has proposed another job")]
    members.remove(worker)  # a worker that joins late must not end a job that runs without it
    return said


# Takes the members' beats: most of what a coordinator gets.


def take_beat(member: str, beat: Beat, course: Course, reach: Reach) -> list[Effect]:
    """Note what a member's beat says. Nothing is done about it before the next tick: it has no effects."""
    course.members.spoke(member, course.now)
    if member in course.members:
        reach.beat(member, beat)
        course.links.speeds.heard(member, beat.paced)
    if beat.evaluating:
        course.evaluating.add(member)
    else:
        course.evaluating.discard(member)
    return []
