"""Says what makes a run's bytes comparable with another's: the hash of its first weights, and its intra-op threads."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from rallypoint.core.job import JobRecord
from rallypoint.core.view import View
from rallypoint.net.messages import Propose

_NAMED = 3  # workers that a sentence names


@dataclass(slots=True)
class Comparable:
    """Keeps what workers propose until they are in a view, and says then, once of each, what is not as in the job."""

    _proposed: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # digest of the first weights, threads
    _compared: set[str] = field(default_factory=set)
    _first: bytes = b""  # the digest of version 0, once it was said

    def propose(self, worker: str, proposal: Propose) -> None:
        """A worker proposes the job's record."""
        self._proposed[worker] = (proposal.first, proposal.record.threads)

    def taken_over(self, view: View) -> None:
        """An earlier coordinator has compared the workers of its last view."""
        self._compared.update(member.id for member in view.workers)

    def said(self, record: JobRecord, view: View, connected: Container[str], *, first: bool) -> list[str]:
        """Return what is to be said when `view` is published. `first`: it begins with version 0."""
        sentences = []
        uploaded = self._proposed.get(view.uploader, (b"", 0))[0]
        if first and uploaded and uploaded != self._first:
            self._first = uploaded
            sentences.append(f"version 0, the first weights, has the hash {uploaded.hex()}")
        here = {member.id for member in view.workers}
        new = {worker: self._proposed[worker] for worker in sorted(here - self._compared) if worker in self._proposed}
        self._compared = self._compared & here | new.keys()
        others = [worker for worker, (digest, _) in new.items() if self._first and digest not in (b"", self._first)]
        if others:
            sentences.append(
                f"{_named(others)} made other first weights than the job begins with (those of the worker that uploads "
                "them count): the script does not seed them, so each run has others, and ends with other bytes. Call "
                "torch.manual_seed(0) before the model is made"
            )
        usual = (0, record.threads)
        apart = [worker for worker, (_, threads) in new.items() if record.threads and threads not in usual]
        if apart:
            sentences.append(
                f"{_named(apart)} computes with {new[apart[0]][1]} intra-op threads, the job with {record.threads}: "
                "its bytes depend on who computes what. Leave torch.set_num_threads out of the script; give --threads"
            )
        kept = (worker for worker in self._proposed if worker in connected or worker == view.uploader)
        self._proposed = {worker: self._proposed[worker] for worker in kept}
        return sentences


def of_threads(record: JobRecord) -> list[str]:
    """Return what is said of a job's intra-op threads when it begins: nothing of the usual one."""
    if record.threads < 2:
        return []
    return [
        f"{record.threads} intra-op threads: the bytes are those of other runs with so many, not of runs with 1 (the "
        "default of --threads)"
    ]


def _named(workers: Sequence[str]) -> str:
    more = len(workers) - _NAMED
    return f"{', '.join(workers[:_NAMED])}{f' and {more} more' if more > 0 else ''}"
