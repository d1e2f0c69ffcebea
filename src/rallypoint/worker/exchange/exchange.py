"""Push a delta, receive parameters: one worker's exchange buffer, and what moves between it and the servers.

The exchange buffer is one vector as long as the model; each shard's slot in it carries a gradient up and then the new
parameters down (see `core/worker/slots.py`). With the gradients that autograd holds for a moment, it is all that
synchronisation takes of a worker's memory.

Each noun has its own file: the shell under its lock (`locked.py`, with the order of all locks), links (`links.py`,
`link.py`), what leaves (`replica.py`, `pushes.py`, `encoder.py`), what arrives (`arrivals.py`), pulls of rows
(`row_pulls.py`), codec states (`codec_states.py`), and the optimizer's state where workers have it (`replicated.py`).
"""

from __future__ import annotations

import threading

import torch

from rallypoint.codec.state import ShardCodecStates
from rallypoint.config import JobConfig
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.factory import shell_for
from rallypoint.observe.observed import observed
from rallypoint.worker.exchange.arrivals import Arrivals
from rallypoint.worker.exchange.codec_states import CodecStates
from rallypoint.worker.exchange.effects import LinkEffects
from rallypoint.worker.exchange.encoder import Encoder
from rallypoint.worker.exchange.initial import States, Words, push_initial
from rallypoint.worker.exchange.links import Context, Links
from rallypoint.worker.exchange.locked import LockedShell
from rallypoint.worker.exchange.locked import Rewound as Rewound  # what `check` raises
from rallypoint.worker.exchange.plan import worker_plan
from rallypoint.worker.exchange.pushes import Pushes
from rallypoint.worker.exchange.replica import ReplicaPushes
from rallypoint.worker.exchange.replicated import States as Records
from rallypoint.worker.exchange.replicated import optimizer_state
from rallypoint.worker.exchange.row_pulls import RowPulls


class Exchange:
    """One worker's data plane in one job: what the coordinator says goes in, what the main thread is to do comes out.

    Attributes:
        buffer: the exchange buffer, 1-D fp32.
        replica: the replica that is being computed.
        rows: pulls of rows of tables.
        arrivals: what the links call with what comes.
    """

    def __init__(self, layout: Layout, config: JobConfig, context: Context, *, pinned: bool = False) -> None:
        self.layout, self.me = layout, context.me
        self.buffer = torch.empty(layout.words, dtype=torch.float32, pin_memory=pinned)
        formats = ShardCodecStates(config)
        self._shell = shell = shell_for(context.me, worker_plan(config, layout, formats.among(layout)))
        observed(shell.machine, context.me)
        if shell.states.kept:
            observed(shell.states, f"{context.me}-codec-states")
        self._locked = locked = LockedShell(shell, context.say)
        self._adopting = threading.Lock()
        self._encoder = Encoder(layout, config)
        self._links = Links(context, config, lambda: shell.number)
        self._pushes = Pushes(
            layout, self.buffer, self._encoder, self._links, sent=locked.sent, queued=shell.machine.slots.is_queued,
            lock=locked.changed,
        )  # fmt: skip
        codec_states = CodecStates(shell, self._encoder, formats, self._links) if shell.states.kept else None
        locked.effects = LinkEffects(shell, self._links, self._pushes, codec_states)
        self._optimizer = optimizer_state(config)
        self.replica = ReplicaPushes(layout, locked, self._pushes, self._links)
        self.rows = RowPulls(locked, self._links)
        self.arrivals = Arrivals(
            layout, config.replicas, locked, self._pushes, self._encoder, codec_states, self._optimizer, self.rows
        )

    # ---- the coordinator's words, on its link's thread ----

    def adopt(self, view: View) -> None:
        """A new view has come. Returns once the links that it ends have ended."""
        with self._adopting:
            with self._locked.changed:
                ended = self._shell.links_to_end(view)
            if ended is None:
                return  # a newer one was quicker
            self._links.end(ended)
            with self._locked.changed:
                before = self._shell.machine.view
                effects = self._locked.settle(self._shell.adopt(view, ended))
                if before is not None and before.generation != view.generation:
                    self._optimizer.rolled_back()
                new = self._shell.links.to_open(view)
                self._locked.changed.notify_all()
            self._locked.effects.run(effects)
            self._links.open(new, self.arrivals, of=len(view.servers))

    def assist(self, step: int, replica: int) -> None:
        """The coordinator asks for one more replica."""
        self._locked.handle(machine.Assisted(step, replica))

    def capture(self, snapshot: machine.Store) -> int:
        """The coordinator asks for this worker's part of a snapshot; if that is too late, the version that is here,
        else -1."""
        with self._locked.changed:
            passed = self._shell.snapshots.wanted(snapshot)
            self._locked.changed.notify_all()
            return passed

    def finish(self) -> None:
        """The job is over: nobody waits for anything any more."""
        self._locked.set(lambda: setattr(self._shell, "finished", True))

    def leave(self) -> None:
        """This worker was told to go: it does once no replica is assigned to it."""
        self._locked.set(lambda: setattr(self._shell, "leaving", True))

    def fail(self, error: BaseException) -> None:
        """Whoever waits here, now or later, gets this error."""
        self._locked.fail(error)

    def close(self) -> None:
        """End every link."""
        with self._adopting:
            self._links.close()

    # ---- where things are ----

    @property
    def view(self) -> View:
        """The view in force; only after the first has come."""
        return self._shell.view

    @property
    def step(self) -> int:
        """The version that the model holds; -1 before the first."""
        return self._shell.machine.step

    @property
    def holds(self) -> int:
        """Where workers step the optimizer: the version of the model, also in a generation in which it is stale."""
        return self._shell.holds

    @holds.setter
    def holds(self, version: int) -> None:
        self._shell.holds = version

    @property
    def upcoming(self) -> tuple[int, int] | None:
        """The step and replica that will be computed first after the next install, as far as is known."""
        with self._locked.changed:
            return self._shell.machine.upcoming

    @property
    def idle(self) -> bool:
        """Is there nothing to do at this moment?"""
        with self._locked.changed:
            return self._shell.machine.next_action() is None

    @property
    def gone(self) -> bool:
        """Has this worker handed back everything, as it was told?"""
        return self._shell.gone

    # ---- the main thread ----

    def next_action(self) -> machine.Action | machine.Store | None:
        """What to do now; waits until there is something. None when the job is over, or this worker is to go."""
        shell, locked = self._shell, self._locked
        with locked.changed:
            while True:
                locked.settle(shell.prepare())
                locked.wait(
                    lambda: shell.over or shell.next_action() is not None or shell.may_prepare, self._where_missing
                )
                if shell.over or shell.next_action() is not None:
                    break
            return None if shell.over else shell.choose()

    def check(self) -> None:
        """Raise Rewound when what is being computed is stale, or the error of whatever has failed."""
        self._locked.check()

    def initialise(self, words: Words, state: States | None = None) -> None:
        """Push what all start from (see `push_initial`); with `state` as the version that this worker `holds`.

        Not out of the buffer: this may have to be done again while versions land there already.
        """
        with self._locked.changed:
            generation = self._shell.begin_upload()
        if generation is None:
            return  # a view was quicker: another worker uploads it, or not all servers are linked to yet

        def view() -> View | None:
            now = self.view  # once: the next one may come at any time
            return now if now.generation == generation else None  # then perhaps another worker uploads

        push_initial(self.layout, self._links, view, self.check, max(0, self.holds), words, state)

    def begin_install(self, version: int) -> torch.Tensor | None:
        """The version in the buffer (see `installing`), which nobody writes until `installed`.

        None if meanwhile it has become stale, or another one is to be installed: all others may have gone on.
        """
        with self._locked.changed:
            if not self._shell.machine.take(machine.Install(version)):
                return None
            self._optimizer.begin_install()
        return self.buffer

    @property
    def installing(self) -> list[Shard] | None:
        """The shards that are to be installed; None when it is all of them. The rest of the buffer is garbage."""
        changed = self._shell.machine.changed
        return None if len(changed) == len(self.layout.shards) else [self.layout.shards[index] for index in changed]

    def take_states(self) -> tuple[Records, bool]:
        """What is being installed, where workers step the optimizer: the shards' states, if all start from them, and
        whether the step is skipped."""
        return self._optimizer.take()

    def installed(self, version: int) -> ViewNumber | None:
        """The model holds the version that was to be installed; the slots are free.

        Returns the generation in which that became true (I10); None if a roll-back has made the version stale.
        """
        with self._locked.changed:
            others = self._locked.settle(self._shell.installed())
            generation = self._shell.view.generation if self._shell.machine.step == version else None
            self._locked.changed.notify_all()
        self._locked.effects.run(others)
        return generation

    def _where_missing(self) -> str:
        """What the main thread waits for, as a phrase; "" while this worker only stands by."""
        at, view = self._shell.machine, self._shell.machine.view
        if view is None:
            return "the first view"
        if at.step >= at.steps:
            return "the other workers to finish"
        if not at.takes_part:
            return ""
        for replica, shards in self._shell.states.missing.items():
            return f"the codec states of replica {replica}: {self._links.describe(shards, view.primary)}"
        what = self._optimizer.where_missing(view, at.step) or f"version {at.step + 1}"
        return f"{what}: {self._links.describe(at.missing, view.primary)}"
