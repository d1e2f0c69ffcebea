"""How a stream ends its job: after `passes` over it or after `steps`, whichever comes first. Pure.

Everything that follows from the two is decided here. A replica says that its stream is over with the last step for
which it has a full batch. At the job's last step nobody looks any more, for that would read what no step uses.
"""

from __future__ import annotations


def looks_ahead(passes: int, step: int, steps: int) -> bool:
    """Return True if a replica has to know at `step` whether it has a batch for the next one. `passes` 0: no end."""
    return passes > 0 and step + 1 < steps


def reads(passes: int, steps: int, *, given: bool) -> str:
    """Return what is said as the job begins; "" if only its steps end it. `given`: the script says how many steps."""
    default = "" if given else " (steps= is not given)"
    return f"the stream is read passes={passes} times, for {steps} steps at most{default}" if passes else ""


def unread(passes: int, steps: int) -> str:
    """Return what is said when the steps have ended the job, and nobody has said that the stream is over."""
    if not passes:
        return ""
    return f"the job's {steps} steps are over, and its stream, with passes={passes}, may not be: give more to read all"
