"""What is said of a worker whose machine gives other bytes than the others' for the same computation.

Each worker of a job with audits computes a small probe (`worker/kernels.py`) and proposes its digest with the
job's record. The coordinator puts it into the worker's `Member`, so every member sees it in the view, and
`choice.alike` says by it who can audit whom.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.core.view import Member


def unlike(newcomer: Member, others: Iterable[Member]) -> str:
    """The sentence that says which of the `others` this worker cannot audit; "" if it can audit all of them.

    It is also "" if there is a worker like it among the others: that one's coming has said it.
    """
    probed = [worker for worker in others if worker.kernels and worker.id != newcomer.id]
    if not newcomer.kernels or any(worker.kernels == newcomer.kernels for worker in probed) or not probed:
        return ""
    names = ", ".join(f"{worker.id} on {worker.host}" for worker in probed[:_NAMED])
    more = f" and {len(probed) - _NAMED} more" if len(probed) > _NAMED else ""
    return (
        f"{newcomer.id} on {newcomer.host} computes other bytes than {names}{more} for the same small probe (other "
        "processors, GPUs or versions of torch): they cannot audit each other, and the job's bytes depend on which of "
        "them computes a replica; `rallypoint doctor` compares the machines"
    )


_NAMED = 4
