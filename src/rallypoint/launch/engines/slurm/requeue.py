"""Asks Slurm to run this job again."""

from __future__ import annotations

import os
import signal
import subprocess

AGAIN = (signal.SIGUSR1, signal.SIGUSR2)  # what asks a job to end and to be run again
_SCONTROL_S = 60.0


def requeue() -> str:
    """Ask Slurm to run this job again, and return "". Slurm ends this process then. Else, return why it does not."""
    job = os.environ.get("SLURM_JOB_ID", "")
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_SCONTROL_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())
