"""What should run, what has died, what to start: the launcher's decisions.

Pure: no process, thread or clock. Events come in (a process was started, has ended; a new size is wanted), `due(now)`
says what is to be done at that time (seconds, of any clock that only rises).

A process that dies by a signal is started again: the coordinator under its name, servers and workers under new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rallypoint.launch.cluster import Exit

_PAUSES_S = (0.0, 0.2, 1.0, 3.0)  # before a process is started again, after the first, second, ... quick death
_LAST_WORD_S = 0.5  # the coordinator's own words about an ending may still be on their way
COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process of this role under this name."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell this process to hand its work over and to go (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """The coordinator has ended well: the job is over."""


Decision = Start | Drain | Warn | Fail | Over


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop starting again.

    Attributes:
        restart: start again what died; else the first death fails the run.
        quick_s: a process that dies within so many seconds of its start died quickly.
        quick_deaths: so many quick deaths of one role in a row are answered; one more fails the run.
        listen_s: the first coordinator may take so long until it listens (it may import from a cold disk).
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
    """The processes of one run. `wanted` is how many servers and workers should run, standby workers included."""

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
        """The coordinator first: the others must know its address."""
        return [self._start(COORDINATOR, now)]

    def listening(self, now: float) -> list[Decision]:
        """The coordinator listens. The first time, everybody else is started."""
        if self._listening:
            return []
        self._listening = True
        return [self._start(role, now) for role in ("server", "worker") for _ in range(self.wanted[role])]

    def members(self, names: Iterable[str]) -> None:
        """These are members of the job."""
        self.took_part.update(names)

    def ended(self, name: str, how: Exit, now: float) -> list[Decision]:
        """A process has ended."""
        process = self.running.pop(name)
        if process.role == COORDINATOR and how.status == 0:
            return [Over()]
        if process.draining:
            return []  # it was told to go, and has not counted since
        if how.status == 0:
            self._one_less(process.role)
            return []  # it has left by itself
        if not how.died or not self.limits.restart:
            return self._failed(name, process, how, now)
        return self._died(name, process, how, now)

    def resized(self, wanted: Mapping[str, int], now: float) -> list[Decision]:
        """So many servers and workers are to run from now on: starts some, or tells the newest to go."""
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
        """What is to be done by now."""
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
        """One that counted is not replaced; those that died and are to be started again still are."""
        self.wanted[role] = max(0, self.wanted[role] - 1)

    def _failed(self, name: str, process: _Process, how: Exit, now: float) -> list[Decision]:
        """It ended by itself, in an error."""
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
        """Fail when no worker is left and none is to come; the word that the job is over may be on its way."""
        coming = not self._listening or "worker" in self._start_at or self._failing is not None
        if coming or any(p.role == "worker" for p in self.running.values()):
            self._lonely_since = None
            return []
        self._lonely_since = now if self._lonely_since is None else self._lonely_since
        if now - self._lonely_since < _LAST_WORD_S:
            return []
        return [Fail("every worker ended before the job was over: does the script join and loop to the last step?")]
