"""The process of a worker that is a group: it starts one process for each rank, and ends all when one of them dies.

A group is one failure domain. When a rank dies, the others may wait for it in a collective for ever; they are killed at
once, and this process ends as that rank did, so that whoever started the worker starts another one. When a rank ends
with an error of its own, the leader has a few seconds to tell the coordinator of its own.

``python -m rallypoint.launch.engines.ranks 4 python train.py``: four processes, which find torch's own variables (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) in their environment. `rallypoint.join` uses a file in place of
MASTER_PORT: torch's store there listens on all of the machine's addresses, for everybody.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from rallypoint.launch import environment
from rallypoint.launch.engines.cluster import GROUP, VISIBLE, GpuShare, devices_of
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.observe.lenient import say

_LOOPBACK = "lo"  # Gloo would listen where the host's name leads; the ranks of one worker are on one machine
_OWN_WORDS_S = 5.0  # seconds in which the leader may say why, after another rank has ended with an error


class Ranks:
    """The processes of the ranks of one worker; the first leads."""

    def __init__(self, count: int, argv: Sequence[str], gpus: str | None = None) -> None:
        """Start `argv` so many times. `gpus` are those that all of them see; None: as this process."""
        self._keep, give = os.pipe()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        store, board = os.memfd_create("ranks"), os.memfd_create("board")  # in memory: they go with the processes
        self._lifeline, self._processes = give, []
        for rank in range(count):
            env = {
                **os.environ, environment.RANKS: str(count), "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), environment.LIFELINE: str(self._keep),
                environment.RANKS_STORE: str(store), environment.RANKS_BOARD: str(board),
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK),
                **({} if gpus is None else {VISIBLE: gpus}),
            }  # fmt: skip
            self._processes.append(subprocess.Popen(argv, env=env, pass_fds=(self._keep, store, board)))
        os.close(store)
        os.close(board)
        self._told = False

    def leave(self) -> None:
        """Tell the leader to leave the job. It tells the others."""
        self._told = True
        self._processes[0].send_signal(signal.SIGTERM)

    def run(self) -> int:
        """Wait for all ranks. Returns the status that this process is to end with; negative: by that signal."""
        try:
            self._wait_for_all()
        except KeyboardInterrupt:
            self._wait_interrupted()
        return self._end()

    def _wait_for_all(self) -> None:
        """Wait until all have ended, or the others are to be killed."""
        deadline = None
        while running := [one for one in self._processes if one.poll() is None]:
            ended = [one.returncode for one in self._processes if one.returncode]
            if any(code < 0 for code in ended) or self._processes[0].returncode:
                break
            if ended and deadline is None:
                deadline = time.monotonic() + _OWN_WORDS_S
            if deadline is not None and time.monotonic() > deadline:
                break
            self._wait(running, None if deadline is None else deadline - time.monotonic())

    def _wait_interrupted(self) -> None:
        """Ctrl-C reaches the ranks too: let them end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        deadline = time.monotonic() + _OWN_WORDS_S
        while (running := [one for one in self._processes if one.poll() is None]) and time.monotonic() < deadline:
            self._wait(running, deadline - time.monotonic())

    def _wait(self, running: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> None:
        handles = [os.pidfd_open(one.pid) for one in running]
        try:
            wait(handles, timeout if timeout is None else max(0.0, timeout))
        finally:
            for handle in handles:
                os.close(handle)

    def _end(self) -> int:
        codes = [one.returncode for one in self._processes if one.poll() is not None]
        for one in self._processes:
            if one.poll() is None:
                one.kill()
                one.wait()
        died = [code for code in codes if code < 0]
        errors = [code for code in (self._processes[0].returncode, *codes) if code > 0]
        return (died or errors or [0])[0]


def grouped(argv: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """Return the command of a worker of so many ranks, each of which runs `argv`."""
    return argv if ranks == 1 else (sys.executable, "-P", "-m", GROUP, str(ranks), *argv)


def main(arguments: Sequence[str]) -> int:
    hold_lifeline()
    count = int(arguments[0])
    share = GpuShare(count, os.environ.get(environment.COORDINATOR, ""), devices_of(os.environ))
    if share.shared:
        say(f"the GPUs of this machine are taken by other workers: this one shares {share.visible}", error=True)
    ranks = Ranks(count, arguments[1:], share.visible)
    signal.signal(signal.SIGTERM, lambda number, frame: ranks.leave())
    return ranks.run()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)
