"""Which silent members to give up. Silence is not death: who hears nearly nobody presumes itself cut off (I12).

Example, with a heartbeat of 3 s: 1 of 4 members is silent for 3 s: it is given up. 3 or 4 of 4 are silent: nobody is,
because it is far more likely that the coordinator's own network is down. Members go on without a coordinator, connect
again when they can reach it, and keep their incarnation and with it all that they hold.

    hears enough -> cut off     all but a few members are silent, and one of them for longer than the heartbeat
    cut off -> hears enough     more than a few are heard: for a while nobody is given up, so that the others can return

A member under whose name another process has come counts as heard here: the network is well, and the member is dead.
Containers that a machine starts again in place come like that, all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.terms import LIVING_S

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
