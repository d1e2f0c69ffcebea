"""Messages for observers and the event log: the plan, the members, each step done, what the job waits for (I8)."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.codec.spec import Raw
from rallypoint.config import JobConfig, parse
from rallypoint.coordinator.acts import Act, AppendLog, Record, SendMessage
from rallypoint.coordinator.claims import Early
from rallypoint.coordinator.inbox import Connection
from rallypoint.coordinator.progress import Lateness, StepTally, items_of_step, tally_for
from rallypoint.core import protocol
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.decisions import reductions_at
from rallypoint.core.job import JobRecord
from rallypoint.core.modes import Feature
from rallypoint.core.protocol import Aborted, Accounted, Fingerprint, Finished, Hello, Message, Report, Say
from rallypoint.core.schedule import rate_at
from rallypoint.core.sums import DIGEST_BYTES, dense_shards, pieces_of
from rallypoint.core.typed import named
from rallypoint.core.view import View
from rallypoint.net.handshake import LAUNCHER
from rallypoint.observe.lines import Allowance, Once

# Says what makes a run's bytes comparable with another's: the hash of its first weights, and its intra-op threads.

_NAMED = 3  # workers that a sentence names


@dataclass(slots=True)
class Comparable:
    """Keeps what workers propose until they are in a view, and says then, once of each, what is not as in the job."""

    _proposed: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # digest of the first weights, threads
    _compared: set[str] = field(default_factory=set)
    _first: bytes = b""  # the digest of version 0, once it was said

    def propose(self, worker: str, proposal: protocol.Propose) -> None:
        self._proposed[worker] = (proposal.first, proposal.record.threads)

    def taken_over(self, view: View) -> None:
        """An earlier coordinator has compared the workers of its last view."""
        self._compared.update(member.id for member in view.workers)

    def said(self, record: JobRecord, view: View, connected: Container[str], *, first: bool) -> list[str]:
        """Return what is to be said when `view` is published. `first`: it begins with version 0."""
        sentences = []
        uploaded = self._proposed.get(view.uploader, (b"", 0))[0]
        if first and uploaded and uploaded != self._first:
            self._first = uploaded
            sentences.append(f"version 0, the first weights, has the hash {uploaded.hex()}")
        here = {member.id for member in view.workers}
        new = {worker: self._proposed[worker] for worker in sorted(here - self._compared) if worker in self._proposed}
        self._compared = self._compared & here | new.keys()
        others = [worker for worker, (digest, _) in new.items() if self._first and digest not in (b"", self._first)]
        if others:
            sentences.append(
                f"{named(others, _NAMED)} made other first weights than the job begins with (those of the worker that "
                "uploads them count): the script does not seed them, so each run has others, and ends with other "
                "bytes. Call torch.manual_seed(0) before the model is made"
            )
        usual = (0, record.threads)
        apart = [worker for worker, (_, threads) in new.items() if record.threads and threads not in usual]
        if apart:
            sentences.append(
                f"{named(apart, _NAMED)} computes with {new[apart[0]][1]} intra-op threads, the job with "
                f"{record.threads}: its bytes depend on who computes what. Leave torch.set_num_threads out of the "
                "script; give --threads"
            )
        kept = (worker for worker in self._proposed if worker in connected or worker == view.uploader)
        self._proposed = {worker: self._proposed[worker] for worker in kept}
        return sentences


def of_threads(record: JobRecord) -> list[str]:
    """Return what is said of a job's intra-op threads when it begins: nothing of one, the default of --threads."""
    if record.threads < 2:
        return []
    return [
        f"{record.threads} intra-op threads: the weights differ in the last digits from those of a run with 1 (the "
        "default of --threads; alone, OMP_NUM_THREADS=1)"
    ]


# Which samples of members' machines and links are kept in the event log, and under which names.

_EVERY_S = 4.0  # of a member: a little less than members' own period
_MOST_A_SECOND = 20.0  # of all members together: in a large job each is kept less often


@dataclass(slots=True)
class Samples:
    """Decides which samples count. Its size has a bound: that of the view's members."""

    _kept: dict[str, float] = field(default_factory=dict)  # member -> when its last sample was kept

    def take(self, member: str, sample: protocol.Sampled, view: View | None, now: float) -> protocol.Sampled | None:
        """Return the sample as it is logged: with its member, its host, and links by member. None: it is not kept.

        `now` in seconds. A member that has no part in the view is not kept; nor are links to who is not in it.
        """
        if view is None:
            return None
        everybody = {one.id: one for one in (*view.workers, *view.servers, *view.aggregators)}
        if member not in everybody:
            return None
        every = max(_EVERY_S, len(everybody) / _MOST_A_SECOND)
        if now - self._kept.get(member, float("-inf")) < every:
            return None
        self._kept = {one: when for one, when in self._kept.items() if one in everybody}
        self._kept[member] = now
        names = {one.address: one.id for one in (*view.servers, *view.aggregators)}
        links = {names[address]: link for address, link in sample.links.items() if address in names}
        return msgspec.structs.replace(sample, member=member, host=everybody[member].host[:200], links=links)


_EARLY = 65_536  # steps: in a streaming job a replica may be far ahead of the others
_FAR = 1 << 60  # a step behind every job's end
_EARLY_DIGESTS = 4  # steps: only synchronous jobs record digests
_BURST, _SENTENCE_S = 100, 1.0  # sentences that a member may say at once; then one in so many seconds
Told = Say | protocol.Skipped | Accounted | Fingerprint | protocol.OfMembers  # said for observers and the log
_UNHEARD = 64  # messages that are kept for a launcher that is not connected yet, or not again
_KEPT = Say | protocol.Skipped | protocol.Metrics | protocol.Snapshotted | Accounted | protocol.Held | protocol.Ordered
_TWO_COPIES = (
    "every shard is on two servers, so one of them may die without a step lost; the copies take as much of their "
    "links as one more worker (with --replication 1 nothing, but a server's death costs all steps since a snapshot)"
)
SCRIPT_S = 1.0  # how often observers are told how far the scripts of a job of sums are
SILENCE_S = 5.0  # after so long without a message, announce what the job waits for


class Announcer:
    """Makes the messages for observers and the event log. Every `now` is in seconds, of the same clock.

    Attributes:
        observers: the connections of all observers.
        tally: counts the replicas' reports; None before the job's record is known.
        planned: the message that describes the job; None before the record is known.
        config: the job's settings; the defaults before the record is known.
        last_news: the time of the last message that was not a `Say`.
        comparable: compares what workers propose with what the job has.
    """

    def __init__(self, machine: ClusterMachine, now: float, members: Mapping[str, Connection]) -> None:
        """`members`: who is connected."""
        self._machine, self._members = machine, members
        self.observers: list[Connection] = []
        self._unheard: deque[Message] = deque(maxlen=_UNHEARD)
        self.tally: StepTally | None = None
        self.planned: protocol.Planned | None = None
        self.config = JobConfig()
        self._late, self._early = Lateness(), Early[Report](_EARLY)
        self._early_digests = Early[tuple[str, Fingerprint]](_EARLY_DIGESTS)
        self._skipped, self._samples, self.comparable = Once(), Samples(), Comparable()
        self._allowances: dict[str, Allowance] = {}  # by member with a part in the job; "": all others
        self._announced: protocol.Members | None = None
        self._said_idle = False
        self._pieces: list[int] = []  # by shard: the digests of a version of it
        self._script, self._script_said = protocol.ScriptAt(0), now
        self._ended: dict[str, protocol.ScriptAt] = {}  # by worker that computes: the end of its script
        self.last_news = self._last_said = now

    # ---- announcements ----

    def announce(self, message: Message, now: float) -> list[Act]:
        """Send `message` to all observers and append it to the event log; a skipped step once, who says it first."""
        if isinstance(message, protocol.Skipped):  # each server says it: any of them may die before it has
            name = (message.generation, message.step, message.replicas, message.gradients)
            if not self._skipped.is_new(name):
                return []
        self._last_said = now
        if not isinstance(message, Say):  # a member that says what it waits for is still waiting
            self.last_news = now
        return self._tell(message)

    def told_by(self, member: str, message: Told, now: float) -> list[Act]:
        """Announce what a member says, unless it says too much. Members without a part in the job share one allowance:
        whoever knows the token can be many of them. Of steps that are skipped, a member with a part may tell each.
        """
        if isinstance(message, Fingerprint):
            return self._recorded(member, message)
        if isinstance(message, protocol.ScriptAt):
            return self._script_told(member, message)
        if isinstance(message, protocol.Sampled):
            kept = self._samples.take(member, message, self._machine.view, now)
            return [] if kept is None else [AppendLog(kept)]
        has_a_part = self._machine.course.has_a_part(member)
        if has_a_part and isinstance(message, protocol.Skipped):
            return self.announce(message, now)
        allowance = self._allowances.setdefault(member if has_a_part else "", Allowance(_BURST, _SENTENCE_S, now))
        if not allowance.take(now):
            return []
        omitted, allowance.omitted = allowance.omitted, 0
        left_out = Say(f"{omitted} sentences of members were left out: {member} says too much")
        return [*(self.announce(left_out, now) if omitted else []), *self.announce(message, now)]

    def _script_told(self, member: str, script: protocol.ScriptAt) -> list[Act]:
        """A worker of a job of sums says how far its script is. All workers hear of one that has ended (I8)."""
        view = self._machine.view
        computing = {} if view is None else {one: own for one, own in view.assigned(_FAR).items() if own}
        if Feature.SUMS not in self.config.features or member not in computing or script.rank >= len(computing):
            return []
        if script.sums >= self._script.sums:
            self._script = script
        told = msgspec.structs.replace(script, worker=member)
        if not script.ended or member in self._ended:  # it is said again when the coordinator comes back
            return []
        self._ended[member] = told
        others = [self._members[worker] for worker in computing if worker in self._members]
        return [AppendLog(told), *(SendMessage(one, told) for one in (*others, *self.observers))]

    def ended_scripts(self, member: str) -> list[Act]:
        """Tell a worker that has just been admitted which scripts have ended: it may have been away meanwhile."""
        connection = self._members.get(member)
        if connection is None or self._machine.course.members.role_of(member) != "worker":
            return []
        return [SendMessage(connection, told) for told in self._ended.values()]

    def _tell(self, message: Message) -> list[Act]:
        if isinstance(message, _KEPT) and not self.observers:
            self._unheard.append(message)
        return [AppendLog(message), *(SendMessage(observer, message) for observer in self.observers)]

    def observe(self, connection: Connection, hello: Hello, last_word: Finished | Aborted | None = None) -> list[Act]:
        """Add an observer, and send it the plan and the members if they are known; once the job is over only its last
        word, and that to whoever comes.

        The launcher, which shows what it hears, always gets all of it, and the sentences that nobody has heard: it
        connects again a moment after members have told a new coordinator of what happened.
        """
        self.observers.append(connection)  # at the end members too: `close` flushes the observers' connections
        told: list[Message | None] = [] if last_word is not None else [self.planned, self._announced]
        if hello.role == "observer" and hello.id == LAUNCHER:
            told = [self.planned, self._announced, *self._unheard]
            self._unheard.clear()
        return [SendMessage(connection, known) for known in (*told, last_word) if known is not None]

    def plan(self, record: JobRecord, view: View, now: float, *, taking_over: bool = False) -> list[Act]:
        """Announce the job when its record is known. Does nothing when called again.

        `taking_over`: an earlier coordinator began the job, and its reports of the step in progress may be lost.
        """
        if self.planned is not None:
            return []
        self.config, layout = parse(record.config), record.layout
        config, furthest = self.config, self._machine.course.furthest
        self.tally = tally_for(config)
        begin = self.tally.take_over if taking_over else self.tally.rewind
        begin(furthest, view.generation)
        self.planned = protocol.Planned(
            steps=record.steps, replicas=config.replicas,
            item="pushes" if Feature.KEYED in config.features else config.reading.item,
            words=layout.words + sum(table.numel for table in layout.tables),
            shards=len(layout.shards), workers=tuple(m.id for m in view.workers),
            servers=tuple(m.id for m in view.servers), steps_per_round=config.steps_per_round,
            items=items_of_step(config), done=config.steps_at(furthest + 1),
            loss="never" if Feature.KEYED in config.features else "said" if config.reading.order == "own" else "always",
        )  # fmt: skip
        members = (*view.workers, *view.servers, *view.aggregators)
        said = [*self._machine.terms.topology.nowhere(members), *self._placed(view), *of_threads(record)]
        unasked = not self._machine.terms.replication and self._machine.course.views.replication > 1
        said += [_TWO_COPIES] if unasked else []
        if taking_over:
            self.comparable.taken_over(view)
            said = []
        return [*self.announce(self.planned, now), *(act for text in said for act in self.announce(Say(text), now))]

    def _placed(self, view: View) -> list[str]:
        """What uplinks do to where shards are placed."""
        course = self._machine.course
        here = course.views.situation(course.members, view.assignments)
        raw = isinstance(self.config.codec, Raw)  # an aggregator sends on what it has added up as fp32
        return course.views.uplinks.said(here, aggregates=course.strategies.aggregates and raw)

    def members(self, view: View, now: float) -> list[Act]:
        """Announce the members, if they have changed since the last call."""
        busy = {worker for assignment in view.assignments for worker, own in assignment.replicas.items() if own}
        workers = [member.id for member in view.workers]
        told = protocol.Members(
            str(view.number), tuple(w for w in workers if w in busy), tuple(w for w in workers if w not in busy),
            tuple(member.id for member in view.servers), self._machine.exposed,
            tuple(member.id for member in view.aggregators), view.aggregator_of, view.orders.warming,
        )  # fmt: skip
        if told == self._announced:
            return []
        self._announced = told
        return [*self.announce(told, now), *self._idle_workers(told, now), *self._compared(view, now)]

    def _compared(self, view: View, now: float) -> list[Act]:
        """Say which first weights the job has, and what of a worker is not as in the job."""
        course = self._machine.course
        if course.record is None:
            return []
        said = self.comparable.said(course.record, view, self._members, first=not view.origin and course.furthest < 0)
        return [act for text in said for act in self.announce(Say(text), now)]

    def _idle_workers(self, members: protocol.Members, now: float) -> list[Act]:
        """Say once that there are more workers than replicas, beside those that were to stand by."""
        replicas, wanted = self.config.replicas, self._machine.course.workers_max
        if self._said_idle or len(members.workers) < replicas or len(members.standby) == 0 or wanted <= replicas:
            return []
        self._said_idle = True
        idle = ", ".join(sorted(members.standby, key=lambda name: (len(name), name))[: wanted - replicas])
        compute, has = "computes" if wanted - replicas == 1 else "compute", f"replica{'s' * (replicas != 1)}"
        return self.announce(Say(
            f"{idle} {compute} nothing: the job has {replicas} {has}, and each is computed by one worker. Use "
            f"--workers {replicas}, or a new run with more replicas (their number is fixed for a run)"
        ), now)  # fmt: skip

    def report(self, report: Report, now: float) -> list[Act]:
        """Count a replica's report, as soon as its step is known to be reached."""
        record = self._machine.record
        if record is None or report.step >= record.rounds:
            return []
        if report.step > self._machine.course.known:
            if not self._machine.course.is_current(report.generation):
                return []  # it would not count later either
            self._early.keep(report.step, report, 2 * self.config.replicas)
            return []
        return self._count(report, now)

    def count_early(self, now: float) -> list[Act]:
        """Count the reports, and keep the digests, that were early and are so no more."""
        known = self._machine.course.known
        acts = [act for report in self._early.due(known) for act in self._count(report, now)]
        return [*acts, *(act for early in self._early_digests.due(known + 1) for act in self._recorded(*early))]

    def _count(self, report: Report, now: float) -> list[Act]:
        if self.tally is None or (done := self.tally.add(report)) is None:
            return []
        step, config = self.config.steps_at(done.step + 1) - 1, self.config
        rate = None if config.own_optimizer else rate_at(config.schedule, step, config.steps)
        if rate is not None and (plateau := config.evaluation.plateau) is not None:
            rate = plateau.reduced(rate, reductions_at(self._machine.course.views.orders.reductions, step))
        return self.announce(msgspec.structs.replace(done, step=step, lr=rate), now)

    def _recorded(self, member: str, claim: Fingerprint) -> list[Act]:
        """Keep digests, unless their generation is stale, or the job does not record them.

        At most one step after what is known counts; a few further ones are kept until they are due.
        """
        record, config = self._machine.record, self.config
        assert isinstance(claim, protocol.Contributed | protocol.Updated)
        if record is None or self.tally is None or not self.tally.counts(claim.generation):
            return []
        if not self._pieces:
            self._pieces = [len(pieces) for pieces in pieces_of(record.layout)]
        if isinstance(claim, protocol.Contributed):
            number, digests = claim.step, len(dense_shards(record.layout))
            right = claim.step < record.rounds and claim.replica < config.replicas
        else:
            number, digests = claim.version, self._pieces[claim.shard] if claim.shard < len(self._pieces) else 0
            right = claim.version <= record.rounds
        right = right and config.audit.fingerprints > 0 and number % config.audit.fingerprints == 0
        if not right or len(claim.digests) != digests * DIGEST_BYTES:
            return []
        if number > self._machine.course.known + 1:
            self._early_digests.keep(number, (member, claim), 2 * (config.replicas + len(self._pieces)))
            return []
        return [Record(member, claim)]

    def applied(self, message: protocol.Applied) -> list[Act]:
        """Write a server's ledger entry to the event log, and count how late each worker was."""
        self._late.add(message.late)
        return [AppendLog(message)] if message.at else []  # without a time it says only what the server's state proves

    # ---- what is waited for ----

    def waiting(self, now: float) -> list[Act]:
        """Announce what the job waits for, if nothing was announced for SILENCE_S seconds."""
        if now - self._last_said < SILENCE_S:
            return self._script_repeated(now)
        self._last_said = now
        what = self._machine.waiting_for() or self._who_is_late()
        if not what:
            return self._script_repeated(now)
        return self._tell(protocol.Waiting(f"waiting for {what}, {now - self.last_news:.0f} s so far"))

    def _script_repeated(self, now: float) -> list[Act]:
        """Tell observers how far the scripts of a job of sums are. Such a job says little else, so it is also the sign
        that the coordinator lives."""
        if Feature.SUMS not in self.config.features or self.planned is None or now - self._script_said < SCRIPT_S:
            return []
        self._script_said = now
        return [SendMessage(observer, self._script) for observer in self.observers]

    def _who_is_late(self) -> str:
        view = self._machine.view
        if self.tally is None or view is None:
            return "its members to come back"
        if not view.assignments:
            return "the first weights to be stored"
        step, replicas = self.tally.missing()
        late = [worker for worker, own in view.assigned(step).items() if set(own) & set(replicas)]
        course = self._machine.course
        over = course.record is not None and step >= course.last
        if over:
            late = [worker for worker in late if worker not in course.members.done]
        if evaluating := [worker for worker in late if worker in course.evaluating]:
            if Feature.KEYED in self.config.features:  # (its script may compute a push for as long as it likes)
                return f"pushes of step {step}: {self._on_hosts(view, evaluating, figures=True)}"
            evaluate = "evaluates" if len(evaluating) == 1 else "evaluate"
            return f"{self._on_hosts(view, evaluating)}, which {evaluate}"
        if over:
            return f"the last version to reach {self._on_hosts(view, late) or 'the workers'}"
        if Feature.SUMS in self.config.features:
            return ""  # each worker says which sums it waits for
        steps = self.config.steps_of(step)
        what = f"step {step}" if len(steps) < 2 else f"round {step} (steps {steps[0]} to {steps[-1]})"
        who = self._on_hosts(view, late, figures=True) or "nobody yet"
        which, have = ("replica", "has") if len(replicas) == 1 else ("replicas", "have")
        return f"{what}: {which} {', '.join(map(str, replicas))} on {who} {have} not reported"

    def _on_hosts(self, view: View, workers: Sequence[str], *, figures: bool = False) -> str:
        """Return ``worker0 on here, worker1 on there``, each with how late it usually is if `figures`."""
        hosts = {member.id: member.host for member in view.workers}
        late = {worker: self._late.of(worker) if figures else "" for worker in workers}
        return ", ".join(f"{worker} on {hosts.get(worker, '?')}{of and f' ({of})'}" for worker, of in late.items())
