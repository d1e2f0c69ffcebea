"""Push a delta, receive parameters: the worker's machine with its exchange buffer and its links to all servers.

The exchange buffer is one vector as long as the model; each shard's slot in it carries a gradient up and then the new
parameters down (see `core/worker/aligned.py`). With the gradients that autograd holds for a moment, it is all that
synchronisation takes of a worker's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from rallypoint.config import JobConfig, cadence_of
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.handover import Paths
from rallypoint.core.worker.streaming import StreamMachine
from rallypoint.errors import JobAborted, ProtocolError, RallypointError
from rallypoint.net.frames import LATEST, NEWEST, SKIP, Header, Kind
from rallypoint.observe.observed import observed
from rallypoint.observe.waits import wait_until
from rallypoint.store.record import ShardRecord
from rallypoint.store.state import read_state
from rallypoint.worker.exchange.codec_states import codec_states_of
from rallypoint.worker.exchange.encoder import Encoder
from rallypoint.worker.exchange.initial import States, Words, push_initial
from rallypoint.worker.exchange.links import Context, Links
from rallypoint.worker.exchange.pull import Pull
from rallypoint.worker.exchange.pushes import Pushes


class Rewound(BaseException):
    """The micro-batch in progress belongs to a past that is void; ``with micro:`` ends here, the loop yields another.

    Not an Exception: no handler of the user's code shall take it for a fault.
    """


class Exchange:
    """One worker's data plane in one job.

    The main thread fills slots and waits for versions; each link's thread lands versions; the coordinator's link brings
    views. One lock guards the machine; tensors are touched outside it, by the slot's current owner only.
    """

    def __init__(self, layout: Layout, config: JobConfig, context: Context, *, pinned: bool = False) -> None:
        self.layout, self.me = layout, context.me
        self.buffer = torch.empty(layout.words, dtype=torch.float32, pin_memory=pinned)
        self._context, self._steps = context, config.rounds
        self._encoder = Encoder(layout, config)
        self._machine = observed(_machine_for(context.me, layout, config), context.me)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._finished = False
        self._claiming = False
        self._computing = False
        self._leaving = False
        self._new_generation = False  # there was a roll-back, and the encoder has not heard of it
        self._links = Links(context, config, self, lambda: self._number)
        self._pushes = Pushes(
            layout, self.buffer, self._encoder, self._links, sent=self._sent, queued=self._machine.is_queued,
            lock=self._changed,
        )  # fmt: skip
        self._pull: Pull | None = None
        self._pulls = 0
        self._streaming = config.streaming
        self._config = config
        self.holds = -1  # where workers are stateful: the version that is here, also while all begin again
        self._states: dict[int, ShardRecord] = {}  # of the version that all begin with, as they land
        self._taken: tuple[dict[int, ShardRecord], bool] = ({}, False)  # those, and what is skipped, of an install
        self._skipped: set[int] = set()  # shards whose landed version says that its step is skipped
        self._to_store: machine.Store | None = None
        self._adopting = threading.Lock()  # one view after the other
        self._codec_states = codec_states_of(layout, config, self._encoder, self._send_state)
        self._capture = -1  # the version of the last snapshot that was asked for
        self._about: int | None = None  # the replica that is being computed, or will be at once

    # ---- the coordinator's words ----

    def adopt(self, view: View) -> None:
        """A new view has come."""
        with self._adopting:
            before = self._machine.view
            if before is not None and view.number <= before.number:
                return  # a newer one was quicker
            # Before the machine hears of the view: nothing is received any more that belongs to a past that is void,
            # or to a home that the shard has left.
            ended = self._links.end_but(view, before, stale=before is not None and before.generation != view.generation)
            with self._changed:
                effects = [effect for server in ended for effect in self._lost(server)]
                effects += self._machine.handle(machine.Viewed(view))
                if before is not None and before.generation != view.generation:
                    self._states.clear()
                self._move_codec_states(before, view)
                self._changed.notify_all()
            self._run(effects)
            self._links.open(view)

    def assist(self, step: int, replica: int) -> None:
        """The coordinator asks for one more replica."""
        self._handle(machine.Assisted(step, replica))

    def store(self, wanted: machine.Store) -> None:
        """The coordinator asks for a share of a snapshot."""
        with self._changed:
            self._to_store = wanted
            self._changed.notify_all()

    def finish(self) -> None:
        """The job is over: nobody waits for anything any more."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def leave(self) -> None:
        """This worker was told to go: it does once nothing is dealt to it."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Whoever waits here, now or later, gets this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """End every link."""
        with self._adopting:
            self._links.close()

    # ---- the main thread ----

    @property
    def view(self) -> View:
        """The view in force; only after the first has come."""
        assert self._machine.view is not None
        return self._machine.view

    @property
    def step(self) -> int:
        """The version that the model holds; -1 before the first."""
        return self._machine.step

    @property
    def following(self) -> bool:
        """Does this worker take part at all now (or stand by)?"""
        return self._machine.following

    @property
    def upcoming(self) -> tuple[int, int] | None:
        """The step and replica that will be computed first after the next install, as far as is known."""
        with self._changed:
            return self._machine.upcoming

    def contributes_buffers(self, replica: int) -> bool:
        """Does this replica contribute to the buffers' shards?"""
        return all(self._machine.contributes(s.index, replica) for s in self.layout.shards if s.role == "buffers")

    @property
    def idle(self) -> bool:
        """Is there nothing to do at this moment?"""
        with self._changed:
            return self._machine.next_action() is None

    def next_action(self) -> machine.Action | machine.Store | None:
        """What to do now; waits until there is something. None when the job is over, or this worker is to go."""
        with self._changed:
            self._wait(lambda: self._over() or self._to_do() is not None, self._where_missing)
            action = None if self._over() else self._to_do()
            if action is self._to_store:
                self._to_store = None
            self._about = action.replica if isinstance(action, machine.Compute) else None
            return action

    def _to_do(self) -> machine.Action | machine.Store | None:
        if self._to_store is not None and self.holds >= self._to_store.version:
            return self._to_store
        return self._possible()

    def _possible(self) -> machine.Action | None:
        """What the machine wants done, once all is here that it takes."""
        action = self._machine.next_action()
        if self._codec_states is None or not isinstance(action, machine.Compute):
            return action
        if self._new_generation:
            self._new_generation = False
            self._encoder.reset()
        if action.replica not in self._machine.assigned:
            return action  # a turn in hand that was dealt to somebody else: who may have what there is by now
        return action if self._codec_states.ready(action.replica, self._paths) else None

    @property
    def gone(self) -> bool:
        """Has this worker handed back everything, as it was told?"""
        uploads = self._config.stateful_workers and self._machine.uploads  # perhaps nobody else could
        settled = self._codec_states is None or self._codec_states.settled
        gone = self._machine.view is not None and not self._machine.takes_part
        return self._leaving and gone and settled and not uploads

    def _over(self) -> bool:
        return self._finished or self.gone

    def initialise(self, words: Words, state: States | None = None) -> None:
        """Push what all begin with (see `push_initial`); with `state` as the version that this worker `holds`.

        Not out of the buffer: this may have to be done again while versions land there already.
        """
        with self._changed:
            if not self._machine.take(machine.Initialise()):
                return  # a view was quicker: it is not ours to bring any more, or not all servers are linked yet
            generation = self.view.generation
        version = max(0, self.holds)
        push_initial(self.layout, self._links, lambda: self._view_of(generation), self.check, version, words, state)

    def _view_of(self, generation: ViewNumber) -> View | None:
        return self.view if self.view.generation == generation else None  # another beginning, perhaps somebody else's

    def begin_replica(self, step: int, replica: int) -> ViewNumber | None:
        """Begin to compute this replica: the view with which the past began that it belongs to.

        None if meanwhile it is not to be computed any more, or not at once.
        """
        with self._changed:
            if not self._machine.take(machine.Compute(step, replica)):
                return None
            self._computing = True
            stale, self._new_generation = self._new_generation, False
            generation = self.view.generation
        if stale:
            self._encoder.reset()
        return generation

    def begin_push(self, weight: float, finite: bool) -> None:
        """What the contributions from now on weigh, and whether their loss was finite."""
        self._pushes.begin(weight, finite)

    @property
    def rewound(self) -> bool:
        """Is what is being computed void?"""
        return self._machine.rewound

    def check(self) -> None:
        """Rewound when what is being computed is void; the error of whatever has failed."""
        if self._computing and self._machine.rewound:
            raise Rewound
        if self._failure is not None:
            raise self._failure

    def claim(self, shard: int) -> bool:
        """May the main thread write this slot (it waits until the gradient before has left)? Or need it not be?"""
        with self._changed:
            self._claiming = True
            self._wait(
                lambda: self._machine.rewound or self._machine.may_fill(shard) is not False,
                lambda: f"room in shard {shard}: {self._by_server(self._machine.unsent)}",
            )
            self._claiming = False
            if self._machine.rewound:
                raise Rewound
            may = bool(self._machine.may_fill(shard))
            if may:
                self._machine.fill(shard)
        return may

    def filled(self, shard: int) -> None:
        """The slot holds the whole gradient of the replica in progress: push it."""
        self._handle(machine.Filled(shard))

    def filled_rows(self, shard: int, gradient: memoryview) -> None:
        """The same of a table's part, whose gradient (`codec/rows.py`) needs no slot."""
        self._pushes.set_rows(shard, gradient)
        self._handle(machine.Filled(shard))

    def pull(self, wanted: Mapping[int, tuple[memoryview, int]]) -> dict[int, bytearray]:
        """Rows of tables as they are at the step in progress: for each shard the payload of row numbers, and how many
        bytes the answer has; the answers.

        While nothing is computed (an evaluation) a newer version will do, and in a streaming job it is the newest.
        Rewound when what is being computed is void, or that step is long over.
        """
        self._pulls += 1
        newest = self._streaming or not self._computing
        pull = Pull(self._pulls, LATEST if self._streaming else max(0, self._machine.step), newest, wanted)
        self._pull = pull
        try:
            with self._changed:
                while not pull.over:
                    self.check()
                    for shard in self._unasked(pull):
                        self._ask_rows(pull, shard)
                    self._wait(
                        lambda: pull.over or (self._computing and self._machine.rewound) or bool(self._unasked(pull)),
                        lambda: f"rows of tables, step {self._machine.step}: {self._by_server(pull.missing)}",
                    )
        finally:
            self._pull = None
        if pull.outdated:
            raise Rewound
        return pull.got

    def _unasked(self, pull: Pull) -> list[int]:
        return list(pull.unasked(self._number, self.view.primary, self._links.connections))

    def _ask_rows(self, pull: Pull, shard: int) -> None:
        home = self.view.primary[shard]
        pull.ask(shard, self._number, home, self._links.connections[home])
        payload = pull.wanted[shard][0]
        header = Header(
            Kind.PULL_ROWS, self._number, shard=shard, step=pull.version, base=pull.number, length=len(payload),
            flags=NEWEST if pull.newest else 0,
        )  # fmt: skip
        if (link := self._links.get(home)) is not None:
            link.pull(header, payload)

    def replica_computed(self) -> None:
        """The replica in progress is over."""
        self._computing, self._about = False, None
        self._handle(machine.ReplicaComputed())
        self._hand_over()

    def replica_abandoned(self) -> None:
        """The replica in progress was given up, and nobody writes slots any more."""
        self._computing, self._about = False, None
        self._handle(machine.ReplicaAbandoned())
        self._hand_over()

    def begin_install(self, version: int) -> torch.Tensor | None:
        """The version in the buffer (see `installing`), which nobody writes until `installed`.

        None if meanwhile it has become void, or another one is to be installed: all others may have gone on.
        """
        with self._changed:
            if not self._machine.take(machine.Install(version)):
                return None
            self._taken, self._states = (self._states, bool(self._skipped)), {}
        return self.buffer

    @property
    def installing(self) -> list[Shard] | None:
        """The shards that are to be installed; None when it is all of them. What else is in the buffer is void."""
        if isinstance(self._machine, StreamMachine):
            return None
        changed = self._machine.changed
        return None if len(changed) == len(self.layout.shards) else [self.layout.shards[index] for index in changed]

    def take_states(self) -> tuple[dict[int, ShardRecord], bool]:
        """What is being installed, where workers have a state: that of the shards, if it is what all begin with, and
        whether the step is skipped."""
        taken, self._taken = self._taken, ({}, False)
        return taken

    def installed(self) -> None:
        """The model holds the version that was to be installed; the slots are free."""
        self._handle(machine.Installed())
        self._hand_over()

    # ---- what codecs remember of replicas ----

    def _hand_over(self) -> None:
        """What is remembered of replicas that are not this worker's any more goes where they went."""
        if self._codec_states is not None:
            with self._changed:
                self._give_all_but(self._machine.keeps)

    def _give_all_but(self, keeps: frozenset[int]) -> None:
        assert self._codec_states is not None
        self._codec_states.hand_over(keeps | ({self._about} if self._about is not None else set()), self._paths)

    def _move_codec_states(self, before: View | None, view: View) -> None:
        """After a roll-back nothing counts; who was given up and is back gives all away, for others may know better."""
        back = before is not None and _incarnation(before, self.me) not in (-1, _incarnation(view, self.me))
        rolled_back = before is not None and before.generation != view.generation
        self._new_generation = self._new_generation or rolled_back
        if self._codec_states is None:
            return
        if rolled_back:
            self._capture = -1
            self._codec_states.drop_all()
        self._give_all_but(frozenset() if back else self._machine.keeps)

    def capture(self, version: int) -> int:
        """A snapshot is to be taken of `version`, what codecs remember then included; if that is too late, the version
        that is here, else -1."""
        at_the_end = version >= self._steps  # from there on nobody contributes anything
        if self._codec_states is None or at_the_end or not isinstance(self._machine, WorkerMachine):
            return -1
        with self._changed:
            if self._machine.following and self._machine.step >= version:
                return self._machine.step
            self._capture = version
            return -1

    def _copy_codec_state(self, send: machine.Send) -> None:
        """Before the first contribution to the version that is captured leaves: what is remembered of those before."""
        if self._codec_states is None or self._capture < 0 or not isinstance(self._machine, WorkerMachine):
            return
        if send.step > 0 and send.step == self._machine.cadence.updates_before(send.shard, self._capture):
            self._codec_states.copy(send.shard, send.replica, send.step - 1, send.server)

    def _send_state(self, server: str, header: Header, payload: memoryview | None) -> None:
        if (link := self._links.get(server)) is not None:
            link.send_codec_state(header._replace(view=self._number), payload)

    @property
    def _paths(self) -> Paths:
        return Paths(self.view.primary, self._links.connections)

    def check_codec_state(self, header: Header) -> None:
        if self._codec_states is None:
            raise ProtocolError("a memory for a worker that has none")
        self._codec_states.check(header)

    def codec_state(self, header: Header, data: bytearray) -> None:
        with self._changed:
            if self._codec_states is not None:
                self._codec_states.arrived(header, data)
            self._changed.notify_all()

    def codec_state_taken(self, shard: int, replica: int) -> None:
        with self._changed:
            if self._codec_states is not None:
                self._codec_states.taken(shard, replica)
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        wait_until(self._changed, lambda: self._failure is not None or ready(), describe, self._context.say)
        if self._failure is not None:
            raise self._failure

    # ---- the links' threads ----

    def arriving(self, header: Header) -> memoryview | None:
        shard, version, nbytes = header.shard, header.step, header.length
        known = 0 <= shard < len(self.layout.shards)
        skips = bool(header.flags & SKIP) and self._config.stateful_workers
        if not known or (header.codec == 0 and nbytes != (0 if skips else self.layout.shards[shard].slot_bytes)):
            raise ProtocolError(f"a version of {nbytes} bytes for shard {shard}, which is not in this job's layout")
        wanted = 0 if header.wanted is None else header.wanted
        whole = not self._config.stateful_workers or self.layout.shards[shard].role == "buffers"
        lands = self._arrives(machine.Arriving(shard, version, header.view, wanted, header.base, whole), skips=skips)
        return self._pushes.slot(shard)[:nbytes if skips else None] if lands else None

    def state(self, header: Header, data: bytearray) -> None:
        if not self._config.stateful_workers or not 0 <= header.shard < len(self.layout.shards):
            raise ProtocolError(f"a state of shard {header.shard}, which this job has not")
        record = read_state(data, self.layout.shards[header.shard], header.step, self._config)
        if self._arrives(machine.Arriving(header.shard, header.step, header.view, begins=True), record):
            self.landed(header.shard)

    def _arrives(self, event: machine.Arriving, record: ShardRecord | None = None, *, skips: bool = False) -> bool:
        """Something of a version comes: may it land? A state has landed then."""
        with self._changed:
            before = self._machine.target
            effects = self._machine.handle(event)
            lands = isinstance(effects[0], machine.Land)
            if lands:
                (self._skipped.add if skips else self._skipped.discard)(event.shard)
            if lands and record is not None:
                self._states[event.shard] = record
            target = self._machine.target  # known again, although nothing has to land: there may be something to do
            if target != before or target > self._machine.step + 1 or self._claiming:
                self._changed.notify_all()
        self._run(effects[1:])
        return lands

    def decode(self, shard: int, payload: memoryview) -> None:
        place = self.layout.shards[shard]
        self._encoder.decode(payload, self.buffer[place.start : place.stop])

    def rows(self, header: Header, data: bytearray) -> None:
        with self._changed:
            outdated = bool(header.flags & SKIP)
            if self._pull is not None and self._pull.answered(header.shard, header.base, data, outdated=outdated):
                self._changed.notify_all()

    def to_wait(self, replica: int, clock: int) -> None:
        self._handle(machine.ToWait(replica, clock))

    def landed(self, shard: int) -> None:
        with self._changed:
            effects = self._machine.handle(machine.Landed(shard))
            if self._machine.complete:
                self._changed.notify_all()
        self._run(effects)

    def link_up(self, server: Member) -> None:
        with self._changed:
            self._links.up(server.id)
        self._handle(machine.LinkUp(server.id))
        self._hand_over()

    def link_lost(self, server: Member, error: RallypointError) -> None:
        if isinstance(error, ProtocolError):  # a refusal may pass: we may have been given up, and be taken back
            self.fail(JobAborted(f"the link to server {server.id} is gone: {error}"))
        with self._changed:
            effects = self._lost(server.id)
            self._changed.notify_all()
        self._run(effects)

    def _lost(self, server: str) -> list[machine.Effect]:
        self._links.lost(server)
        return self._machine.handle(machine.LinkLost(server))

    def _sent(self, shard: int, serial: int) -> None:
        with self._changed:
            self._machine.handle(machine.Sent(shard, serial))
            if self._claiming:  # else the main thread waits for a version, and would wake for every shard in vain
                self._changed.notify_all()

    # ---- effects ----

    def _handle(self, event: machine.Event) -> None:
        with self._changed:
            effects = self._machine.handle(event)
            self._changed.notify_all()
        self._run(effects)

    def _run(self, effects: Sequence[machine.Effect]) -> None:
        for effect in effects:
            match effect:
                case machine.Send():
                    self._copy_codec_state(effect)
                    self._pushes.push(effect)
                case machine.Fetch(shard=shard, version=version, server=server):
                    if (link := self._links.get(server)) is not None:
                        link.fetch(shard, version, self._number)
                case machine.Want(shard=shard, replica=replica, server=server):
                    if (link := self._links.get(server)) is not None:
                        link.want(shard, replica, self._number)
                case machine.Follow(server=server, on=on):
                    if (link := self._links.get(server)) is not None:
                        link.follow(self._number, on=on)
                case _:
                    raise AssertionError(f"an effect that cannot follow here: {effect}")

    @property
    def _number(self) -> ViewNumber:
        return self._machine.view.number if self._machine.view is not None else ViewNumber()

    def _where_missing(self) -> str:
        view = self._machine.view
        if view is None:
            return "the first view"
        if self._machine.step >= self._steps:
            return "the other workers to finish"
        if not self._machine.takes_part:
            return ""  # standing by is no wait that anybody need hear of
        if self._config.stateful_workers and self._machine.step < 0 and view.uploader:
            uploads = f", which {view.uploader} is to bring" if not view.origin else ""
            return f"the model's state{uploads}: {self._by_server(self._machine.missing)}"
        if self._codec_states is not None and (what := self._codec_states.where_missing(self._paths)):
            return what
        return f"version {self._machine.step + 1}: {self._by_server(self._machine.missing)}"

    def _by_server(self, shards: list[int]) -> str:
        return self._links.describe(shards, self.view.primary)


def _machine_for(me: str, layout: Layout, config: JobConfig) -> StreamMachine | WorkerMachine:
    shards, buffers = layout.shards, frozenset(s.index for s in layout.shards if config.contributors(s.role) == 1)
    if config.streaming:
        return StreamMachine(me, len(shards), buffers, config.rounds)
    return WorkerMachine(
        me, len(shards), buffers, config.rounds, cadence=cadence_of(config, shards), in_order=config.stateful_workers
    )


def _incarnation(view: View, worker: str) -> int:
    return next((member.incarnation for member in view.workers if member.id == worker), -1)
