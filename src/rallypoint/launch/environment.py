"""What a launcher tells its processes by environment variables: the job's address, their name, the token.

No settings.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rallypoint.errors import Explained, UsageError

COORDINATOR = "RALLYPOINT_COORDINATOR"
TOKEN = "RALLYPOINT_TOKEN"
TOKEN_FILE = "RALLYPOINT_TOKEN_FILE"
TLS = "RALLYPOINT_TLS"  # the folder of the certificates
ID = "RALLYPOINT_ID"
WORKERS = "RALLYPOINT_WORKERS"  # how many workers the launcher starts: for a script that has a fixed world
SUMS = "RALLYPOINT_SUMS"  # set by a script that has joined a job of sums, for its children: its process id
NEAR = "RALLYPOINT_NEAR"  # the place where a member is: a host or a rack, by any name (see `core.view.Member`)
RANKS = "RALLYPOINT_RANKS"  # the number of ranks of this worker; torch's RANK, WORLD_SIZE, MASTER_... say the rest
RANKS_STORE = "RALLYPOINT_RANKS_STORE"  # the descriptor of a file in memory, through which the ranks find each other
RANKS_BOARD = "RALLYPOINT_RANKS_BOARD"  # another one, in which each rank says what it does: see `parallel.board`
HEALTH = "RALLYPOINT_HEALTH"  # where a process answers health checks and tells its metrics: see `launch.observing`
METRICS_TOKEN = "RALLYPOINT_METRICS_TOKEN"  # what who asks for metrics has to show: see `launch.observing.metrics`
METRICS_TOKEN_FILE = "RALLYPOINT_METRICS_TOKEN_FILE"
LEFT_STATUS = "RALLYPOINT_LEFT_STATUS"  # the exit status of a member that was told to go while its job goes on; 0
LIVING = "RALLYPOINT_LIVING"  # of a coordinator that is started by hand: see `Terms.living`
SERVERS = "RALLYPOINT_SERVERS"  # under torchrun or mpirun: how many servers, or beside which ranks
OPTIONS = "RALLYPOINT_OPTIONS"  # there too: options of `rallypoint coordinator`
FOLDER = "RALLYPOINT_FOLDER"  # under mpirun: a folder that all machines see
LIFELINE = "RALLYPOINT_LIFELINE"
STACKS = "RALLYPOINT_STACKS"  # the folder for the stacks of a process: see `launch.observing.stacks`
REPLAY = "RALLYPOINT_REPLAY"  # the file with the task of a replay: see `launch.observing.replay`
IMPORT = "RALLYPOINT_IMPORT"  # the file with the task of an import: see `launch.commands.importing`
ANSWERS_AT = "health checks are answered at "  # the beginning of the line in which a process says where
JOB_FAILED = "the job failed: "  # the beginning of the line in which a coordinator says why, as JSON
_THREADS, _SPINS, _WAITING = "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"  # read by OpenMP
LISTENS_AT = "the coordinator listens at "  # the beginning of the line that a coordinator prints when it is ready


def own_name(role: str) -> str:
    """Return the name of a member that is given none: RALLYPOINT_ID, or its own, as ``worker-7-c0ffee12``. Two
    containers may have the same process id, and the same host name: the rest is random."""
    return os.environ.get(ID) or f"{role}-{os.getpid()}-{secrets.token_hex(4)}"


def with_threads(number: int) -> dict[str, str]:
    """Return what gives a process so many intra-op threads before it has joined a job, which says how many it has.

    Threads wait for each other by spinning, on cores that a server needs: less, unless the environment says how.
    """
    found = {_THREADS: str(number), "MKL_NUM_THREADS": str(number)}
    if number > 1 and os.environ.keys().isdisjoint((_SPINS, _WAITING)):
        found[_SPINS] = "1000"
    return found


def threads_of(env: Mapping[str, str]) -> int:
    """Return how many intra-op threads OMP_NUM_THREADS asks for; 0: it does not."""
    text = env.get(_THREADS, "").partition(",")[0].strip()
    return int(text) if text.isascii() and text.isdigit() else 0


def failure_line(why: str) -> str:
    """Return the line in which a coordinator tells its launcher why the job has failed."""
    return f"{JOB_FAILED}{json.dumps(why, ensure_ascii=False)}"


def left_status() -> int:
    """Return the exit status of a member that was told to go while its job goes on: RALLYPOINT_LEFT_STATUS, or 0.

    Kubernetes takes status 0 for work that is finished, and starts nobody in its place.
    """
    text = os.environ.get(LEFT_STATUS, "")
    return int(text) if text.isdigit() and int(text) < 256 else 0


def run_script(argv: Sequence[str], extra: Mapping[str, str], stdout: int | None = None) -> int:
    """Run a script with this environment, but for what a launcher tells its processes, and `extra`. Returns its status.

    UsageError if it cannot be started.
    """
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT_")}
    sys.stdout.flush()
    with Explained(UsageError, f"the script cannot be started: {argv[0]}"):
        return subprocess.call(argv, env={**ours, **extra}, stdin=subprocess.DEVNULL, stdout=stdout)
