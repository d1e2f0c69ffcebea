"""Joining a job: `Job` is this process's membership; `Job.train` starts the one run that it takes part in."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Unpack

import torch
from torch.nn.parameter import is_lazy

from rallypoint.config import JobConfig, record_of, resolve, with_own_optimizer, with_start_values
from rallypoint.config.resolve import names_of
from rallypoint.core import protocol
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import WORD_BYTES
from rallypoint.core.modes import Feature
from rallypoint.core.order import stream_reads
from rallypoint.core.plan.candidates import advice_at_start
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.slots import Store
from rallypoint.data.identity import identity_of
from rallypoint.data.loader import MicroBatches
from rallypoint.data.spec import Collate, Data, Loader, given
from rallypoint.errors import REFUSED, ConfigError, JobAborted, ProtocolError, RallypointError, StartAgain, UsageError
from rallypoint.net.handshake import Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.lenient import say
from rallypoint.observe.trace import LOAD, Tracer
from rallypoint.observe.waits import SharedCores, wait_until
from rallypoint.optim import InPlace
from rallypoint.parallel import Parallel, RankGroup
from rallypoint.worker.evaluations import EvaluationReports
from rallypoint.worker.exchange.exchange import Exchange, digest_of
from rallypoint.worker.exchange.links import ExchangeContext
from rallypoint.worker.kernels import kernels_of
from rallypoint.worker.keys import NOT_OF_RANKS, KeySettings, KeyShape, KeyStore, declared, first_values
from rallypoint.worker.keys_exchange import KeyExchange
from rallypoint.worker.loop.guard import Parts
from rallypoint.worker.loop.own import OwnOptimizer, OwnSchedule, several, worker_optimizer
from rallypoint.worker.loop.run import Run
from rallypoint.worker.membership import Stopping
from rallypoint.worker.ranks.followers import RankFollowers
from rallypoint.worker.ranks.run import Lead
from rallypoint.worker.ranks.tensors import LeaderTensors
from rallypoint.worker.ranks.watch import RankWatch, cause_of
from rallypoint.worker.sources.hooks import DeltaSource, Staging, staging_for
from rallypoint.worker.sources.local import source_for
from rallypoint.worker.sources.streamed import FirstValues, Init, StreamedParameters, prepare
from rallypoint.worker.tensors import ModelTensors, TrainSettings

# ---- What a run begins with where its script does not say it ----


def trained_bytes(model: torch.nn.Module) -> int:
    """How many bytes of `model` are trained (fp32), for which `config.with_start_values` chooses shards; 0 if it has
    tables, whose parts depend on the size of shards, or cannot be trained (which is said later)."""
    if not isinstance(model, torch.nn.Module) or any(getattr(one, "sparse", False) for one in model.modules()):
        return 0
    trained = [p for p in model.parameters() if p.requires_grad]
    return 0 if any(is_lazy(p) for p in trained) else WORD_BYTES * sum(p.numel() for p in trained)


def mode_said(record: JobRecord, view: View, welcome: protocol.Welcome, device: torch.device, ranks: int) -> str:
    """A sentence on the mode that suits these machines, as `rallypoint plan` says it. "" if there is no GPU (on
    processors the default is right), if the job has begun before, or if what it uses works in one mode only."""
    if device.type != "cuda" or view.number != view.generation or not record.anybody_steps:
        return ""
    hosts, homes = ({member.host for member in members} for members in (view.workers, view.servers))
    nbytes = sum(shard.nbytes for shard in record.layout.shards if shard.role == "parameters")
    return advice_at_start(
        nbytes, max(welcome.workers, len(hosts)), len(hosts), welcome.servers, ranks=ranks, beside=homes <= hosts,
        mbit=welcome.link_mbit, memory=torch.cuda.get_device_properties(device).total_memory,
    ).says  # fmt: skip


HAND_OVER_S, LEAVE_WITHIN_S = 6.0, 10.0  # after a worker is told to go; launchers and batch systems end it soon after
TOO_LATE = "the job was over before this worker took part in it"


class Job:
    """This process as a worker of a job, made by `rallypoint.join`. A context manager.

    Attributes:
        id, started: the worker's name; the number of workers that the job begins with.
        rank, ranks: this process's number among the ranks of its worker, and their number: 0 and 1 without ``--ranks``.
        run_type: what `train` returns.
        welcome, stopping: what the coordinator has said at first, and what it is told of the job's end.

    Raises AccessDenied or LinkError when the coordinator cannot be joined.
    """

    run_type: type[Run] = Run
    script_ended: Callable[[int, int, str], None] = staticmethod(lambda rank, sums, worker: None)
    _in_place: InPlace | None = None  # what the server shares that is alone with this worker in its process

    def __init__(
        self, *, id: str, coordinator: str, token: str = "", transport: Transport | None = None, near: str = "",
        group: RankGroup | None = None, tracer: Tracer | None = None, cores: SharedCores | None = None,
    ) -> None:  # fmt: skip
        """`cores`: of a server of this process, which shares its cores."""
        self.id, self._cores = id, cores
        self._group, self.rank = group, 0
        self.ranks = 1 if group is None else group.size
        self._token = token
        self._transport: Transport = transport or TcpTransport()
        self._tracer = (tracer or Tracer(id)).counting(LOAD)
        self._changed = threading.Condition()
        self._view: View | None = None
        self._record: JobRecord | None = None
        self._kernels = b""  # the digest of this worker's probe, in a job with audits
        self._first = b""  # the digest of its first weights
        self._finished = self._leaving = False
        self._lead = self._captured = ""
        self._wanted: protocol.Capture | None = None  # the last snapshot that the coordinator asked for
        self._failure: BaseException | None = None
        self._plane: Exchange | KeyExchange | None = None
        self._script: protocol.ScriptAt | None = None  # what this worker has said of its script's end, in a job of sums
        self._exchange: Exchange | None = None
        self._keys: KeyStore | None = None
        self._staging: Staging | None = None
        self._run: Run | None = None
        self._link = CoordinatorLink(
            transport=self._transport, address=coordinator, me=Identity("worker", id, token, near=near),
            handlers=Handlers(
                self._on_message, self._on_lost, self._on_admitted,
                lambda: protocol.Beat() if self._plane is None else self._plane.beat(),
                lambda: self._tracer.seconds(LOAD),
            ),
        )  # fmt: skip
        self._stopping, self._reports = Stopping(self._link.send), EvaluationReports(self._link.send)
        self._link.start()
        torch.set_num_threads(self._link.welcome.threads)
        self.welcome, self.stopping, self.started = self._link.welcome, self._stopping, self._link.welcome.workers
        board = None if group is None else group.board
        self._watch = None if board is None else RankWatch(board, id, self.welcome.heartbeat, self._say)

    def train(
        self, model: torch.nn.Module, dataset: Data, *, collate_fn: Collate | None = None, loader: Loader | None = None,
        own_optimizer: OwnOptimizer | None = None, own_schedule: OwnSchedule | None = None,
        parallel: Parallel | None = None, init: Init | None = None, **settings: Unpack[TrainSettings],
    ) -> Run:  # fmt: skip
        """Train `model` (in place) on `dataset` with the settings of `JobConfig`; iterate over the result.

        `dataset` is map-style, a DataLoader or an iterable (`Stream`): see `given` for what it decides. `collate_fn`
        makes a batch of a list of samples, as a DataLoader's does; None: torch's ``default_collate``. `loader` says how
        samples are loaded.
        `carry=` is the state that each replica begins with, where it carries one from step to step: see `Micro.carry`.
        With ``sync=rp.AllReduce()``, `own_optimizer` over the model's parameters (or several, each over some of them)
        may replace `optimizer`. The job steps it after every step, then `own_schedule`.
        In a worker of several ranks (``--ranks``), all call this: `model` is this rank's part, `parallel` its plan.
        With ``parameters="streamed"`` the model may be on the meta device: see `FirstValues` for ``init(module)``.

        Returns when all workers and servers are here and agree. Raises ConfigError, ModelError or DataError on bad
        input, JobAborted when the job ends before it begins.
        """
        if self._plane is not None:
            raise UsageError("this job has its run already: one job.train for one rp.join")
        carry = settings.pop("carry", None)
        own = several(own_optimizer, torch.optim.Optimizer, "own_optimizer")
        schedules = several(own_schedule, torch.optim.lr_scheduler.LRScheduler, "own_schedule")
        if own and "optimizer" in settings:
            raise ConfigError("optimizer= and own_optimizer= are both given: the job steps only one; leave one out")
        kinds = ", ".join(f"{type(one).__module__}.{type(one).__qualname__}" for one in own)
        overrides, data = self._link.welcome.overrides, given(dataset, collate_fn, loader)
        config = with_own_optimizer(resolve({**data.settings, **settings}, overrides), kinds, overrides)
        given_keys = names_of({**data.settings, **settings}) | names_of(overrides)
        nbytes = trained_bytes(model) if self._group is None else 0  # a rank has a part of the model
        config, why_so = with_start_values(config, given_keys, nbytes, self._link.welcome)
        if config.reading.order == "own" and not self.run_type.own:
            raise ConfigError('reading.order="own" is set by rp.wrap: leave it out of job.train')
        folder = self._link.welcome.folder
        lead = None if self._group is None else Lead(self._group, config, model, parallel, folder, carry)
        made = prepare(model, config, init)
        tensors = ModelTensors(model, config, made, carry) if lead is None else lead.tensors(data.dataset)
        part = (0, 1) if lead is None else lead.part
        batches = MicroBatches(data.dataset, config, tensors.device, data.collate, part, data.loader)
        optimizer = worker_optimizer(tensors, config, own, schedules)
        identity = identity_of(data.dataset)
        record = record_of(
            config, tensors.layout, tensors.frozen_hashes(), data=identity, tied=tensors.tied,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        whole = lead is None and config.memory.parameters != "streamed"
        self._first = digest_of(tensors.layout, tensors.part) if whole else b""
        self._kernels = kernels_of(tensors.device) if record.audits else b""
        fused = getattr(config.optimizer, "fused", False)  # its kernels give other bytes for pieces
        if self._in_place is not None and lead is None and record.in_place and not fused:
            self._in_place.parameters = tensors.in_place()
            if optimizer is not None:
                optimizer.means = self._in_place.means
        exchange = self.open_exchange(record, config, pinned=tensors.device.type == "cuda", early=lead is None)
        first = self.id == min(one.id for one in exchange.view.workers)
        reads = stream_reads(config.reading.passes, config.steps, given="steps" in settings)
        if first:
            mode = mode_said(record, exchange.view, self.welcome, tensors.device, self.ranks)
            for sentence in filter(None, (why_so, reads, mode)):
                self._say(sentence)
        of_ranks = set() if lead is None else {Feature.RANKS}
        self._stopping.why_not = record.refusal_of({Feature.STOP, *of_ranks})
        self._staging = staging_for(tensors.device, exchange.fail)
        source: DeltaSource = (
            lead.source(tensors, exchange) if lead is not None and isinstance(tensors, LeaderTensors)
            else source_for(model, tensors, config, exchange, self._staging, self._say)
        )  # fmt: skip
        self._run = self.run_type(Parts(
            model=model, tensors=tensors, config=config, batches=batches, exchange=exchange, source=source,
            staging=self._staging, coordinator=self._link, tracer=self._tracer, done=self.done, leads=self._leads,
            say=self._say, reports=self._reports, optimizer=optimizer, stopping=self._stopping,
            followers=RankFollowers() if lead is None else lead.followers, leases=lead is None and record.leases,
            decides_not=record.refusal_of({Feature.DECIDES, *of_ranks}),
            streamed=StreamedParameters(
                model, tensors, exchange, FirstValues(model, tensors, made, config.seed, init), self._say
            ) if exchange.streamed else None,
        ))  # fmt: skip
        return self._run

    def store(self, keys: Mapping[str, KeyShape], **settings: Unpack[KeySettings]) -> KeyStore:
        """A key-value store on this job's servers, in place of a training run: see `KeyStore`, and `KeySettings`.

        `keys` maps each name to a shape, or to a tensor: that is its first value too. All workers give the same names
        and shapes. Returns when all workers and servers are here. Raises ConfigError, ModelError, JobAborted.
        """
        if self._plane is not None:
            raise UsageError("this job has its run or its store already: one for one rp.join")
        if self._group is not None:
            raise UsageError(NOT_OF_RANKS)
        config, layout = declared(keys, settings, self._link.welcome.overrides)
        self._propose(record_of(config, layout))
        context = ExchangeContext(self._link.credentials, self._transport, self._tracer, self._report_wait)
        exchange = KeyExchange(layout, config, context, self._link.send)
        self._begin(exchange)
        self._keys = KeyStore(exchange, self.done, first_values(keys))
        return self._keys

    def open_exchange(
        self, record: JobRecord, config: JobConfig, *, pinned: bool = False, early: bool = True
    ) -> Exchange:
        """Propose `record`, wait until the job begins (or let this worker join it), and connect to every server.

        `early`: forward passes may begin before all of their version is here, if the settings allow it; not on a GPU
        (`pinned`), where that takes thousands of small copies on the stream that computes: there slots may be in bf16.
        This is the data plane under `train`, without a model: `benchmarks/reduce.py` measures it.
        """
        self._propose(record)
        cores = None if pinned else self._cores  # a GPU computes meanwhile
        context = ExchangeContext(self._link.credentials, self._transport, self._tracer, self._report_wait, cores)
        in_place = self._in_place or InPlace()
        narrow, early = pinned and early, early and not pinned and cores is None and not in_place.parameters
        self._exchange = Exchange(
            record.layout, config, context, pinned=pinned, early=early, in_place=in_place, narrow=narrow
        )  # fmt: skip
        self._exchange.reaching.to = lambda generation, version: self._link.send(protocol.Reached(version, generation))
        self._begin(self._exchange)
        return self._exchange

    def _propose(self, record: JobRecord) -> None:
        with self._changed:
            self._record = record
        self._link.send(protocol.Propose(record, self._kernels, self._first))
        with self._changed:
            wait_until(
                self._changed, lambda: self._failure is not None or self._finished or self._view is not None,
                lambda: "the other members of the job", self._report_wait,
            )  # fmt: skip
            if self._failure is not None:
                raise self._failure
            if self._view is None:
                raise JobAborted(TOO_LATE)

    def _begin(self, exchange: Exchange | KeyExchange) -> None:
        """Give the data plane what the coordinator has said so far, and from now on."""
        with self._changed:
            self._plane = exchange
            view, failure, finished = self._view, self._failure, self._finished
        if finished:  # the job ended while the exchange was being made, and no message will repeat that
            raise JobAborted(TOO_LATE)
        assert view is not None
        exchange.adopt(view)
        self._capture()
        if failure is not None:
            exchange.fail(failure)
        if self._leaving:
            exchange.leave()

    def done(self, generation: ViewNumber, version: int = -1) -> None:
        """Tell the coordinator that this worker holds the job's last `version` (-1: its last round).

        `generation` is the one in which that version was installed. After a roll-back nothing is sent.
        """
        with self._changed:
            if self._view is None or self._view.generation != generation:
                return  # stale: a roll-back came meanwhile
        self._stopping.done(generation, version)

    @property
    def step(self) -> int | None:
        """The steps of training that the model of this worker's run has; None before it has one. Any thread may ask."""
        if (run := self._run) is None:
            return None
        steps = run.config.steps if self._exchange is None else run.config.steps_at(self._exchange.end.last)
        return steps if self._finished else min(max(0, run.step), steps)

    @property
    def left(self) -> bool:
        """True if this worker had to leave, and the job goes on without it."""
        return self._leaving and not self._finished

    def leave(self, status: int = 0) -> None:
        """Give up this worker's replicas and end, for example on a spot machine's notice.

        The loop ends with SystemExit. Nothing happens when the job is over: the script may be saving the model.

        Safe to call from a signal handler. The process exits with `status` after LEAVE_WITHIN_S, or one heartbeat if
        that is longer, in any case: an evaluation that takes longer is lost, and so is a replica; codec states are
        handed over before.
        """
        if self._finished:
            return
        self._leaving = True
        threading.Thread(target=self._leave, args=(status,), name="leave", daemon=True).start()

    def _leave(self, status: int) -> None:
        if self._run is not None and self._run.own:  # nobody else can compute its replica
            say(StartAgain.LINE)
            status = status or StartAgain.STATUS
        self._link.send(protocol.Leaving())
        if self._plane is not None:
            self._plane.leave()
        time.sleep(HAND_OVER_S)
        try:
            if (states := None if self._exchange is None else self._exchange.codec_states) is not None:
                states.hand_over()
            time.sleep(max(LEAVE_WITHIN_S, self._link.welcome.heartbeat) - HAND_OVER_S)
            if not self._finished and states is not None and not states.hand_over() and self._link.admitted:
                say(f"{self.id} ends before servers have its codec states: its replicas begin anew, and bytes differ")
        finally:
            if not self._finished:
                os._exit(status)

    def _leads(self) -> bool:
        if self._finished:
            return self._lead == self.id
        exchange = self._plane
        return exchange is not None and exchange.view.lead(exchange.step) == self.id

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self._finish(self._run if error is None else None)
            elif not isinstance(error, JobAborted):
                self._give_up(cause_of(error, self._group))
        finally:
            self.close()
        if self._group is not None and error is None:  # else other ranks may be in a collective, and wait for this one
            self._group.close()

    def _finish(self, run: Run | None) -> None:
        """The script has ended without an error: if it has left the loop of `run`, take part in the job to its end."""
        try:
            for part in (run, self._keys):
                if part is not None and not self._finished and not self._leaving:
                    part.finish()
        except RallypointError as error:
            self._give_up(str(error))
            raise
        if self._plane is not None and not self._finished and not self._leaving:
            self._give_up("its loop ended before the last step")

    def _give_up(self, reason: str) -> None:
        exchange = self._plane
        if exchange is None or self._view is None:
            self._link.send(protocol.GiveUp(reason))
            return
        if self._run is not None and self._group is None:  # else no rank may send alone
            self._run.left_loop.fails()
        if (own := self._exchange) is not None:
            self._link.send(own.end.given_up(reason))
            own.end.wait_until_applied()
        else:
            generation = exchange.view.generation  # first: if a roll-back comes now, the claim is stale, not too high
            self._link.send(protocol.GiveUp(reason, max(0, exchange.step), generation))

    def close(self) -> None:
        """Leave the job: take the hooks off the model, end every link and thread."""
        atexit.unregister(self.close)  # `rallypoint.join` registers it
        if self._run is not None:
            self._run.release_model()
        for part in (self._plane, self._staging, self._watch, self._link):
            if part is not None:
                part.close()
        if self._link.welcome.folder:
            self._tracer.save(Path(self._link.welcome.folder))

    def _say(self, text: str) -> None:
        self._link.send(protocol.Say(text))

    def say_script(self, script: protocol.ScriptAt) -> None:
        """Tell the coordinator how far the script is, in a job of sums; its end also the next coordinator."""
        with self._changed:
            self._script = script if script.ended else self._script
        self._link.send(script)

    def _report_wait(self, sentence: str) -> None:
        self._link.send(protocol.Say(f"{self.id} on {socket.gethostname()} is {sentence}"))

    # ---- messages from the coordinator, on the link's thread ----

    def _on_admitted(self, new: bool) -> None:
        """The coordinator has admitted this worker (again): repeat what the coordinator may not know. Repeat it even
        when the coordinator seems to know this worker. A coordinator that died before anything was agreed left nothing
        in its journal, so the next one counts incarnations from 1 again."""
        with self._changed:
            record, script = self._record, self._script
        if record is not None:
            self._link.send(protocol.Propose(record, self._kernels, self._first))
        if script is not None:
            self._link.send(script)
        self._reports.repeat(new=new)
        self._stopping.repeat(self._view)
        if self._leaving:
            self._link.send(protocol.Leaving())
        if self._exchange is not None:
            self._exchange.reaching.say(again=True)

    def _on_message(self, message: protocol.Message) -> None:
        match message:
            case protocol.NewView(view=view):
                with self._changed:
                    self._view, exchange = view, self._plane
                    self._changed.notify_all()
                if exchange is not None:
                    exchange.adopt(view)
                self._stopping.adopted(view)
            case protocol.Assist(step=step, replica=replica):
                if self._plane is not None:
                    self._plane.assist(step, replica)
            case protocol.Capture():
                with self._changed:
                    self._wanted = message
                self._capture()
            case protocol.Finished(lead=lead):
                with self._changed:
                    self._finished, self._lead = True, lead
                    self._changed.notify_all()
                if self._plane is not None:
                    self._plane.finish()
            case protocol.StopWanted(reason=reason):
                self._stopping.wish(reason or "the operator")
            case protocol.ScriptAt(rank=rank, sums=sums, worker=worker):
                self.script_ended(rank, sums, worker)
            case protocol.Refused(reason=reason, final=True):
                self._fail(JobAborted(f"{REFUSED}{reason}"))
            case protocol.Aborted(reason=reason) | protocol.Refused(reason=reason):
                self._fail(JobAborted(reason))
            case _:
                raise ProtocolError(f"a worker has no use for a {type(message).__name__} message")

    def _capture(self) -> None:
        """Pass the coordinator's last request for a snapshot to the exchange, once. (Each view repeats the request.)"""
        with self._changed:
            wanted, exchange = self._wanted, self._plane
            if exchange is None or wanted is None or wanted.snapshot == self._captured:
                return
            self._captured = wanted.snapshot
        exchange.capture(Store(wanted.snapshot, wanted.version, wanted.writers))

    def _on_lost(self, error: RallypointError) -> None:
        if not self._finished:
            self._fail(JobAborted(f"the coordinator is gone: {error}"))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        if self._plane is not None:
            self._plane.fail(error)
