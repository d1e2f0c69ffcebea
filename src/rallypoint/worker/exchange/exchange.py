"""Push a delta, receive parameters: one worker's exchange buffer, and what moves between it and the servers.

The exchange buffer is one vector as long as the model. Each shard has a slot in it. The slot first holds the gradient
that is pushed, then the new parameters that arrive (see `core/worker/slots.py`). Synchronisation takes no other memory
of a worker, except for the gradients that autograd holds for a moment.

Files: the shell under its lock, and the order of all locks (`locked.py`); links (`links.py`, `link.py`); what leaves
(`replica.py`, `pushes.py`, `encoder.py`); what arrives (`arrivals.py`); pulls of rows (`rows/`); codec states
(`codec_states.py`); the optimizer's state where workers hold it (`replicated.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rallypoint.codec.state import ShardCodecStates
from rallypoint.config import JobConfig
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.protocol import Beat
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.factory import shell_for
from rallypoint.observe.observed import observed
from rallypoint.worker.exchange.arrivals import Arrivals
from rallypoint.worker.exchange.effects import CodecStates, LinkEffects
from rallypoint.worker.exchange.encoder import Encoder
from rallypoint.worker.exchange.ending import JobEnd, Reaching
from rallypoint.worker.exchange.forward import ForwardVersion
from rallypoint.worker.exchange.initial import States, Words, push_initial
from rallypoint.worker.exchange.links import Context, Links
from rallypoint.worker.exchange.locked import LockedShell
from rallypoint.worker.exchange.locked import Rewound as Rewound  # what `check` raises
from rallypoint.worker.exchange.own_loop import OwnLoop
from rallypoint.worker.exchange.plan import worker_plan
from rallypoint.worker.exchange.pushes import Pushes
from rallypoint.worker.exchange.replica import Contributions, ReplicaPushes
from rallypoint.worker.exchange.replicated import States as Records
from rallypoint.worker.exchange.replicated import optimizer_state
from rallypoint.worker.exchange.rows import LeasedPull, RowPulls
from rallypoint.worker.streamed.memory import ShardMemory, SlotMemory, WholeVector
from rallypoint.worker.streamed.pulls import WordPulls


class Exchange:
    """One worker's data plane in one job: takes the coordinator's messages, tells the main thread what to do.

    Attributes:
        buffer: the exchange buffer, 1-D fp32; empty where parameters are streamed.
        memory: where the slots' bytes are.
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
        updates: the newest update in what was installed last: 0 if that is the first weights.
        viewed: is called with each view, on the thread of the coordinator's link.
        reaching: says which version this worker holds, if a view asks for it.
        had_version: the model has held a version; also while a roll-back has made that stale.
    """

    def __init__(
        self, layout: Layout, config: JobConfig, context: Context, *, pinned: bool = False, early: bool = True
    ) -> None:
        """`pinned`: the buffer is for a GPU. `early`: a forward pass may begin before all of its version is here."""
        self.layout, self.me = layout, context.me
        words = 0 if config.streamed else layout.words
        self.buffer = torch.empty(words, dtype=torch.float32, device="cpu", pin_memory=pinned)
        self.streamed, self.prefetch_bytes = config.streamed, config.prefetch_bytes
        self.memory: SlotMemory = (
            ShardMemory(layout, config.prefetch_bytes, pinned=pinned) if config.streamed
            else WholeVector(layout, self.buffer)
        )  # fmt: skip
        formats = ShardCodecStates(config)
        self._shell = shell = shell_for(context.me, worker_plan(config, layout, formats.among(layout), early=early))
        observed(shell.machine, context.me)
        if shell.states.kept:
            observed(shell.states, f"{context.me}-codec-states")
        self._locked = locked = LockedShell(shell, context.say)
        self._adopting = threading.Lock()
        self.viewed: Callable[[View], None] = lambda view: None
        self.updates = 0
        self._closed = False  # guarded by `_adopting`
        self._evaluating = self.had_version = False
        self._encoder = Encoder(layout, config)
        self._links = Links(context, config, lambda: shell.number)

        def sent(shard: int, serial: int) -> None:
            locked.sent(shard, serial, lambda: self.memory.free(shell.machine.slots))

        self._pushes = Pushes(
            layout, self.memory, self._encoder, self._links, sent=sent, queued=shell.machine.slots.is_queued,
            lock=locked.changed, examines=config.nonfinite != "continue",
        )  # fmt: skip
        codec_states = CodecStates(shell, self._encoder, formats, self._links) if shell.states.kept else None
        locked.effects = LinkEffects(shell, self._links, self._pushes, codec_states)
        self._optimizer = optimizer_state(config)
        self.replica = ReplicaPushes(
            layout, locked, self._pushes, self._links, self.memory, Contributions(layout, config.fingerprints)
        )
        self.forward = ForwardVersion(layout, locked, self._pushes, self._links, self._where_missing)
        self.rows = RowPulls(locked, self._links)
        self.leased = LeasedPull(layout, locked, self.rows)
        self.words = WordPulls(locked, self._links, pinned=pinned)
        self.end, self.reaching, self.own_loop = JobEnd(locked), Reaching(locked), OwnLoop(locked, self._links)
        self.arrivals = Arrivals(
            layout, config, locked, self._pushes, self._encoder, codec_states, self._optimizer,
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

    def capture(self, snapshot: machine.Store) -> int:
        """Ask the machine to store this worker's part of a snapshot.

        Returns -1, or the version here if it is too late.
        """
        with self._locked.changed:
            passed = self._shell.snapshots.wanted(snapshot)
            self._locked.changed.notify_all()
            return passed

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

    @property
    def gone(self) -> bool:
        """True when this worker was told to leave and no replica is assigned to it any more."""
        return self._shell.gone

    def beat(self) -> Beat:
        """What the next heartbeat says of this worker. Any thread may call it."""
        self._locked.activity += self._evaluating or self.own_loop.busy
        waited = self._locked.progress.waited(time.monotonic())
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
        """Return the buffer with the version in it (see `installing`). Nothing writes to it until `installed`.

        Returns None if the version has become stale, or if another one is to be installed: the job may have moved on.
        """
        with self._locked.changed:
            if not self._shell.machine.take(machine.Install(version)):
                return None
            self._optimizer.begin_install()
            self.updates = max(self._shell.machine.landed, default=version)
        return self.buffer

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
