"""The tree of errors. Each one is a sentence that says what happened, to whom, and what to do about it."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable
from importlib import metadata

NO_SNAPSHOT = (  # the coordinator says it, or a worker that is asked for first weights which it does not have any more
    "parameters were lost with their servers and there is no snapshot to go back to: set replication to 2, or "
    "snapshots to every so many seconds"
)


REFUSED = "the coordinator has refused this member, and the job goes on without it: "  # a reason follows


def how_it_ended(failure: str) -> str:
    """What a member that was started by hand says of the end of its part in a job that did not end well for it."""
    return failure if failure.startswith(REFUSED) else f"the job failed: {failure}"


def to_install(extra: str) -> str:
    """Return the command that installs what an extra of this package needs; no package index has rallypoint itself."""
    try:
        lines = metadata.requires("rallypoint") or []
    except metadata.PackageNotFoundError:  # its source was only put on the path
        lines = []
    parts = [line.partition(";") for line in lines]
    found = [what.strip() for what, _, when in parts if re.search(rf"""extra == ['"]{extra}['"]""", when)]
    return f"pip install {shlex.join(found or [f'.[{extra}]'])}"


def to_resume(run: object) -> str:
    """Return the command that goes on with the run in this folder."""
    return f"rallypoint resume {shlex.quote(str(run))}"


def meant(word: str, known: Iterable[str]) -> str:
    """Return ``: did you mean steps?`` for a misspelt word; "" if no known word is like it."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else ""


class RallypointError(Exception):
    """The root of every error that Rallypoint raises on purpose."""


class Explained:
    """In the body, an error becomes one of ours: ``what: No such file or directory``, and then `todo`. `of`: which."""

    def __init__(
        self, kind: type[RallypointError], what: str, todo: str = "", of: tuple[type[Exception], ...] = (OSError,)
    ) -> None:
        self._kind, self._what, self._todo, self._of = kind, what, todo, of

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, self._of):
            no_text = isinstance(error, UnicodeDecodeError)
            why = "it is not text" if no_text else getattr(error, "strerror", None) or error
            raise self._kind(f"{self._what}: {why}{self._todo}") from None


class UsageError(RallypointError):
    """The library was called in a way that cannot work."""


class StartAgain(SystemExit):
    """This process cannot go on: a process that takes its place can (`rp.wrap`). A launcher starts one.

    It ends the process with STATUS ("temporary failure" of sysexits.h). The sentence is printed before, and LINE, by
    which a launcher knows that the status is ours: a script may end with 75 for reasons of its own.
    """

    STATUS = 75
    LINE = "rallypoint: start another process in the place of this one"

    def __init__(self, sentence: str) -> None:
        super().__init__(self.STATUS)
        self.sentence = sentence


class ConfigError(RallypointError):
    """A setting is unknown, of the wrong type, or impossible together with another."""


class DataError(RallypointError):
    """There is no data, or not the data that was expected."""


class ModelError(RallypointError):
    """The model cannot be trained by Rallypoint as it is."""


class ProtocolError(RallypointError):
    """Bytes from the network are not a frame of ours, or not one that is allowed here."""


class AccessDenied(RallypointError):
    """The other side has not shown the job's token."""


class LinkError(RallypointError):
    """A connection could not be made, or has ended."""


class LinkClosed(LinkError):
    """The process at the other end has closed the connection, or has ended. A network that fails does not do that."""


class LinkReset(LinkError):
    """The other end's system has reset the connection, and had answered until then: its process has died."""


class AddressInUse(LinkError):
    """Another process listens on the address already."""


class UnprovenPeer(LinkError):
    """Who answered has not proved that it knows the job's token. It may be gone at the next attempt.

    Attributes:
        refuses: it says that it is whom the member means, and refuses it: perhaps the member's token is wrong.
    """

    def __init__(self, sentence: str, *, refuses: bool = False) -> None:
        super().__init__(sentence)
        self.refuses = refuses


class CorruptFrame(LinkError):
    """A frame was changed, repeated, left out or put in on its way. Only the connection ends: connect again."""


class SnapshotError(RallypointError):
    """There is no snapshot where one was expected, or it cannot be used."""


class DamagedSnapshot(SnapshotError):
    """A file of a snapshot is missing, cut short, or holds other bytes than those that were written."""


class SnapshotFailed(SnapshotError):
    """A snapshot, or an export of one, could not be written; what was committed before is untouched."""


class NonFiniteLoss(RallypointError):
    """A loss or a gradient is NaN or infinite and the job was told to stop on it."""


class RankLost(RallypointError):
    """Another rank of this worker has ended: its own error says why, or it was killed, and so is this one."""


class StoreRolledBack(RallypointError):
    """A store's servers lost values that no other had, and went back to a snapshot: ask `store.step`, go on there."""


class JobAborted(RallypointError):
    """The job ended before its last step; the message says who gave up and why."""


def sentence_of(error: BaseException) -> str:
    """What an error says, in one sentence."""
    if isinstance(error, RallypointError | OSError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return f"{type(error).__name__}: {error}"
