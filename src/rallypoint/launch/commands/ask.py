"""Questions and commands to a running job, from another terminal."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rallypoint.core import protocol
from rallypoint.core.typed import counted
from rallypoint.errors import ConfigError, DataError, JobAborted, LinkError, RallypointError, UsageError, to_resume
from rallypoint.launch.access import transport_of
from rallypoint.launch.folder import read_where
from rallypoint.launch.plan import read_plan
from rallypoint.net.handshake import Identity, role_token
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.own_files import was_left

_PATIENCE_S, _ORDER_S = 600.0, 30.0
_AWAY = "the coordinator is gone before it has answered; waiting for the next one"
_AGAIN = "the coordinator is back, and was asked again"


# True: the link to the coordinator is whole again, maybe with another one, which knows nothing of the question; False:
# it is broken
Answers = queue.SimpleQueue[protocol.Message | RallypointError | bool]
Say = Callable[[str], None]


def take_snapshot(run: Path, say: Say) -> str:
    """Ask the run in this folder for a snapshot.

    Returns a sentence when it is durable. `say` gets what has happened meanwhile: a coordinator that comes in the place
    of a dead one is asked again. Raises DataError when nothing runs there, LinkError after 10 minutes, and when there
    is no coordinator for a minute.
    """

    def taken(answer: protocol.Message) -> str:
        if not isinstance(answer, protocol.Snapshotted):
            return ""
        stored = f"version {answer.version}, {answer.nbytes / 1e6:.1f} MB in {answer.seconds:.2f} s"
        return f"{answer.snapshot}: {stored}"

    return _answered(run, protocol.SnapshotWanted(), _PATIENCE_S, "no snapshot", say, taken)


def resize(run: Path, workers: int, servers: int, say: Say) -> str:
    """Let the run in this folder continue with so many workers and servers (0: as many as now).

    Waits until that is done, and returns a sentence. Meanwhile `say` gets what is still missing. A worker that fetches
    the parameters counts as one that computes; more workers than replicas need not compute. Raises DataError when no
    job runs there, ConfigError for an impossible number, LinkError after 10 minutes: the request stands.
    """
    read_where(run)  # who runs it by hand hears that first: such a run has no plan
    plan = read_plan(run)
    if 0 < workers < plan.workers[0]:
        raise ConfigError(
            f"{run} was started with --workers {plan.workers[0]}:{plan.workers[1]}: with {workers} it would wait"
        )
    if 0 < servers < plan.replication:
        raise ConfigError(f"{run} keeps every shard on {plan.replication} servers: it needs at least so many")
    began, said, replicas = time.monotonic(), "", workers

    def done(answer: protocol.Message) -> str:
        nonlocal said, replicas
        if isinstance(answer, protocol.Planned):
            replicas = answer.replicas
        if not isinstance(answer, protocol.Members):
            return ""
        if missing := _missing(answer, workers, servers, replicas):
            if missing != said:
                say(f"waiting for {missing}")
            said = missing
            return ""
        take_part = min(len(answer.workers) + len(answer.warming), replicas)
        here = f"{counted(take_part, 'worker')} and {counted(len(answer.servers), 'server')}"
        idle = f"; the others stand by: the job has {counted(replicas, 'replica')}" if take_part < workers else ""
        return f"done in {time.monotonic() - began:.1f} s: {here}{idle}"

    return _answered(run, protocol.Resize(workers, servers), _PATIENCE_S, "not resized", say, done)


def order(run: Path, wanted: protocol.AnyOrder, say: Say) -> str:
    """Give the run in this folder an order. Returns what has come of it, as a sentence; `say` as in `take_snapshot`.

    Raises DataError when nothing runs there, UsageError when the coordinator refuses.
    """

    def followed(answer: protocol.Message) -> str:
        if not isinstance(answer, protocol.Ordered) or answer.kind != type(wanted).__name__:
            return ""
        if answer.refused:
            raise UsageError(answer.text)
        return answer.text

    return _answered(run, wanted, _ORDER_S, "no answer", say, followed)


def _answered(
    run: Path, wanted: protocol.Message, seconds: float, otherwise: str, say: Say,
    told: Callable[[protocol.Message], str],
) -> str:  # fmt: skip
    """Ask, and return the first text of `told`, which gets each of the coordinator's messages; LinkError after so many
    seconds. The job's own messages keep coming though the answer does not, when the coordinator was killed before it
    could send it: the next one is asked again."""
    deadline, said = time.monotonic() + seconds, False
    with _asking(run, type(wanted).__name__) as (link, answers), contextlib.suppress(queue.Empty):
        link.send(wanted)
        while (left := deadline - time.monotonic()) > 0.0:
            answer = answers.get(timeout=left)
            if isinstance(answer, RallypointError):
                raise answer
            if isinstance(answer, protocol.Finished | protocol.Aborted):
                raise JobAborted("the job is over")
            if not isinstance(answer, bool):
                if text := told(answer):
                    return text
            elif answer:
                link.send(wanted)
                say(_AGAIN)
                said = False
            elif not said:
                say(_AWAY)
                said = True
    raise LinkError(f"{otherwise} within {seconds:.0f} s; the run's own console says why")


def _missing(now: protocol.Members, workers: int, servers: int, replicas: int) -> str:
    """Return what does not match the request yet, as a phrase; "" when everything does."""
    able, computing, here = len(now.workers) + len(now.standby), len(now.workers), len(now.servers)
    idle = min(workers, replicas) - computing - len(now.warming)
    missing = []
    if workers and able < workers:
        missing.append(f"{counted(workers - able, 'worker')} to join")
    elif workers and idle > 0:
        missing.append(f"{counted(idle, 'worker')} to compute")
    if workers and computing > workers:
        missing.append(f"{counted(computing - workers, 'worker')} to leave")
    if servers and here < servers:
        missing.append(f"{counted(servers - here, 'server')} to join")
    if servers and here > servers:
        missing.append(f"{counted(here - servers, 'server')} to hand over")
    return " and ".join(missing)


@contextlib.contextmanager
def _asking(run: Path, id: str) -> Iterator[tuple[CoordinatorLink, Answers]]:
    where = read_where(run)
    if was_left(run):
        raise DataError(f"nothing of the run in {run} runs any more: `{to_resume(run)}`")
    answers: Answers = queue.SimpleQueue()
    me = Identity("observer", id, role_token(where.token, "observer"))
    link = CoordinatorLink(
        transport=transport_of(where.tls, "observer"), address=where.coordinator, me=me,
        handlers=Handlers(answers.put, answers.put, on_link=answers.put),
    )  # fmt: skip
    link.start()
    try:
        yield link, answers
    finally:
        link.close()
