"""Push a delta, receive parameters: one worker's exchange buffer, and what moves between it and the servers.

The exchange buffer is one vector as long as the model. Each shard has a slot in it. The slot first holds the gradient
that is pushed, then the new parameters that arrive (see `core/worker/slots.py`). Synchronisation takes no other memory
of a worker, except for the gradients that autograd holds for a moment.

Files: the shell under its lock, and the order of all locks (`locked.py`); links (`links.py`); what leaves
(`pushes.py`); what arrives (`arrivals.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
import xxhash

from rallypoint.codec.build import ShardCodecStates
from rallypoint.codec.spec import Bf16, Raw
from rallypoint.config import JobConfig, audits_of, cadence_of, codec_of
from rallypoint.core.layout import Layout, Shard, carried_in
from rallypoint.core.modes import StateHolder
from rallypoint.core.optimizer import Sum
from rallypoint.core.protocol import Beat, GiveUp
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.aligned import sent_of, unapplied
from rallypoint.core.worker.ending import End
from rallypoint.core.worker.shell import WorkerPlan, shell_for
from rallypoint.errors import RallypointError
from rallypoint.net.frames import Header, Kind
from rallypoint.net.pool import bytes_of, pinned_words, words_of_memory
from rallypoint.observe.observed import observed
from rallypoint.optim import InPlace
from rallypoint.store.record import ShardRecord, encode_record
from rallypoint.worker.exchange.arrivals import Arrivals, LeasedPull, ReplicatedState, RowPulls, ServerState, WordPulls
from rallypoint.worker.exchange.arrivals import States as Records
from rallypoint.worker.exchange.links import ExchangeContext, Links
from rallypoint.worker.exchange.locked import (
    InPlaceMemory,
    LockedShell,
    NarrowVector,
    Rewound,
    ShardMemory,
    SlotMemory,
    WholeVector,
)
from rallypoint.worker.exchange.pushes import (
    CodecStates,
    Contributions,
    Encoder,
    ForwardVersion,
    LinkEffects,
    Pushes,
    ReplicaPushes,
)

# ---- The worker's plan of its job, from the configuration and the layout ----


def worker_plan(
    config: JobConfig, layout: Layout, codec_state_shards: tuple[int, ...] = (), *, early: bool = True,
    in_place: bool = False,
) -> WorkerPlan:  # fmt: skip
    """Return the plan for `shell_for`. `codec_state_shards` are the shards whose codec has a state for each replica.

    `early`: a forward pass may begin before all of its version is here, if the settings allow it. `in_place`: see
    `optim.InPlace`.
    """
    shards = layout.shards
    return WorkerPlan(
        shards=len(shards), rounds=config.rounds, mode=config.mode,
        buffer_shards=frozenset(shard.index for shard in shards if config.contributors(shard.role) == 1),
        cadence=cadence_of(config, shards), codec_state_shards=codec_state_shards,
        presum=_presum(config, layout, all_here=in_place),
        # Rows of tables are pulled at a version that exists everywhere
        overlaps=early and config.overlaps and not layout.tables, audits=audits_of(config),
        carried=carried_in(shards),
        sums=isinstance(config.applied, Sum),
    )  # fmt: skip


def _presum(config: JobConfig, layout: Layout, *, all_here: bool) -> tuple[frozenset[int], int, int]:
    """The shards whose contributions a worker adds up, how many replicas contribute, and the most to add up.

    `all_here`: the server takes the sum of all replicas alone (`optim.InPlace`).

    A lossy codec encodes each replica by itself, so that the bytes do not depend on the cluster. Rows of tables differ
    from replica to replica: their sum would be hardly smaller.
    """
    shards = frozenset(
        shard.index for shard in layout.shards
        if shard.role == "parameters" and shard.part is None and codec_of(config, shard.group) == Raw()
    )  # fmt: skip
    if not config.policy.tree or config.streamed:  # (a sum of replicas would be as large as the model)
        return frozenset(), 1, 1
    nbytes = sum(layout.shards[shard].nbytes for shard in shards)
    copies = 32 if all_here else min(config.network.presum_bytes // max(1, nbytes), 32)
    return (shards if copies else frozenset(), config.replicas, 1 << copies)


def travels_as_bf16(config: JobConfig, layout: Layout) -> bool:
    """True if all parameters travel as bf16 both ways, and a worker needs no gradient in fp32 on the host."""
    groups = {shard.group for shard in layout.shards if shard.role == "parameters"}
    on_host = config.streamed or layout.tables or config.audit.fingerprints or not config.mode.whole_versions
    return not on_host and all(codec == Bf16() for codec in (config.down, *(codec_of(config, one) for one in groups)))


# ---- The upload of the weights, or states, that all workers start from ----

Words = Callable[[int, int], torch.Tensor]
States = Callable[[Shard], ShardRecord]

_UNDER_WAY = 16  # shards that are copied and not sent yet
_AT_ONCE = 1 << 20  # words that are digested at once


def digest_of(layout: Layout, words: Words) -> bytes:
    """Return the digest (XXH3-128) of the first weights, wherever shards are cut; of tables, which servers make, not.

    `words` as in `push_initial`.
    """
    digest = xxhash.xxh3_128()
    for entry in layout.entries:
        for start in range(entry.start, entry.stop, _AT_ONCE):
            digest.update(bytes_of(words(start, min(start + _AT_ONCE, entry.stop))))
    return digest.digest()


def push_initial(
    layout: Layout, links: Links, view: Callable[[], View | None], check: Callable[[], None], version: int,
    words: Words, state: States | None,
) -> None:  # fmt: skip
    """Upload every shard as `version`, a few at a time. Called by the one worker that uploads.

    A shard's values are ``words(start, stop)`` (1-D fp32 CPU), or ``state(shard)`` for parameters where workers have
    states. `view` returns the view in force, or None in a new generation: then the upload ends. `check` raises the
    error that ends the job.
    """
    room = threading.Semaphore(_UNDER_WAY)
    for shard in layout.shards:
        while not room.acquire(timeout=0.1):
            check()
            if view() is None:
                return
        if (now := view()) is None:
            return
        header = Header(Kind.INITIAL, now.number, shard=shard.index, step=version)
        if (link := links.get(now.primary[shard.index])) is None:
            room.release()
        elif state is not None and shard.role == "parameters":
            data = memoryview(encode_record(state(shard), "none"))
            link.push(header._replace(kind=Kind.STATE, length=len(data)), data, sent=room.release)
        else:
            data = bytes_of(words(shard.start, shard.stop))
            link.push(header._replace(length=len(data)), data, sent=room.release)


# ---- What an exchange is for a script that has a loop of its own, and asks for sums from it ----


class OwnLoop:
    """The shell of an exchange under its lock, for a thread in place of the main one.

    Attributes:
        locked: the shell.
        busy: the script does what it likes, and needs nothing of the servers: this worker counts as active.
    """

    def __init__(self, locked: LockedShell, links: Links) -> None:
        self.locked, self._links = locked, links
        self.busy = False

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    @property
    def finished(self) -> bool:
        return self.locked.shell.finished

    def where(self, shards: Iterable[int]) -> str:
        """Name the servers that these shards come from, as a phrase."""
        return self._links.describe(shards, self.locked.shell.view.primary)


# ---- The job's end as the main thread sees it: the last version, and the wait until everybody knows of a stop ----


class JobEnd:
    """Main thread only."""

    def __init__(self, locked: LockedShell) -> None:
        self._locked, self._shell = locked, locked.shell

    @property
    def last(self) -> int:
        """The job's last version, as far as this worker knows."""
        return self._shell.machine.steps

    @property
    def generation(self) -> ViewNumber:
        return self._shell.view.generation

    @property
    def is_early(self) -> bool:
        """True if the script has stopped the job, and the view says with which version it ends."""
        return self._shell.view.orders.stop is not None

    def take(self) -> End | None:
        """The generation and the last version, if the model holds that; else None."""
        with self._locked.changed:
            return self._shell.ending.take()

    def computes(self) -> bool:
        """True if this worker would compute now: the step needs something of it."""
        with self._locked.changed:
            return self._has_to_compute()

    def _has_to_compute(self) -> bool:
        action = self._shell.machine.next_action()
        return isinstance(action, machine.Compute) and action.step == self._shell.machine.step

    def wait_until_known(self) -> None:
        """Wait until a view says with which version the job ends. Raises Rewound like `Exchange.check`."""
        with self._locked.changed:
            self._locked.wait(
                lambda: self._shell.over or self.is_early or self._shell.machine.rewound,
                lambda: "the coordinator to say with which step the job ends",
            )
            if self._shell.machine.rewound:
                raise Rewound

    def wait_for_others(self) -> None:
        """Wait while this worker would have to compute, and cannot: its script has left the loop."""
        with self._locked.changed:
            step = self._shell.machine.step
            self._locked.wait(
                lambda: self._shell.over or not self._has_to_compute() or self._shell.machine.step != step,
                lambda: f"step {step}: others compute what is left of it, because the script has left its loop here",
            )

    def given_up(self, reason: str) -> GiveUp:
        """What the coordinator is told when this worker cannot go on: all of it as it is at one moment.

        The version is the model's: that of a forward pass which began early is not made yet of what was sent.
        """
        with self._locked.changed:
            machine = self._shell.machine
            return GiveUp(reason, max(0, machine.step), self.generation, sent_of(machine))

    def wait_until_applied(self) -> None:
        """The script has failed: keep the links until what this worker has sent is in a version, or the job is over.

        The step whose gradients are on their way can be its last whole one.
        """
        shell = self._shell
        with suppress(RallypointError), self._locked.changed:
            self._locked.wait(
                lambda: shell.over or not unapplied(shell.machine),
                lambda: f"version {shell.machine.step + 1} to be made of the gradients that it has sent",
            )


class SaysReached:
    """Says which version this worker holds, when a view asks for it: `core.worker.ending.Reaching`.

    `to` is called with the generation and the version, on any thread.
    """

    def __init__(self, locked: LockedShell) -> None:
        self._locked = locked
        self.to: Callable[[ViewNumber, int], None] = lambda generation, version: None

    def say(self, *, again: bool = False) -> None:
        """Say it if there is something to say; `again`: also if it was said already. Takes the lock."""
        with self._locked.changed:
            if again:
                self._locked.shell.reaching.again()
            said = self._locked.shell.reaching.take()
        if said is not None:
            self.to(*said)


# ---- One worker's data plane ----


class Exchange:
    """One worker's data plane in one job: takes the coordinator's messages, tells the main thread what to do.

    Attributes:
        buffer: the exchange buffer, 1-D fp32; empty where parameters are streamed.
        memory: where the slots' bytes are.
        in_place: the model's shards that a server of this process steps where they lie; mostly none.
        streamed: parameters stay on the servers.
        prefetch_bytes: bytes of streamed parameters to ask for ahead.
        replica: the replica that is being computed.
        forward: the version that a forward pass reads while it arrives.
        rows: pulls of rows of tables.
        leased: the version that this worker is to evaluate.
        words: pulls of streamed parameters.
        end: the job's end.
        own_loop: for a script's own loop, which has no replicas and no steps.
        arrivals: the receiver that the links call with what arrives.
        cores: taken while the script computes, if a server shares its cores.
        updates: the newest update in what was installed last: 0 if that is the first weights.
        viewed: is called with each view, on the thread of the coordinator's link.
        reaching: says which version this worker holds, if a view asks for it.
        gone: told to leave, it does so: no replica was assigned to it. A view that comes later changes nothing.
        had_version: the model has held a version; also while a roll-back has made that stale.
    """

    def __init__(
        self, layout: Layout, config: JobConfig, context: ExchangeContext, *, pinned: bool = False, early: bool = True,
        in_place: InPlace | None = None, narrow: bool = False, encoder: Encoder | None = None,
    ) -> None:  # fmt: skip
        """`pinned`: the buffer is for a GPU. `early`: a forward pass may begin before all of its version is here.
        `narrow`: slots may hold bf16, as it travels. `encoder`: another one than the settings say."""
        self.layout, self.me = layout, context.me
        self.in_place = in_place or InPlace()
        words = 0 if config.streamed else layout.words
        narrow = narrow and travels_as_bf16(config, layout)
        self.buffer = pinned_words(words) if pinned and not narrow else words_of_memory(words)
        self.streamed, self.prefetch_bytes = config.streamed, config.memory.prefetch_bytes
        scarce = ShardMemory(layout, config.memory.prefetch_bytes, pinned=pinned) if config.streamed else None
        self.memory: SlotMemory = scarce or WholeVector(layout, self.buffer)
        if self.in_place.parameters:
            self.memory = InPlaceMemory(layout, self.buffer, self.in_place)
        if narrow:
            halves = pinned_words(-(-words // 2)).view(torch.bfloat16)
            self.memory = NarrowVector(layout, self.buffer, halves[:words])
        formats = ShardCodecStates(config)
        plan = worker_plan(config, layout, formats.among(layout), early=early, in_place=bool(self.in_place.parameters))
        self._shell = shell = shell_for(context.me, plan)
        observed(shell.machine, context.me)
        if shell.states.kept:
            observed(shell.states, f"{context.me}-codec-states")
        self._locked = locked = LockedShell(
            shell, context.say, scarce, context.cores, changed=context.changed(), clock=context.clock
        )  # fmt: skip
        self.cores = locked.cores
        self._adopting = threading.Lock()
        self.viewed: Callable[[View], None] = lambda view: None
        self.updates = 0
        self._closed = False  # guarded by `_adopting`
        self.gone = False
        self._evaluating = self.had_version = False
        self._encoder = encoder or Encoder(layout, config, narrow=narrow)
        self._links = Links(context, config, lambda: shell.number)
        self._pushes = Pushes(
            layout, self.memory, self._encoder, self._links, sent=locked.sent, queued=shell.machine.slots.is_queued,
            lock=locked.changed, examines=config.nonfinite != "continue",
        )  # fmt: skip
        self.codec_states = CodecStates(locked, self._encoder, formats, self._links) if shell.states.kept else None
        locked.effects = LinkEffects(shell, self._links, self._pushes, self.codec_states)
        of_workers = config.mode.holder is StateHolder.WORKERS
        self._optimizer = ReplicatedState(config) if of_workers else ServerState()
        self.replica = ReplicaPushes(
            layout, locked, self._pushes, self._links, Contributions(layout, config.audit.fingerprints)
        )
        self.forward = ForwardVersion(layout, locked, self._pushes, self._links, self._where_missing)
        self.rows = RowPulls(locked, self._links)
        self.leased = LeasedPull(layout, locked, self.rows)
        self.words = WordPulls(locked, self._links, pinned=pinned)
        self.end, self.reaching, self.own_loop = JobEnd(locked), SaysReached(locked), OwnLoop(locked, self._links)
        self.arrivals = Arrivals(
            layout, config, locked, self.memory, self._encoder, self.codec_states, self._optimizer,
            (self.rows, self.words),
        )  # fmt: skip

    # ---- messages of the coordinator, on its link's thread ----

    def adopt(self, view: View) -> None:
        """Install a new view. Returns after the links that the view ends have ended."""
        with self._adopting:
            if self._closed:
                return
            with self._locked.changed:
                ended = self._shell.links_to_end(view)
            if ended is None:
                return  # a newer view was installed first
            self._links.end(ended)
            with self._locked.changed:
                if self.gone:
                    return
                before = self._shell.machine.view
                effects = self._locked.settle(self._shell.adopt(view, ended))
                rolled_back = before is not None and before.generation != view.generation
                if rolled_back:
                    self._optimizer.rolled_back()
                step = self._shell.machine.reads  # of a forward pass that began early, the next one
                new = self._shell.links.to_open(view)
                self._locked.changed.notify_all()
            if before is not None:
                self._links.overdraw(step, rolled_back=rolled_back)  # who computes what may have changed in mid-step
            self._locked.effects.run(effects)
            self._links.open(new, self.arrivals, view)
            self.viewed(view)
        self.reaching.say()

    def assist(self, step: int, replica: int) -> None:
        """Add one more replica for this worker, as the coordinator asks (a backup task)."""
        self._links.overdraw(step)
        self._locked.handle(machine.Assisted(step, replica))

    def capture(self, snapshot: machine.Store) -> None:
        """Ask the machine to store this worker's part of a snapshot."""
        self._locked.set(lambda: self._shell.snapshots.wanted(snapshot))

    def finish(self) -> None:
        """The job is over: end every wait."""
        self._locked.set(self._shell.finish)

    def leave(self) -> None:
        """Ask this worker to leave. It leaves when no replica is assigned to it any more."""
        self._locked.set(lambda: setattr(self._shell, "leaving", True))

    def fail(self, error: BaseException) -> None:
        """Raise this error in every thread that waits here, now or later."""
        self._locked.fail(error)

    def close(self) -> None:
        """End every link. Views that come later are ignored: the coordinator's link ends last."""
        with self._adopting:
            self._closed = True
            self._links.close()

    # ---- the state of this worker ----

    @property
    def view(self) -> View:
        """The view in force. Valid only after the first view has arrived."""
        return self._shell.view

    @property
    def step(self) -> int:
        """The version that the model holds, or that a forward pass is installing; -1 before the first."""
        return self._shell.machine.reads

    @property
    def holds(self) -> int:
        """Where workers step the optimizer: the model's version, also when a new generation has made it stale."""
        return self._shell.holds

    @holds.setter
    def holds(self, version: int) -> None:
        self._shell.holds = version

    @property
    def upcoming(self) -> tuple[int, int] | None:
        """The (step, replica) that is computed first after the next install, if known; None when the job is over."""
        with self._locked.changed:
            return None if self._shell.over else self._shell.machine.upcoming

    @property
    def idle(self) -> bool:
        """True while there is nothing to do."""
        with self._locked.changed:
            return self._shell.machine.next_action() is None

    def beat(self) -> Beat:
        """What the next heartbeat says of this worker. Any thread may call it."""
        self._locked.activity += self._evaluating or self.own_loop.busy
        waited = self._locked.progress.waited(self._locked.clock())
        return Beat(self._links.unreachable(), waited, self._locked.activity, self._evaluating)

    # ---- the main thread ----

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In the body the script evaluates: that may take as long as it likes, and the main thread counts as active."""
        self._evaluating = True
        try:
            yield
        finally:
            self._evaluating = False

    def next_action(self) -> machine.Next | None:
        """Wait until there is something to do and return it.

        Returns None when the job is over, or this worker is to leave.
        """
        shell, locked = self._shell, self._locked
        with locked.changed:
            while True:
                locked.settle(shell.prepare())
                locked.wait(
                    lambda: shell.over or shell.next_action() is not None or shell.may_prepare, self._where_missing
                )
                if shell.over or shell.next_action() is not None:
                    break
            if shell.over:
                self.gone = shell.gone
                return None
            action = shell.choose()
            locked.progress.given(action, ends_round=isinstance(action, machine.Install))
            return action

    def check(self, *, stale: bool = True) -> None:
        """Raise the error of whatever has failed; with `stale`, raise Rewound if what is being computed is stale."""
        self._locked.check(stale=stale)

    def initialise(self, words: Words, state: States | None = None) -> None:
        """Upload what all workers start from (see `push_initial`); with `state`, as the version that it `holds`.

        The values are not read from the buffer: an upload may be repeated while versions already land there.
        """
        with self._locked.changed:
            generation = self._shell.begin_upload()
        if generation is None:
            return  # a newer view came first: another worker uploads, or some servers are not linked yet

        def view() -> View | None:
            now = self.view  # read it once: the next view may come at any time
            return now if now.generation == generation else None  # in a new generation another worker may upload

        push_initial(self.layout, self._links, view, self.check, max(0, self.holds), words, state)

    def begin_install(self, version: int) -> torch.Tensor | None:
        """Return the vector with the version's parameters in it (see `installing`): the buffer, or one in bf16. Nothing
        writes to it, or to the buffer, until `installed`.

        Returns None if the version has become stale, or if another one is to be installed: the job may have moved on.
        """
        with self._locked.changed:
            if not self._shell.machine.take(machine.Install(version)):
                return None
            self._optimizer.begin_install()
            self.updates = max(self._shell.machine.landed, default=version)
        return self.memory.whole() if isinstance(self.memory, NarrowVector) else self.buffer

    def exactly(self, version: int) -> torch.Tensor | None:
        """Pull a version as servers have it: a flat fp32 vector. None if a roll-back comes, or the job is over. For the
        last one, where a script has ended the job: what was published before that was known came as `down` rounds it.
        """
        generation, shards = self.end.generation, [shard for shard in self.layout.shards if shard.role != "rows"]
        pull = self.rows.whole(version, shards, lambda: self.end.generation == generation and not self._shell.over)
        return None if pull is None or pull.outdated else pull.vector(self.layout)

    @property
    def installing(self) -> list[Shard] | None:
        """The shards to install; None for all of them. The rest of the buffer is undefined."""
        changed = self._shell.machine.changed
        return None if len(changed) == len(self.layout.shards) else [self.layout.shards[index] for index in changed]

    def take_states(self) -> tuple[Records, bool]:
        """Return what is being installed (AllReduce).

        That is the shards' records, if all workers start from them, and whether the step is skipped.
        """
        return self._optimizer.take()

    def installed(self, version: int) -> ViewNumber | None:
        """Report that the model holds the version that was to be installed. This frees the slots.

        Returns the generation in which that became true (I10); None if a roll-back has made the version stale.
        """
        self.had_version = True
        with self._locked.changed:
            others = self._locked.settle(self._shell.installed())
            generation = self._shell.view.generation if self._shell.machine.step == version else None
            self._locked.changed.notify_all()
        self._locked.effects.run(others)
        self._links.installed(version)
        self.reaching.say()
        return generation

    def _where_missing(self) -> str:
        """What the main thread waits for, as a phrase; "" while this worker has nothing assigned."""
        at, view = self._shell.machine, self._shell.machine.view
        if view is None:
            return "the first view"
        if self._shell.leased.holds_back(view, at.next_action()):
            return self._shell.leased.awaited(view)
        if at.step >= at.steps:
            return "the other workers to finish"
        if not at.takes_part:
            return ""
        for replica, shards in self._shell.states.missing.items():
            return f"the codec states of replica {replica}: {self._links.describe(shards, view.primary)}"
        what = self._optimizer.where_missing(view, at.step) or f"version {at.step + 1}"
        return f"{what}: {self._links.describe(at.missing, view.primary)}"
