"""What follows from audits (`audit=`): who computes a disputed contribution once more, who has lost, who is unlike.

A server tells of a dispute: two workers have sent different bytes for the same contribution. The next view names a
third worker (`orders.disputes`), which computes it too. The server then tells who agreed and who has lost. The step
waits all the while, and nothing that has lost is applied.

Each worker of a job with audits computes a small probe (`worker/kernels.py`) and proposes its digest with the
job's record. The coordinator puts it into the worker's `Member`, so every member sees it in the view, and
`core.audits.alike` says by it who can audit whom.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.audits import Audits, computing
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect, Refuse
from rallypoint.core.cluster.state import Phase
from rallypoint.core.cluster.succession import Succession
from rallypoint.core.protocol import Aborted, AuditFound, Say
from rallypoint.core.shard.audited import MOST
from rallypoint.core.typed import named
from rallypoint.core.view import Dispute, Member, View

_REMEMBERED = 1024  # verdicts that are said once
_NAMED = 4  # workers, in the sentence about one that is unlike them
_STEPS = 4  # of which there are disputes at a time: only one, if no server lies
Left = Callable[[str, str], list[Effect]]


@dataclass(slots=True)
class Auditing:
    """The coordinator's part of audits. `left(member, why)` is what happens when a member is gone."""

    course: Course
    succession: Succession
    _told: dict[tuple[object, ...], None] = field(default_factory=dict)
    _alone: str = ""  # the worker of which it was said that nobody can audit it

    def handle(self, server: str, said: AuditFound, left: Left) -> list[Effect]:
        """A server has found that a worker has computed other bytes than others."""
        view, audits = self.course.view, self._audits
        if view is None or audits is None or self.course.phase is not Phase.RUNNING:
            return []
        # It tells only the first shard of several, and that one may have moved since: believe whoever has any shards.
        known = server in view.primary.values() and self.course.is_current(said.generation)
        if not known or said.replica >= audits.replicas or not audits.audited(said.step):
            return []
        if said.agreed and (len({*said.agreed}) < 2 or not {*said.agreed}.isdisjoint(said.others)):
            return []  # no honest server says so
        return self._judged(said, view, left) if said.agreed else self._disputed(said, view)

    def advance(self) -> list[Effect]:
        """Name another third worker where the one that was named is gone; say when nobody can audit."""
        course, audits = self.course, self._audits
        if audits is None or course.view is None or course.phase is not Phase.RUNNING:
            return []
        return [*self._say_alone(course.view), *self._name_thirds(course.view, audits)]

    # ---- disputes ----

    def _disputed(self, found: AuditFound, view: View) -> list[Effect]:
        if not self.course.furthest <= found.step < self.course.last:
            return []  # it is over: somebody has computed a later step. Or the job has no such step
        name = f"step {found.step}, replica {found.replica} (shard {found.shard})"
        if len(found.others) > 2:
            return self.course.end(Aborted(
                f"audit: {_named(found.others, view)} have each computed something else for {name}, so nobody knows "
                "which is right: compare these machines with `rallypoint doctor`, and replay the step"
            ))  # fmt: skip
        disputes = {(d.step, d.replica): d for d in self.course.views.orders.disputes}
        known = disputes.get((found.step, found.replica))
        heard = tuple(sorted({*found.others, *(() if known is None else known.heard)}))
        if (known is not None and known.heard == heard) or len(heard) > MOST:
            return []
        third = known.third if known is not None and known.third not in heard else ""
        disputes[found.step, found.replica] = Dispute(found.step, found.replica, heard, third)
        # Workers send nothing to a step before the one before it is decided
        steps = sorted({step for step, _ in disputes})[:_STEPS]
        self.course.views.order(disputes=tuple(d for d in disputes.values() if d.step in steps))
        said: list[Effect] = [Say(f"audit: {_named(found.others, view)} have computed different bytes for {name}")]
        said = said if self._is_new("dispute", found.step, found.replica, heard) else []
        return [*said, *self.advance()]  # now: a view without a third worker would say that nobody can decide

    def _name_thirds(self, view: View, audits: Audits) -> list[Effect]:
        wanted: list[Dispute] = []
        said: list[Effect] = []
        for dispute in self.course.views.orders.disputes:
            if dispute.step < self.course.furthest:
                continue
            third = dispute.third
            if third in dispute.heard or third not in computing(view, dispute.step):
                third = audits.another(view, dispute.step, dispute.replica, dispute.heard)
                said += self._third(dispute, third, view)
            if self.course.phase is not Phase.RUNNING:
                return said
            wanted.append(msgspec.structs.replace(dispute, third=third))
        self.course.views.order(disputes=tuple(wanted))
        return [*said, *(self.succession.advance() if tuple(wanted) != view.orders.disputes else [])]

    def _third(self, dispute: Dispute, third: str, view: View) -> list[Effect]:
        name = f"step {dispute.step}, replica {dispute.replica}"
        if third:
            return [Say(f"audit: {_named([third], view)} computes {name} too, and decides")]
        if self._others_decide(dispute, view):
            return []
        nobody = f"audit: nobody but {_named(dispute.heard, view)} computes, so nobody can decide {name}"
        if self._action == "tell":
            new = self._is_new("nobody", dispute.step, dispute.replica)
            return [Say(f'{nobody}: its owner\'s contribution is used (audit_action="tell")')] if new else []
        return self.course.end(Aborted(
            f"{nobody}, and audit_action={self._action!r} applies nothing that is in doubt: use three workers or more, "
            "and compare these two with `rallypoint doctor`"
        ))  # fmt: skip

    def _others_decide(self, dispute: Dispute, view: View) -> bool:
        """True if those who were heard decide among themselves: of three workers, each of two servers has heard two,
        and will hear the third one too; or one server has, and the loser is gone."""
        heard, name = {*dispute.heard}, (view.generation, "lost", dispute.step, dispute.replica)
        lost = {worker for worker in heard if (*name, worker) in self._told}
        return len(heard) > 2 and heard - lost <= {*computing(view, dispute.step)}

    def _judged(self, found: AuditFound, view: View, left: Left) -> list[Effect]:
        said: list[Effect] = []
        for loser in found.others:
            if not self._is_new("lost", found.step, found.replica, loser):
                continue
            why = (
                f"audit: step {found.step}, replica {found.replica}, shard {found.shard}: {_named(found.agreed, view)} "
                f"agree, and {_named([loser], view)} has computed something else; it was not applied"
            )
            if self._action == "stop":
                return [*said, *self.course.end(Aborted(f'{why} (audit_action="stop")'))]
            said.append(Say(why))
            if self._action == "drain" and loser in self.course.members.workers:
                gone = "it has computed other bytes than two others: look at its machine before it takes part again"
                self.course.members.apart.add(loser)  # it stands by, if it comes back
                said += [Refuse(loser, f"given up: {why}"), *left(loser, gone)]
        return said

    # ---- the rest ----

    def _say_alone(self, view: View) -> list[Effect]:
        able = computing(view, self.course.furthest + 1)
        if len(able) != 1:
            self._alone = "" if able else self._alone
            return []
        if able[0] == self._alone:
            return []
        self._alone = able[0]
        return [Say(f"audit: only {_named(able, view)} computes, so nobody can audit it")]

    @property
    def _audits(self) -> Audits | None:
        if self.course.record is None or not (share := self.course.record.config.get("audit", {}).get("share")):
            return None
        return Audits(self.course.record.config.get("seed", 0), share, self.course.replicas)

    @property
    def _action(self) -> str:
        return "" if self.course.record is None else self.course.record.audit_action

    def _is_new(self, *name: object) -> bool:
        if self.course.view is None or (name := (self.course.view.generation, *name)) in self._told:
            return False
        self._told[name] = None
        if len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
        return True


def _named(workers: Collection[str], view: View) -> str:
    """``worker1 on hosta and worker2 on hostb``."""
    hosts = {member.id: member.host for member in view.workers}
    return " and ".join(f"{worker} on {hosts[worker]}" if worker in hosts else worker for worker in workers)


def probed(worker: str, kernels: bytes, course: Course) -> list[Effect]:
    """Note the digest of a worker's probe, and say it if its kernels are unlike those of all workers before it."""
    workers = course.members.workers
    workers[worker] = msgspec.structs.replace(workers[worker], kernels=kernels)
    if not kernels:
        return []  # a job without audits
    sentence = unlike(workers[worker], [workers[id] for id in course.members.proposed if id in workers])
    return [Say(sentence)] if sentence else []


def unlike(newcomer: Member, others: Iterable[Member]) -> str:
    """The sentence that says which of the `others` this worker cannot audit; "" if it can audit all of them.

    It is also "" if there is a worker like it among the others: that one's coming has said it.
    """
    probed = [worker for worker in others if worker.kernels and worker.id != newcomer.id]
    if not newcomer.kernels or any(worker.kernels == newcomer.kernels for worker in probed) or not probed:
        return ""
    names = named([f"{worker.id} on {worker.host}" for worker in probed], _NAMED)
    return (
        f"{newcomer.id} on {newcomer.host} computes other bytes than {names} for the same small probe (other "
        "processors, GPUs or versions of torch): they cannot audit each other, and the job's bytes depend on which of "
        "them computes a replica; `rallypoint doctor` compares the machines"
    )
