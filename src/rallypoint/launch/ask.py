"""Questions to a run that is under way, from another terminal."""

from __future__ import annotations

import queue
from pathlib import Path

import msgspec

from rallypoint.errors import DataError, JobAborted, LinkError, RallypointError
from rallypoint.launch.launcher import CLUSTER_FILE
from rallypoint.net.member import CoordinatorLink
from rallypoint.net.messages import Aborted, Finished, Message, Snapshotted, SnapshotWanted
from rallypoint.net.tcp import TcpTransport

_PATIENCE_S = 600.0


class _Where(msgspec.Struct):
    coordinator: str
    token: str


def take_snapshot(run: Path) -> str:
    """Ask the run in this folder for a snapshot; a sentence once it is durable. DataError when it does not run."""
    try:
        where = msgspec.json.decode((run / CLUSTER_FILE).read_bytes(), type=_Where)
    except (FileNotFoundError, msgspec.DecodeError):
        raise DataError(f"no run is under way in {run}") from None
    answers: queue.SimpleQueue[Message | RallypointError] = queue.SimpleQueue()
    link = CoordinatorLink(
        transport=TcpTransport(), address=where.coordinator, token=where.token, role="observer", id="snapshot",
        on_message=answers.put, on_lost=answers.put,
    )  # fmt: skip
    link.start()
    try:
        link.send(SnapshotWanted())
        return _wait(answers)
    finally:
        link.close()


def _wait(answers: queue.SimpleQueue[Message | RallypointError]) -> str:
    while True:
        try:
            answer = answers.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise LinkError(f"no snapshot within {_PATIENCE_S:.0f} s; the run's own console says why") from None
        match answer:
            case Snapshotted(snapshot=snapshot, version=version, nbytes=nbytes, seconds=seconds):
                return f"{snapshot}: version {version}, {nbytes / 1e6:.1f} MB in {seconds:.2f} s"
            case Finished() | Aborted():
                raise JobAborted("the job is over")
            case RallypointError():
                raise answer
            case _:
                pass
