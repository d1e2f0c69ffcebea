"""``python -m rallypoint.launch.engines.slurm.step``: the far end on a node of a Slurm job.

SIGUSR1 and SIGUSR2 are for the launcher, which stores the last version and lets the job run again. ``scancel`` without
``--batch`` sends them to the processes of every step instead: those ignore them, as does all that they start.
"""

from __future__ import annotations

import signal

from rallypoint.launch.engines.remote import far_end
from rallypoint.launch.engines.slurm.allocation import AGAIN

if __name__ == "__main__":
    for number in AGAIN:
        signal.signal(number, signal.SIG_IGN)
    far_end.main()
