"""The launcher's decisions: which processes should run, which have died, which to start.

Pure: no process, thread or clock. Events come in (a process was started, a process has ended, a new size is requested).
`due(now)` returns what to do at that time (seconds, of any clock that only rises).

A process that dies by a signal is started again: the coordinator under its name, servers and workers under new names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rallypoint.launch.cluster import Exit

_PAUSES_S = (0.0, 0.2, 1.0, 3.0)  # seconds before a process is started again, after the first, second, ... quick death
_LAST_WORD_S = 0.5  # seconds in which the coordinator's message about an ending may still arrive
COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process of this role under this name."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell this process to give up its work and exit (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Show the user a warning."""

    text: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """The coordinator has ended without error: the job is over."""


Decision = Start | Drain | Warn | Fail | Over


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop restarting processes.

    Attributes:
        restart: restart what died; otherwise the first death fails the run.
        quick_s: a process that dies within this many seconds of its start has died quickly.
        quick_deaths: so many quick deaths of one role in a row are answered by a restart; one more fails the run.
        listen_s: seconds that the first coordinator may take until it listens (it may import from a cold disk).
    """

    restart: bool = True
    quick_s: float = 10.0
    quick_deaths: int = 12
    listen_s: float = 120.0


@dataclass(slots=True)
class _Process:
    role: str
    started: float
    draining: bool = False


@dataclass(slots=True)
class Supervisor:
    """The processes of one run. `wanted`: how many servers and workers should run, standby workers included."""

    wanted: dict[str, int]
    limits: Limits = field(default_factory=Limits)
    running: dict[str, _Process] = field(default_factory=dict)
    took_part: set[str] = field(default_factory=set)
    _listening: bool = False
    _names: Counter[str] = field(default_factory=Counter)
    _quick: Counter[str] = field(default_factory=Counter)
    _start_at: dict[str, float] = field(default_factory=dict)
    _failing: tuple[float, str] | None = None
    _lonely_since: float | None = None

    # ---- events ----

    def begin(self, now: float) -> list[Decision]:
        """Start the coordinator. The others must know its address first."""
        return [self._start(COORDINATOR, now)]

    def listening(self, now: float) -> list[Decision]:
        """The coordinator listens. The first time, start all other processes."""
        if self._listening:
            return []
        self._listening = True
        return [self._start(role, now) for role in ("server", "worker") for _ in range(self.wanted[role])]

    def members(self, names: Iterable[str]) -> None:
        """Note these names as members of the job."""
        self.took_part.update(names)

    def ended(self, name: str, how: Exit, now: float) -> list[Decision]:
        """A process has ended."""
        process = self.running.pop(name)
        if process.role == COORDINATOR and how.status == 0:
            return [Over()]
        if process.draining:
            return []  # it was told to exit, and is not counted since then
        if how.status == 0:
            self._one_less(process.role)
            return []  # it has left by itself
        if not how.died or not self.limits.restart:
            return self._failed(name, process, how, now)
        return self._died(name, process, how, now)

    def resized(self, wanted: Mapping[str, int], now: float) -> list[Decision]:
        """`wanted` servers and workers should run from now on: start some, or tell the newest to exit."""
        self.wanted.update(wanted)
        decisions: list[Decision] = []
        for role in ("server", "worker"):
            staying = [name for name, p in self.running.items() if p.role == role and not p.draining]
            for name in staying[self.wanted[role] :]:
                self.running[name].draining = True
                decisions.append(Drain(name))
            if self._listening and role not in self._start_at:
                decisions += [self._start(role, now) for _ in range(self.wanted[role] - len(staying))]
        return decisions

    def due(self, now: float) -> list[Decision]:
        """Return the decisions that are due at `now`."""
        if self._failing is not None and now >= self._failing[0]:
            return [Fail(self._failing[1])]
        first = self.running.get(COORDINATOR)
        if first is not None and not self._listening and now - first.started > self.limits.listen_s:
            return [Fail(f"the coordinator has not begun to listen within {self.limits.listen_s:.0f} s")]
        decisions: list[Decision] = []
        for role in [role for role, at in self._start_at.items() if now >= at]:
            del self._start_at[role]
            missing = 1 if role == COORDINATOR else self.wanted[role] - self._count(role)
            decisions += [self._start(role, now) for _ in range(missing)]
        return decisions or self._lonely(now)

    # ---- decisions ----

    def _start(self, role: str, now: float) -> Start:
        name = role if role == COORDINATOR else f"{role}{self._names[role]}"
        self._names[role] += 1
        self.running[name] = _Process(role, now)
        return Start(name, role)

    def _count(self, role: str) -> int:
        return sum(p.role == role and not p.draining for p in self.running.values())

    def _one_less(self, role: str) -> None:
        """Count one process less: this one is not replaced. Processes that died before are still restarted."""
        self.wanted[role] = max(0, self.wanted[role] - 1)

    def _failed(self, name: str, process: _Process, how: Exit, now: float) -> list[Decision]:
        """The process ended by itself, with an error."""
        others = [n for n, p in self.running.items() if p.role == "worker" and n in self.took_part]
        if process.role == "worker" and name not in self.took_part and others:
            self._one_less("worker")
            return [Warn(f"{name} {how} before it took part; the job goes on without it")]
        if self._failing is None:
            self._failing = (now + _LAST_WORD_S, f"{name} {how}")
        return []

    def _died(self, name: str, process: _Process, how: Exit, now: float) -> list[Decision]:
        role = process.role
        self._quick[role] = self._quick[role] + 1 if now - process.started <= self.limits.quick_s else 1
        deaths = self._quick[role]
        if deaths > self.limits.quick_deaths:
            whom = "times in a row the coordinator" if role == COORDINATOR else f"{role}s in a row"
            return [Fail(f"{name} {how}; it is not started again: {deaths} {whom} died soon")]
        self._start_at[role] = now + _PAUSES_S[min(deaths - 1, len(_PAUSES_S) - 1)]
        return [Warn(f"{name} {how}: starting another")]

    def _lonely(self, now: float) -> list[Decision]:
        """Fail when no worker runs and none will be started. First wait, because the job may just have ended."""
        coming = not self._listening or "worker" in self._start_at or self._failing is not None
        if coming or any(p.role == "worker" for p in self.running.values()):
            self._lonely_since = None
            return []
        self._lonely_since = now if self._lonely_since is None else self._lonely_since
        if now - self._lonely_since < _LAST_WORD_S:
            return []
        return [Fail("every worker ended before the job was over: does the script join and loop to the last step?")]
