"""Members as forks of a benchmark that has imported everything, instead of new interpreters.

A member that imports torch and `train_member` takes four seconds of processor, and a case of `planned.py` has up to 17
members: half of its time would be imports. A fork runs the same program, in its own process, session and namespace,
with its own environment, signals and files; only the modules are there already.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, cast

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.netlab import Host
from support.programs import run_program_here


class ForkedMember:
    """A forked process with those methods of `subprocess.Popen` that `cluster.Members` uses."""

    def __init__(self, process: ForkProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return cast(int, self._process.pid)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


@dataclass(frozen=True, slots=True)
class Forking:
    """A `cluster.Place`: a host of a lab whose members are forks of this process. No thread may run here yet."""

    host: Host

    @property
    def address(self) -> str:
        return self.host.address

    def popen(self, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Fork a member that runs ``python argv``; the keywords are those that `cluster.Members.start` gives."""
        output, env, kept = (popen_kwargs[key] for key in ("stdout", "env", "pass_fds"))
        process = multiprocessing.get_context("fork").Process(
            target=_member, args=(self.host, argv[1:], output.fileno(), env, kept)
        )
        process.start()
        return cast("subprocess.Popen[Any]", ForkedMember(process))


def _member(host: Host, argv: Sequence[str], output: int, env: Mapping[str, str], kept: Sequence[int]) -> None:
    """Become a member: what `Host.popen` and a new interpreter would have done."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    host.enter()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    below = 3
    for descriptor in sorted(kept):
        os.closerange(below, descriptor)
        below = descriptor + 1
    os.closerange(below, os.sysconf("SC_OPEN_MAX"))
    run_program_here(list(argv), dict(env))
