"""Programs that a test starts one by one, as a person does, and what each of them prints; a script that they train."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.programs import Program

PATIENCE_S = 240.0  # against hanging only: a worker by hand imports torch anew, and two took more than a minute


def script(steps: int | str = 10**9, *, before: str = "", after: str = "") -> str:
    """A script that trains a small model for so many steps.

    before: what it does before each micro-batch. after: what it does at its end, in the ``with`` of its job.
    """
    return f"""
import os, pathlib, sys, time, torch, rallypoint as rp
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
with rp.join() as job:
    for micro in job.train(model, data, replicas=2, batch=4, steps={steps}):
        {before or "pass"}
        with micro:
            micro.backward(model(micro.batch[0]).square().mean())
    {after or "pass"}
"""


class Members:
    """Programs in one folder. `env` is the environment of each, besides its name."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self._env = folder, env
        self.started: dict[str, Program] = {}

    def start(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> Program:
        """Start a command of rallypoint under this name."""
        return self.start_python(name, "-m", "rallypoint.cli", *arguments, env=env)

    def start_python(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> Program:
        """Start Python with these arguments under this name."""
        own = {**self._env, "RALLYPOINT_ID": name, **(env or {})}
        self.started[name] = Program(list(arguments), self.folder / name, own, self.folder)
        return self.started[name]

    def said(self, name: str) -> str:
        """What a program has printed."""
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def until(self, name: str, pattern: str) -> str:
        """Wait until `name` has printed the pattern. Returns its first group."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.said(name))) is None:
            assert self.started[name].poll() is None, self.said(name)
            assert time.monotonic() < deadline, f"{name} printed only {self.said(name)!r}"
            time.sleep(0.01)
        return found.group(1)


@contextmanager
def members_in(folder: Path, env: Mapping[str, str]) -> Iterator[Members]:
    """In the body, programs in this folder; what still runs at its end is killed."""
    made = Members(folder, env)
    try:
        yield made
    finally:
        for program in made.started.values():
            program.kill()
            program.wait()
