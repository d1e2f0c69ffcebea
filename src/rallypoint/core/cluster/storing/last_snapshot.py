"""A job that fails ends with a snapshot of the last version that its servers hold, if there is one to take."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from rallypoint.core.cluster import events
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect
from rallypoint.core.cluster.state import Failing, Phase
from rallypoint.core.cluster.storing.snapshot_duty import SNAPSHOT_PATIENCE
from rallypoint.core.cluster.storing.snapshots import Snapshots
from rallypoint.core.cluster.succession import Succession
from rallypoint.core.modes import Feature
from rallypoint.core.protocol import GiveUp, Held, NotStored, Release, Say, Snapshotted

# So many seconds, and at least the patience of every other snapshot, it is waited for one more file. In the first of
# them the last contributions have to be applied too.
PATIENCE_S = 10.0


@dataclass(slots=True)
class LastSnapshot:
    """The end of a job that cannot go on.

        begin -> phase FAILING, Capture -> all parts stored, Commit -> committed -> Aborted
              \\-> Aborted, if there is nothing to store    \\-> a writer is lost, no file comes, Release -> Aborted

    The last version is the one of the step at which a worker has failed, or the next one if it has sent every shard all
    that it owes at that step. Servers' reports may be on their way, so a shard that is past the version asked for names
    its own, and that one is asked for. The other shards come there too: a worker that fails stays until what it has
    sent is applied. If it has sent only some shards theirs (it failed in the middle of a backward pass), or is gone too
    early, other workers compute its replicas of that step, and no later one. If they cannot, and no shard is known to
    have the update, the version before it is stored. The store may be slow: as long as files come, the end waits.
    """

    course: Course
    snapshots: Snapshots
    succession: Succession
    _writers: frozenset[str] = frozenset()
    _lost: set[str] = field(default_factory=set)  # the workers that may not have contributed all that they owe
    _whole: set[str] = field(default_factory=set)  # the failed workers that have contributed all
    _differ: bool = False  # some shards were further than others, or the version that is stored has to be made yet
    _before: bool = False  # the version before the one that a worker has sent all for is stored: that one does not come
    _until: float = 0.0  # the time (s) up to which a new coordinator waits for the members of a failing job
    _news: float = 0.0  # the time (s) of the last file, or of the failure

    def begin(self, member: str, failed: GiveUp) -> list[Effect]:
        """A member has failed: take the last snapshot, or end the job at once if there is none to take."""
        course = self.course
        if course.failing is not None:
            return self.again()  # the job fails already: an earlier coordinator said so
        holds = failed.version > 0 and member in course.members.servers
        step = -1 if failed.sent == "none" else failed.version
        course.failing = Failing(member, failed.reason, self._newest(failed), holds, step, failed.sent)
        course.changed()
        return self.again()  # a server whose connection broke just now may be back, or its backup takes its place

    def _begin(self, failing: Failing) -> list[Effect]:
        course, member, version = self.course, failing.member, max(self.course.known, failing.version)
        if not self._has_news(failing):
            return self.end()
        if not (writers := self._who_stores(failing)):
            return self._without("a member that holds some of it is not here")
        self._writers, course.phase = frozenset(writers), Phase.FAILING
        away = member not in course.members or member in course.members.awaited
        self._lost |= {member} if failing.sent == "some" or away else set()
        self._whole |= {member} if failing.sent == "all" else set()
        self._differ = 0 <= failing.step < version
        course.changed()
        self._news = course.now
        said = Held(f"{member} has failed; storing the newest version before the job ends (Ctrl-C ends it now)")
        asked = self.snapshots.capture(version, writers)
        return [said, *asked, *(self._without_lost() if self._differ else [])]

    def again(self) -> list[Effect]:
        """Go on with an end that has begun, here or at an earlier coordinator, once those who store are back (at most
        10 s)."""
        failing, course = self.course.failing, self.course
        if failing is None:
            return []
        self._until = self._until or course.now + PATIENCE_S
        away = not course.members.awaited.isdisjoint(self._able(failing))
        if self._has_news(failing) and away and course.now <= self._until:
            return []
        return self._begin(failing)

    def handle(self, event: events.Event) -> list[Effect]:
        """Take one event of the phase FAILING; return the effects."""
        course, duty = self.course, self.snapshots.duty
        match event:
            case events.Tick(now=now):
                course.now = now
                patience = max(PATIENCE_S, SNAPSHOT_PATIENCE * course.terms.heartbeat)
                if now <= self._news + patience:
                    return []
                silent = course.members.awaited & course.members.workers.keys() - self._lost
                if silent and (effects := self._are_lost(silent)):
                    self._news = now
                    return effects
                return self._stuck(f"no file came for {patience:.0f} s")
            case events.Captured(server=server, snapshot=snapshot, shards=shards):
                if self.snapshots.shards_to_store(server, snapshot).intersection(shards):
                    self._news = course.now
                return self.snapshots.stored(event)
            case NotStored(snapshot=snapshot, passed=passed) if taking := duty.under_way(snapshot):
                if passed > taking.version:
                    return self._further(passed)
                return [Say(f"snapshot {snapshot} could not be taken: {event.reason}"), *self.end()]
            case Snapshotted(snapshot=snapshot) if duty.under_way(snapshot):
                duty.complete(course.now)
                return self.end()
            case Release():
                return self.end()
            case events.Unlinked(member=member, reset=reset) if member in course.members:
                course.members.unlinked(member)  # it may come back, and is told of the end then
                if member in self._writers:
                    return self._without(f"{member}, which held it, has ended too")
                return self._are_lost({member}) if reset else []
            case events.Joined(member=member, role=role, process=process):
                if course.members.same(member.id, role, member.incarnation, process) is not None:
                    course.members.returned(member.id)
                return []
            case events.Left(member=member) if member in self._writers:
                return self._without(f"{member}, which held it, has ended too")
            case events.From(member=member, message=GiveUp(sent="all")):
                self._whole.add(member)
                return []
            case events.From(member=member, message=GiveUp()) | events.Left(member=member):
                return self._are_lost({member})
            case _:
                return []

    def _are_lost(self, members: Set[str]) -> list[Effect]:
        """These do no more: if workers, others compute what they have not contributed, if that is needed."""
        self._lost |= members & self.course.members.workers.keys()
        return self._without_lost() if self._differ else []

    def _further(self, version: int) -> list[Effect]:
        """A shard is at `version` already: store that one, to which the other shards come too."""
        if self._before:
            return self._without("others cannot compute what is missing of it")
        self._differ = True
        return [*self.snapshots.capture(version, sorted(self._writers)), *self._without_lost()]

    def _without_lost(self) -> list[Effect]:
        """Let others compute what lost workers have not contributed to the version that is stored."""
        course, taking = self.course, self.snapshots.duty.taking
        if course.failing is None or taking is None or not taking.missing or not self._lost:
            return []
        ended = self._lost | self._whole | {course.failing.member}
        course.members.leaving |= ended & course.members.workers.keys()
        if published := self.succession.ends_before(taking.version):
            return published
        if course.failing.sent == "none" or self._lost <= self._whole:
            return []  # who has sent all leaves when that is applied
        return self._stuck(
            f"{course.failing.member} has failed in the middle of a backward pass, so some shards have that step's "
            "update and others not, and no other worker is here that could compute it"
        )

    def _stuck(self, why: str) -> list[Effect]:
        """The version that is asked for does not come: store the one before, if the failed worker spoke of that one."""
        course, taking = self.course, self.snapshots.duty.taking
        assert course.failing is not None
        if course.failing.sent != "all" or taking is None or self._before or course.failing.step != taking.version - 1:
            return self._without(why)
        self._before, self._differ, self._news = True, False, course.now
        return self.snapshots.capture(course.failing.step, sorted(self._writers))

    def end(self) -> list[Effect]:
        """End the job with the failure that it has."""
        assert self.course.failing is not None
        return self.course.end(self.course.failing.word)

    def _without(self, why: str) -> list[Effect]:
        """The newest version is lost: what was said of it does not come true."""
        return [Say(f"the newest version is not stored: {why}"), *self.end()]

    @property
    def awaited(self) -> str:
        """A phrase for what the end waits for."""
        return f"the newest version to be stored before the job ends: {self.snapshots.not_stored} not stored yet"

    def _newest(self, failed: GiveUp) -> int:
        """The newest version that is known to exist.

        The failed member may have got one whose servers' word of it is still on its way, over another connection. As a
        report, its own word proves at most one step after what is known. If it has sent all that it owes at that step,
        one more can be made.
        """
        course = self.course
        if not course.is_current(failed.generation):
            return course.known
        has = max(course.known, min(failed.version, course.known + 1))
        newest = has + 1 if failed.sent == "all" and failed.version == has else has
        return newest if course.record is None else min(newest, course.record.rounds)

    def _has_news(self, failing: Failing) -> bool:
        """True if there is a version that is not stored yet, and may be."""
        newest = max(self.course.known, failing.version)
        return self._may_store(failing.member) and newest > self.snapshots.duty.last[0]

    def _may_store(self, member: str) -> bool:
        """True if all shards come to rest at one version, and the servers alone can store it."""
        course = self.course
        if course.phase is not Phase.RUNNING or not course.terms.snapshots or not course.begun:
            return False
        if course.record is None or course.view is None or Feature.CODEC_STATE in course.record.features:
            return False  # codec states before a version are gone once a worker computes from it
        # A server fails a step when the others may have applied it, unless they decide together
        return member in course.members.workers or Feature.CLIP in course.record.features

    def _who_stores(self, failing: Failing) -> list[str]:
        """The members that store the snapshot; none if nobody can store one of the shards."""
        course, able = self.course, self._able(failing)
        assert course.view is not None
        if not able or not course.members.awaited.isdisjoint(able):
            return []
        writer_of, shards = course.recovery.writer_of, course.job.layout.shards
        return able if {writer_of(shard.index, able, course.view) for shard in shards} <= set(able) else []

    def _able(self, failing: Failing) -> list[str]:
        """The members that could store shards, if they are here."""
        course = self.course
        servers = [] if course.view is None else [server.id for server in course.view.servers]
        writers = course.recovery.writers(servers, course.computing())
        return [writer for writer in writers if failing.holds or writer != failing.member]
