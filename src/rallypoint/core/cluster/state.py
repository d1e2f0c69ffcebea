"""Where a job is, what it waits for there, and what of it the next coordinator has to know."""

from __future__ import annotations

import enum

import msgspec

from rallypoint.core.cluster.effects import Abort, Finish
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.view import View


class Phase(enum.Enum):
    """Where the job is."""

    GATHERING = "gathering"  # waiting for members and for the job's record
    RUNNING = "running"
    RECOVERING = "recovering"  # the state was lost: looking for a snapshot, or for servers to take it
    OVER = "over"


class ClusterState(msgspec.Struct, frozen=True):
    """What the next coordinator has to know."""

    record: JobRecord | None
    view: View | None
    caught_up: tuple[int, ...]
    incarnations: int
    epoch: int
    begun: bool
    furthest: int
    workers_max: int
    last_word: Finish | Abort | None = None
    state_holders: dict[str, int] = {}


def awaited(phase: Phase, members: Membership, terms: Terms, workers_to_begin: int) -> str | None:
    """What the job waits for as a whole, as a phrase (I8); None when it is a step."""
    workers, servers = len(members.proposed.keys() - members.leaving), len(members.servers)
    match phase:
        case Phase.GATHERING:
            missing = [
                *_missing(terms.servers - servers, "server"),
                *_missing(workers_to_begin - len(members.workers), "worker"),
            ]
            silent = sorted(members.workers.keys() - members.proposed.keys())
            return " and ".join(missing) if missing else f"the model of {', '.join(silent)}"
        case Phase.RECOVERING:
            return " and ".join(_missing(1 - servers, "server")) or "a snapshot to go back to"
        case Phase.RUNNING if workers < terms.workers_min:
            missing = _missing(terms.workers_min - workers, "worker")
            return f"{missing[0]} (at least {terms.workers_min} are wanted)"
        case Phase.RUNNING if members.all_done and members.given_up:
            return f"{', '.join(sorted(members.given_up))} to come back, given up just before the end"
        case _:
            return None


def _missing(count: int, noun: str) -> list[str]:
    return [f"{count} more {noun}{'s' if count > 1 else ''}"] if count > 0 else []
