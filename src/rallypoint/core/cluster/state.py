"""The phases of a job, what the job waits for in each, and the state that the next coordinator needs."""

from __future__ import annotations

import enum

import msgspec

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.decisions import Decided, StopWhen
from rallypoint.core.job import JobRecord
from rallypoint.core.protocol import Aborted, Finished
from rallypoint.core.typed import HasSent
from rallypoint.core.view import EarlyEnd, View


class Phase(enum.Enum):
    """The phase of a job.

        GATHERING -> RUNNING -> OVER
                     RUNNING <-> RECOVERING
                     RUNNING -> FAILING -> OVER

    A job also goes back to GATHERING if a new generation has no server, or no worker for the first weights, and ends
    (OVER) from every phase when it fails.
    """

    GATHERING = "gathering"  # waiting for members and for the job's record
    RUNNING = "running"
    RECOVERING = "recovering"  # the model's state was lost: waiting for a snapshot, or for members to upload or take it
    FAILING = "failing"  # a member has failed: the last snapshot is being stored, then the job ends
    OVER = "over"


class Failing(msgspec.Struct, frozen=True):
    """The job ends because `member` has failed, for this `reason`, once the newest `version` is stored.

    `holds`: it is a server that has failed because of a step, and it can still store the version that it holds.
    `step`: the one at which it, a worker, has contributed to the shards that `sent` says; -1: there is none.
    """

    member: str
    reason: str
    version: int
    holds: bool = False
    step: int = -1
    sent: HasSent = "none"

    @property
    def word(self) -> Aborted:
        """What everybody is told at the end."""
        return Aborted(f"{self.member}: {self.reason}")


class Origin(msgspec.Struct, frozen=True):
    """The snapshot with which a job begins, of this `version`: ``NAME`` in the job's own store, or ``URL/NAME``.

    As an event it is the answer to `FindSnapshot`: the newest usable snapshot; "" if there is none.

    `stop`: the job's early end, if the script of the run before had said it before the snapshot was complete.
    `decided`: what was decided from evaluations of versions up to this one.
    """

    snapshot: str
    version: int = -1
    stop: EarlyEnd | None = None
    decided: Decided = Decided()

    @property
    def is_elsewhere(self) -> bool:
        """True if it is another job's, in another store: it is read there, and nothing is written there."""
        return "/" in self.snapshot


class Resumed(msgspec.Struct, frozen=True):
    """A job begins with a snapshot (see `Origin`), and with this `record`.

    `epoch`: no coordinator of a higher one has written into the job's store: no two snapshots get the same name.
    """

    record: JobRecord
    snapshot: str
    version: int
    stop: EarlyEnd | None = None
    decided: Decided = Decided()
    epoch: int = 0

    @property
    def origin(self) -> Origin:
        return Origin(self.snapshot, self.version, self.stop, self.decided)


class ClusterState(msgspec.Struct, frozen=True):
    """What the next coordinator needs; the journal stores it. The fields are those of `Course` and its parts.

    `begun_by`: see `Terms`. `copies`: see `Course`; 0: nobody has decided it yet.
    """

    record: JobRecord | None
    view: View | None
    caught_up: tuple[int, ...]
    incarnations: int
    epoch: int
    begun: bool
    furthest: int
    workers_max: int
    last_word: Finished | Aborted | None = None
    state_holders: dict[str, int] = {}
    failing: Failing | None = None
    results: dict[int, dict[str, float] | None] = {}
    decided: Decided = Decided()
    stored: tuple[int, ...] = ()
    periods: tuple[int, ...] = ()
    stops: tuple[StopWhen, ...] = ()
    goes_on: bool = False  # the operator lets the job go on, and the view does not say so yet
    origin: Origin | None = None
    begun_by: str = ""
    copies: int = 0


def begun_by(state: ClusterState | None, command: str) -> bool:
    """True if this `command`, which says --resume, has begun the job of a journal, and that job has not failed.

    A coordinator that the same command starts goes on with that job, and not from the snapshot. After a failure whoever
    gives the command again means the snapshot.
    """
    return state is not None and state.begun_by == command != "" and not isinstance(state.last_word, Aborted)


NO_SERVER = (
    "a server: none is left; start one (rallypoint server --coordinator HOST:PORT), unless something restarts it"
)


def awaited(phase: Phase, members: Membership, terms: Terms, *, workers: int, servers: int) -> str | None:
    """A phrase for what the whole job waits for (I8); None when it only waits for the step in progress.

    `workers` and `servers` are how many it takes to begin.
    """
    able, here = len(members.proposed.keys() - members.leaving), len(members.servers)
    match phase:
        case Phase.GATHERING:
            missing = [*_missing(servers - here, "server"), *_missing(workers - len(members.workers), "worker")]
            silent = sorted(members.workers.keys() - members.proposed.keys())
            return " and ".join(missing) if missing else f"the model of {', '.join(silent)}"
        case Phase.RECOVERING if terms.by_hand and not here:
            return NO_SERVER
        case Phase.RECOVERING:
            return " and ".join(_missing(1 - here, "server")) or "a snapshot to go back to"
        case Phase.RUNNING if able < terms.workers_min:
            missing = _missing(terms.workers_min - able, "worker")
            return f"{missing[0]} (at least {terms.workers_min} are wanted)"
        case Phase.RUNNING if members.all_done and members.given_up:
            return f"{', '.join(sorted(members.given_up))} to come back, given up just before the end"
        case _:
            return None


def _missing(count: int, noun: str) -> list[str]:
    return [f"{count} more {noun}{'s' if count > 1 else ''}"] if count > 0 else []
