"""Questions and commands to a running job, from another terminal."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rallypoint.errors import ConfigError, JobAborted, LinkError, RallypointError, UsageError
from rallypoint.launch.access import transport_of
from rallypoint.launch.folder import read_where
from rallypoint.launch.plan import read_plan
from rallypoint.net.handshake import Identity
from rallypoint.net.keys import role_token
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.messages import Aborted, Finished, Members, Message, Resize, Snapshotted, SnapshotWanted
from rallypoint.net.ordering.messages import AnyOrder, LearningRate, Ordered, RateScaled

_PATIENCE_S, _ORDER_S = 600.0, 30.0
_LEAST, _MOST = 1e-9, 1e9  # factors

Answers = queue.SimpleQueue[Message | RallypointError]


def take_snapshot(run: Path) -> str:
    """Ask the run in this folder for a snapshot.

    Returns a sentence when it is durable. Raises DataError when nothing runs there, LinkError after 10 minutes.
    """
    with _asking(run, "snapshot") as (link, answers):
        link.send(SnapshotWanted())
        for answer in _within(answers, _PATIENCE_S, "no snapshot"):
            match answer:
                case Snapshotted(snapshot=snapshot, version=version, nbytes=nbytes, seconds=seconds):
                    return f"{snapshot}: version {version}, {nbytes / 1e6:.1f} MB in {seconds:.2f} s"
                case _:
                    pass
    raise AssertionError("_within ends with an error")


def resize(run: Path, workers: int, servers: int, say: Callable[[str], None]) -> str:
    """Let the run in this folder continue with so many workers and servers (0: as many as now).

    Waits until that is done, and returns a sentence. Meanwhile `say` gets what is still missing. Raises DataError when
    no job runs there, ConfigError for an impossible number, LinkError after 10 minutes: the request stands.
    """
    plan = read_plan(run)
    if 0 < workers < plan.workers[0]:
        raise ConfigError(
            f"{run} was started with --workers {plan.workers[0]}:{plan.workers[1]}: with {workers} it would wait"
        )
    if 0 < servers < plan.replication:
        raise ConfigError(f"{run} keeps every shard on {plan.replication} servers: it needs at least so many")
    began, said = time.monotonic(), ""
    with _asking(run, "resize") as (link, answers):
        link.send(Resize(workers, servers))
        for answer in _within(answers, _PATIENCE_S, "not resized"):
            if not isinstance(answer, Members):
                continue
            missing = _missing(answer, workers, servers)
            if not missing:
                here = _counted(len(answer.workers), len(answer.servers))
                idle = "; the others stand by for now" if len(answer.workers) < workers else ""
                return f"done in {time.monotonic() - began:.1f} s: {here}{idle}"
            if missing != said:
                say(f"waiting for {missing}")
                said = missing
    raise AssertionError("_within ends with an error")


def order(run: Path, wanted: AnyOrder) -> str:
    """Give the run in this folder an order. Returns what has come of it, as a sentence.

    Raises DataError when nothing runs there, UsageError when the coordinator refuses.
    """
    with _asking(run, "order") as (link, answers):
        return _ordered(link, answers, wanted)


def change_rate(run: Path, factor: float) -> str:
    """Let the run in this folder multiply its learning rate. Returns a sentence that says from which step on.

    Raises DataError when nothing runs there, UsageError for a factor that cannot be and when the coordinator refuses.
    """
    if not _LEAST <= factor <= _MOST:
        raise UsageError(f"by what? give a factor from {_LEAST:g} to {_MOST:g}, such as 0.5")
    with _asking(run, "order") as (link, answers):
        said = _ordered(link, answers, LearningRate(factor))
        try:
            return next(one.text for one in _within(answers, _ORDER_S) if isinstance(one, RateScaled))
        except LinkError:  # a server is silent, or the coordinator was killed: the order stands
            return f"{said}, from the step on that the run will say"


def _ordered(link: CoordinatorLink, answers: Answers, wanted: AnyOrder) -> str:
    link.send(wanted)
    for answer in _within(answers, _ORDER_S):
        if isinstance(answer, Ordered) and answer.kind == type(wanted).__name__:
            if answer.refused:
                raise UsageError(answer.text)
            return answer.text
    raise AssertionError("_within ends with an error")


def _within(answers: Answers, seconds: float, otherwise: str = "no answer") -> Iterator[Message]:
    """Yield the coordinator's messages of so many seconds, then raise LinkError. The job's own messages keep coming
    though the answer does not, when the coordinator was killed before it could send it."""
    deadline = time.monotonic() + seconds
    while True:
        yield _next(answers, otherwise, seconds, max(0.0, deadline - time.monotonic()))


def _missing(now: Members, workers: int, servers: int) -> str:
    """Return what does not match the request yet, as a phrase; "" when everything does."""
    able, computing, here = len(now.workers) + len(now.standby), len(now.workers), len(now.servers)
    missing = []
    if workers and able < workers:
        missing.append(f"{_count(workers - able, 'worker')} to join")
    if workers and computing > workers:
        missing.append(f"{_count(computing - workers, 'worker')} to leave")
    if servers and here < servers:
        missing.append(f"{_count(servers - here, 'server')} to join")
    if servers and here > servers:
        missing.append(f"{_count(here - servers, 'server')} to hand over")
    return " and ".join(missing)


def _counted(workers: int, servers: int) -> str:
    return f"{_count(workers, 'worker')} and {_count(servers, 'server')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


@contextlib.contextmanager
def _asking(run: Path, id: str) -> Iterator[tuple[CoordinatorLink, Answers]]:
    where = read_where(run)
    answers: Answers = queue.SimpleQueue()
    me = Identity("observer", id, role_token(where.token, "observer"))
    link = CoordinatorLink(
        transport=transport_of(where.tls, "observer"), address=where.coordinator, me=me,
        handlers=Handlers(answers.put, answers.put),
    )  # fmt: skip
    link.start()
    try:
        yield link, answers
    finally:
        link.close()


def _next(answers: Answers, otherwise: str, patience: float, left: float) -> Message:
    """Return the coordinator's next message. Raises JobAborted when the job is over, LinkError when nothing comes.

    It waits for what is `left` of `patience` seconds.
    """
    try:
        if left == 0.0:
            raise queue.Empty
        answer = answers.get(timeout=left)
    except queue.Empty:
        raise LinkError(f"{otherwise} within {patience:.0f} s; the run's own console says why") from None
    if isinstance(answer, RallypointError):
        raise answer
    if isinstance(answer, Finished | Aborted):
        raise JobAborted("the job is over")
    return answer
