"""The launcher's decisions: which processes should run, which have died, which to start.

Pure: no process, thread or clock. Events come in (a process was started, a process has ended, a new size is requested).
`due(now)` returns what to do at that time (seconds, of any clock that only rises).

A process that dies by a signal is started again: the coordinator under its name, servers and workers under new names.
So is a coordinator that took another one's place and could not be started: what it needs may be free again soon.
One that ends before it has joined a running job is tried again too, less and less often: the job does not need it. Nor
does it ever need an aggregator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rallypoint.launch.engines.cluster import Exit

_PAUSES_S = (0.0, 0.2, 1.0, 3.0)  # seconds before a process is started again, after the first, second, ... quick death
_TRIES_S = (1.0, 2.0, 5.0, 10.0, 20.0, 60.0)  # seconds before the next try after one that could not join
_LAST_WORD_S = 0.5  # seconds in which the coordinator's message about an ending may still arrive
HOLD_S = 30.0  # seconds without a word of a coordinator that ends the job itself, or that is to be started again
COORDINATOR = "coordinator"
_STARTED = ("server", "aggregator", "worker")  # in this order, once the coordinator listens


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start a process of this role under this name."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class DrainProcess:
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
class RunOver:
    """The coordinator has ended without error: the job is over."""


Decision = StartProcess | DrainProcess | Warn | Fail | RunOver


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """When to stop restarting processes."""

    restart: bool = True  # restart what died; otherwise the first death fails the run
    quick_s: float = 10.0  # a process that dies within this many seconds of its start has died quickly
    # So many quick deaths of one role in a row are answered by a restart; one more fails the run. So do more tries to
    # join than that, while no worker computes. Processes that die together, none of them started after another's death,
    # count once.
    quick_deaths: int = 12
    # Seconds that the first coordinator may take until it listens (it may import from a cold disk)
    listen_s: float = 120.0


@dataclass(slots=True)
class _Process:
    role: str
    started: float
    wave: int  # how many deaths of its role had been counted when it was started
    draining: bool = False


@dataclass(slots=True)
class Supervisor:
    """The processes of one run. `wanted`: how many of each role should run, standby workers included."""

    wanted: dict[str, int]
    limits: RestartLimits = field(default_factory=RestartLimits)
    running: dict[str, _Process] = field(default_factory=dict)
    took_part: set[str] = field(default_factory=set)
    _listening: bool = False
    _names: Counter[str] = field(default_factory=Counter)
    _quick: Counter[str] = field(default_factory=Counter)  # quick deaths in a row, by role
    _waves: Counter[str] = field(default_factory=Counter)  # all deaths that were counted, by role
    _start_at: dict[str, float] = field(default_factory=dict)
    _try_at: dict[str, list[float]] = field(default_factory=dict)  # by role: one for each process that could not join
    _tries: Counter[str] = field(default_factory=Counter)  # processes in a row that could not join, by role
    _failing: tuple[float, str] | None = None  # why the run fails, and from when on it may
    _held_until: float = 0.0  # until then the coordinator is trusted to end the job itself
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
        return [self._start(role, now) for role in _STARTED for _ in range(self.wanted.get(role, 0))]

    def members(self, names: Iterable[str]) -> None:
        """Note these names as members of the job."""
        new = set(names) - self.took_part
        self.took_part |= new
        for role in {self.running[name].role for name in new & self.running.keys()}:
            del self._tries[role]

    def held(self, at: float) -> None:
        """The coordinator ends the job itself, once the newest version is stored; its last word of any kind came at
        `at`. The run does not fail before HOLD_S seconds after that, but what dies by a signal is started again."""
        self._held_until = max(self._held_until, at + HOLD_S)

    def ended(self, name: str, how: Exit, now: float) -> list[Decision]:
        process = self.running.pop(name)
        if process.role == COORDINATOR and how.status == 0:
            return [RunOver()]
        if process.draining:
            return []  # it was told to exit, and is not counted since then
        if how.status == 0:
            # It has left by itself, and is not replaced; those that have died before still are
            self.wanted[process.role] = max(0, self.wanted[process.role] - 1)
            return []
        lost = process.role == COORDINATOR and self._listening and not how.started  # (for want of files, or processes)
        if not (how.died or lost) or not self.limits.restart:
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
                decisions.append(DrainProcess(name))
            if self._listening and role not in self._start_at:
                decisions += [self._start(role, now) for _ in range(self._missing(role))]
        return decisions

    def due(self, now: float) -> list[Decision]:
        if failure := self._failure(now):
            return failure
        first = self.running.get(COORDINATOR)
        if first is not None and not self._listening and now - first.started > self.limits.listen_s:
            return [Fail(f"the coordinator has not begun to listen within {self.limits.listen_s:.0f} s")]
        decisions: list[Decision] = []
        for role in [role for role, at in self._start_at.items() if now >= at]:
            del self._start_at[role]
            missing = 1 if role == COORDINATOR else self._missing(role)
            decisions += [self._start(role, now) for _ in range(missing)]
        for role, times in self._try_at.items():
            for at in [at for at in times if now >= at]:
                times.remove(at)
                decisions += [self._start(role, now) for _ in range(min(1, self._missing(role)))]
        return decisions or self._lonely(now)

    # ---- decisions ----

    def _start(self, role: str, now: float) -> StartProcess:
        name = role if role == COORDINATOR else f"{role}{self._names[role]}"
        self._names[role] += 1
        self.running[name] = _Process(role, now, self._waves[role])
        return StartProcess(name, role)

    def _missing(self, role: str) -> int:
        """How many processes should be started now, without those that are to be tried later."""
        running = sum(p.role == role and not p.draining for p in self.running.values())
        return self.wanted[role] - running - len(self._try_at.get(role, ()))

    def _failed(self, name: str, process: _Process, how: Exit, now: float) -> list[Decision]:
        if self._is_spared(name, process.role):
            return self._try_later(name, process.role, how, now)
        if process.role == COORDINATOR:
            self._held_until = now + _LAST_WORD_S
        return self._fail(f"{name} {how}", now, after=_LAST_WORD_S)

    def _fail(self, reason: str, now: float, *, after: float = 0.0) -> list[Decision]:
        """Let the run fail for this reason (or an earlier one) in `after` seconds, or when nothing is held any more."""
        if self._failing is None:
            self._failing = (now + after, reason)
        return self._failure(now)

    def _failure(self, now: float) -> list[Decision]:
        """Return the failure of the run, if it is time for it."""
        if self._failing is None or now < max(self._failing[0], self._held_until):
            return []
        return [Fail(self._failing[1])]

    def _died(self, name: str, process: _Process, how: Exit, now: float) -> list[Decision]:
        role, deaths = process.role, self._count_death(process, now)
        if deaths > self.limits.quick_deaths and self._is_spared(name, role):
            return self._try_later(name, role, how, now)
        if deaths > self.limits.quick_deaths:
            whom = f"{role}s in a row"
            if role == COORDINATOR:
                whom, self._held_until = "times in a row the coordinator", now
            return self._fail(f"{name} {how}; it is not started again: {deaths} {whom} died soon", now)
        pause = _PAUSES_S[min(deaths - 1, len(_PAUSES_S) - 1)]
        self._start_at[role] = now + pause
        if role == COORDINATOR and now < self._held_until:
            self.held(now)  # the next one finds out for itself what there is to store
        return [Warn(f"{name} {how}: starting another{f' in {pause:g} s' if pause else ''}")]

    def _count_death(self, process: _Process, now: float) -> int:
        """Count a death. Returns how many of the role have died quickly in a row."""
        role = process.role
        quick = now - process.started <= self.limits.quick_s
        if not quick or process.wave == self._waves[role]:  # otherwise it died together with one that was counted
            self._quick[role] = self._quick[role] + 1 if quick else 1
            self._waves[role] += 1
        return self._quick[role]

    def _is_spared(self, name: str, role: str) -> bool:
        """Has the job begun, and does it go on without this process? It has never joined, or is an aggregator."""
        aggregator = role == "aggregator" and self.limits.restart
        return role != COORDINATOR and bool(self.took_part) and (aggregator or name not in self.took_part)

    def _try_later(self, name: str, role: str, how: Exit, now: float) -> list[Decision]:
        """The job runs without this process: try another one later. If no worker computes, many tries fail the run."""
        tries = self._tries[role]
        computing = any(p.role == "worker" and n in self.took_part for n, p in self.running.items())
        if tries >= self.limits.quick_deaths and not computing:
            reason = f"{name} {how}: {tries + 1} {role}s in a row could not join, and no worker computes"
            return self._fail(reason, now)
        self._tries[role] += 1
        self._try_at.setdefault(role, []).append(now + _TRIES_S[min(tries, len(_TRIES_S) - 1)])
        if tries:
            return []  # said already
        when = "" if name in self.took_part else " before it took part"
        return [Warn(f"{name} {how}{when}; the job goes on without it; others are tried now and then")]

    def _lonely(self, now: float) -> list[Decision]:
        """Fail when no worker runs and none will be started. First wait, because the job may just have ended."""
        coming = not self._listening or "worker" in self._start_at or bool(self._try_at.get("worker"))
        if coming or self._failing is not None or any(p.role == "worker" for p in self.running.values()):
            self._lonely_since = None
            return []
        self._lonely_since = now if self._lonely_since is None else self._lonely_since
        if now - self._lonely_since < _LAST_WORD_S:
            return []
        ended = "every worker ended before the job was over"
        return self._fail(f"{ended}: does the script join and loop to the last step?", now)
