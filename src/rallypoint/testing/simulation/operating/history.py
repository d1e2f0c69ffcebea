"""The log of one run: which versions were published, held, stored and seen, in which view; and whether that may be.

It is looked at after the run, and knows nothing of bytes: a defect that changes none is found too. `World.note` makes
an entry. In `Noted.what`:

    view     a member hears of a view (`more`)
    holds    a server has made or loaded a version: as a primary or as a copy
    sends    a server sends a version to a worker or an aggregator (`other`): it is visible. `more`: the kind of frame,
             the content, the copies that count, the versions that the server keeps
    hears    something has come to a server from `other`; `more`: what, and the view under which it was sent
    takes    the same, and it counts: a contribution, an update of a backup, a whole state
    accepts  a worker lets a version from `other` land; `more`: the view under which it was sent
    pushes   a worker sends a contribution to a step (of the shard's own)
    stores   a server has stored a version in the snapshot `other`
    resumed  everybody was killed: what follows is of another job perhaps, whose views have the same numbers
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.core.worker.slots import Arriving, Effect, Land
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Noted, World


class Broken(AssertionError):
    """What happened may not happen. `entry`: where it was seen."""

    def __init__(self, sentence: str, entry: Noted) -> None:
        super().__init__(sentence)
        self.entry = entry


def note_accepted(world: World, shell: WorkerShell) -> None:
    """Make an entry of each version that the worker accepts."""
    arriving, me = shell.arriving, shell.machine.me

    def looked(event: Arriving, server: str) -> list[Effect]:
        effects = arriving(event, server)
        if isinstance(effects[0], Land):
            world.note("accepts", me, event.shard, event.version, shell.number, server, event.view)
        return effects

    shell.arriving = looked  # type: ignore[method-assign]


def check(log: Sequence[Noted], job: SimulatedJob) -> None:
    """Raise Broken at the first entry that breaks I4 (visible means durable), I5 (two versions) or I10 (fencing)."""
    _Checked(job).look(log)


class _Checked:
    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        self._views: dict[ViewNumber, View] = {}
        self._held: dict[tuple[str, ViewNumber, int], tuple[int, int]] = {}  # by a server: the first, the newest
        self._begun: set[tuple[ViewNumber, int]] = set()
        self._stored: dict[tuple[str, int], set[int]] = {}
        self._published: dict[tuple[ViewNumber, int], int] = {}
        self._seen: dict[tuple[ViewNumber, int], int] = {}  # the newest that a worker accepted
        self._contents: dict[tuple[ViewNumber, int, int, str], tuple[str, object]] = {}
        # Who publishes, from which view on, and the version that it had then.
        self._leads: dict[tuple[ViewNumber, int], tuple[str, ViewNumber, int]] = {}
        self._has: dict[tuple[str, ViewNumber], dict[int, int]] = {}  # what a worker has accepted

    def look(self, log: Sequence[Noted]) -> None:
        """Every entry, in order."""
        for entry in log:
            if entry.what == "view":
                self._views[entry.number] = entry.more
                continue
            if entry.what == "resumed":
                stored = self._stored
                self.__init__(self._job)  # type: ignore[misc]
                self._stored = stored
                continue
            view = self._views[entry.number]
            sentence = getattr(self, f"_{entry.what}")(entry, view, view.generation)
            if sentence:
                raise Broken(f"at {entry.at:.3f} s {entry.who} {sentence}", entry)

    def _holds(self, entry: Noted, view: View, generation: ViewNumber) -> str:
        shard, version = entry.shard, entry.version
        first, _ = self._held.get((entry.who, generation, shard), (version, version))
        self._held[entry.who, generation, shard] = min(first, version), version
        if (generation, shard) in self._begun:
            return ""
        self._begun.add((generation, shard))
        stored = self._stored.get((view.origin.rpartition("/")[2], shard))
        if stored is None or version in stored:
            return ""
        return f"begins with version {version} of shard {shard}; of snapshot {view.origin} it is {sorted(stored)}"

    def _stores(self, entry: Noted, view: View, generation: ViewNumber) -> str:
        self._stored.setdefault((entry.other, entry.shard), set()).add(entry.version)
        return ""

    def _sends(self, entry: Noted, view: View, generation: ViewNumber) -> str:
        who, shard, version, (kind, content, copies, kept) = entry.who, entry.shard, entry.version, entry.more
        what = f"publishes version {version} of shard {shard}"
        first, newest = self._held.get((who, generation, shard), (-1, -1))
        if not first <= version <= newest:
            return f"{what}, and holds {first} to {newest} of generation {generation}"  # I10: or of another generation
        if view.primary[shard] != who:
            return f"{what}, which view {view.number} gives to {view.primary[shard]}"
        for copy in copies:
            _, copied = self._held.get((copy, generation, shard), (-1, -1))
            if copied < version:
                return f"{what} while its backup {copy} is at version {copied}"
        if sentence := self._value(entry, generation, kind, content):
            return sentence
        self._published[generation, shard] = max(version, self._published.get((generation, shard), -1))
        if self._job.policy.tree and not {newest, max(first, newest - 1)} <= {*kept}:
            return f"keeps versions {sorted(kept)} of shard {shard}, and is at version {newest}"  # I5
        return self._takes_over(entry, generation, newest)

    def _value(self, entry: Noted, generation: ViewNumber, kind: str, content: object) -> str:
        """One version has one content, whoever sends it."""
        key = (generation, entry.shard, entry.version, kind)
        by, known = self._contents.setdefault(key, (entry.who, content))
        if known == content:
            return ""
        return f"publishes version {entry.version} of shard {entry.shard} with another content than {by} before"

    def _takes_over(self, entry: Noted, generation: ViewNumber, newest: int) -> str:
        """Who publishes after another one has all that a worker has seen (I4)."""
        key, seen = (generation, entry.shard), self._seen.get((generation, entry.shard), -1)
        leads, begun, _ = self._leads.get(key, ("", ViewNumber(), -1))
        if entry.number < begun:
            return ""
        self._leads[key] = entry.who, entry.number, newest
        if leads == entry.who or newest >= seen:
            return ""
        return f"takes shard {entry.shard} over at version {newest}, and version {seen} was visible"

    def _hears(self, entry: Noted, view: View, generation: ViewNumber) -> str:
        kind, number = entry.more
        if number >= generation:
            return ""
        return f"takes a {kind} of {entry.other} that is of view {number}; the generation is {generation}"

    def _takes(self, entry: Noted, view: View, generation: ViewNumber) -> str:
        kind, number = entry.more
        if kind not in ("REPLICATE", "copy"):
            return self._hears(entry, view, generation)
        began, primary = view.homed.get(entry.shard, generation), view.primary[entry.shard]
        if primary == entry.other and number >= began:
            return ""
        what = f"takes a {kind} of {entry.other} for shard {entry.shard} that is of view {number}"
        return f"{what}; in view {view.number} it is {primary}'s, from view {began} on"

    def _accepts(self, entry: Noted, view: View, generation: ViewNumber) -> str:
        shard, version, sent = entry.shard, entry.version, entry.more
        what = f"accepts version {version} of shard {shard} from {entry.other}, which sent it in view {sent}"
        if sent < generation:
            return f"{what}; the generation is {generation}"
        has = self._has.setdefault((entry.who, generation), {})
        has[shard] = max(version, has.get(shard, -1))
        if self._views[sent].generation > generation:
            return ""  # it has not heard of a roll-back yet: what it makes of this is stale, which `_hears` checks
        newer = self._views[max(sent, view.number)]
        aggregator = view.aggregator(entry.who)
        if entry.other not in (newer.primary[shard], "" if aggregator is None else aggregator.id):
            return f"{what}; in view {newer.number} it is {newer.primary[shard]}'s"
        if version > self._published.get((generation, shard), -1):
            return f"{what}; no server has published it in generation {generation}"
        leads, begun, base = self._leads.get((generation, shard), ("", ViewNumber(), -1))
        if entry.other in view.primary.values() and entry.other != leads and sent < begun and version > base:
            return f"{what}; {leads} publishes it from view {begun} on, and had version {base} then"
        self._seen[generation, shard] = max(version, self._seen.get((generation, shard), -1))
        return ""

    def _pushes(self, entry: Noted, view: View, generation: ViewNumber) -> str:
        """Nobody pushes to step t before it has all shards at version t (I5)."""
        job, cadence = self._job, self._job.cadence
        if not job.policy.tree or job.delayed or job.config.keyed:
            return ""
        step, has = cadence.round_of(entry.shard, entry.version), self._has.get((entry.who, generation), {})
        lacks = [shard for shard in range(job.shards) if has.get(shard, -1) < cadence.updates_before(shard, step)]
        if not lacks or not entry.who.startswith("worker"):
            return ""
        return f"pushes to step {step}, and has shard {lacks[0]} at version {has.get(lacks[0], -1)}"
