"""What a simulated job computes: names instead of tensors, so that the least mix-up changes the last one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from rallypoint.codec.spec import CodecSpec, Raw, has_state
from rallypoint.config import Audit, Evaluation, Group, JobConfig, Memory, cadence_of, record_of
from rallypoint.core.cadence import Cadence
from rallypoint.core.decisions import Rules
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Layout
from rallypoint.core.modes import StateHolder
from rallypoint.core.optimizer import Average
from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, ServerPolicy, Sync
from rallypoint.core.shard.clip import clip_scale, total_norm
from rallypoint.store.record import ShardRecord
from rallypoint.testing.simulation.replicas import contents
from rallypoint.testing.simulation.replicas.contents import Content, NamedSet, Names, Trained, combine, name_of, tree
from rallypoint.testing.simulation.replicas.floats import ROWS, Floats
from rallypoint.testing.simulation.replicas.script import ScriptStops, Undisturbed


@dataclass(frozen=True)
class SimulatedJob:
    """A job of `steps` steps and `replicas` replicas over `shards` shards, the last of which are buffers.

    With `clip` servers decide together; with `skip` buffers wait too, and a step that is not finite is skipped. Under
    LocalSteps `steps` counts rounds. `periods` are of groups of their own, as (sync_every, sync_offset)."""

    shards: int = 6
    buffers: int = 1
    replicas: int = 4
    steps: int = 12
    clip: float | None = None
    skip: bool = False
    compute_s: float = 0.2  # a replica's, on a worker of speed 1
    sync: Sync | BoundedStaleness | Async | LocalSteps | AllReduce = field(default_factory=Sync)
    periods: tuple[tuple[int, int], ...] = ()
    codec: CodecSpec = field(default_factory=Raw)
    inner: bool = False  # of local steps, over Sync: contributions depend on the replicas' own optimizers
    poison: tuple[int, int] | None = None  # (step, replica) whose gradient is not finite, which stops the job
    tables: int = 0  # shards of parameters that are parts of a table
    keys: int = 0  # of a store: shard i is a piece of key i modulo so many, and what is pushed depends on it alone
    stop: ScriptStops | None = None  # same bytes only
    every: int = 0  # an evaluation is due after so many steps; 0: never
    rules: Rules = field(default_factory=Rules)  # by which evaluations decide
    loses_states: bool = False  # members that hold codec states or inner ones are killed: no bytes are promised
    lost: list[tuple[int, int]] = field(default_factory=list, compare=False, repr=False)  # states that were under way
    floats: Floats = field(default_factory=Floats, compare=False, repr=False)
    audits: contents.AuditedJob | None = None
    carries: bool = False  # each replica carries a state: a shard for each, the last ones of the buffers
    fp16: bool = False  # it scales losses: the last shard of buffers has the loss scale, and `skip` is set
    average: Average | None = None  # servers keep it beside the parameters
    recorded: int = 0  # digests are kept every so many steps; 0: never
    streamed: bool = False  # parameters stay on the servers, and workers pull their words
    buffer_shards: frozenset[int] = field(init=False)
    scale_shard: int = field(init=False)  # -1: none

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale_shard", self.shards - 1 if self.fp16 else -1)
        object.__setattr__(self, "buffer_shards", frozenset(range(self.shards - self.buffers, self.shards)))

    @cached_property
    def record(self) -> JobRecord:
        """The record that workers propose."""
        return record_of(self.config, self.layout)

    @cached_property
    def codec_state_shards(self) -> tuple[int, ...]:
        """The shards whose codec remembers something of each replica."""
        return tuple(s for s in range(self.shards) if has_state(self.codec) and s not in self.buffer_shards)

    @cached_property
    def table_shards(self) -> frozenset[int]:
        return frozenset(range(self.shards - self.buffers - self.tables, self.shards - self.buffers))

    @cached_property
    def absent(self) -> frozenset[int]:
        """The shards that no worker's model holds."""
        return frozenset(range(self.shards)) - self.buffer_shards if self.streamed else self.table_shards

    @property
    def nothing(self) -> Content:
        """What a version of an absent shard brings to workers."""
        return 0 if self.same_bytes else frozenset()

    def sent(self, shard: int, content: Content) -> Content:
        """What a version of the shard brings to workers."""
        return self.nothing if shard in self.absent else content

    def dense(self, model: Iterable[Content]) -> list[tuple[int, Content]]:
        """The shards that a worker's model holds, and their contents."""
        return [(shard, content) for shard, content in enumerate(model) if shard not in self.absent]

    def looked_up(self, step: int, replica: int) -> dict[int, list[int]]:
        """The parts of the table that this replica's samples need at `step`, and the rows of them."""
        chosen = {shard: combine(shard, step, replica, 51) for shard in sorted(self.table_shards)}
        return {
            shard: [row for row in range(ROWS) if not row or chance >> row & 1]
            for shard, chance in chosen.items() if chance % 3
        }  # fmt: skip

    @cached_property
    def config(self) -> JobConfig:
        """The settings that a real job of this kind has."""
        config = JobConfig(
            replicas=self.replicas, steps=self.steps, clip=self.clip, batch=8,
            precision="fp16" if self.fp16 else "fp32", loss_scale=contents.SCALING,
            nonfinite="skip" if self.skip else "stop", sync=self.sync, codec=self.codec,
            groups=tuple(Group(match=(), sync_every=every, sync_offset=offset) for every, offset in self.periods),
            evaluation=Evaluation(
                plateau=self.rules.plateau, keep_best=self.rules.best.metric if self.rules.best else ""
            ),
            audit=Audit(share=self.audits.share if self.audits else 0.0, fingerprints=self.recorded),
            keyed=self.keys > 0, average=self.average,
            memory=Memory(parameters="streamed", prefetch_bytes=0) if self.streamed else Memory(),
        )  # fmt: skip
        return msgspec.structs.replace(config, steps=self.steps * config.steps_per_round)

    def shards_of(self, key: int) -> list[int]:
        return list(range(key, self.shards, self.keys))

    @cached_property
    def layout(self) -> Layout:
        """Shards of 16 words, the last of which are buffers."""
        own = [0, *range(2, 2 + len(self.periods))]
        carried = self.replicas if self.carries else 0
        tables = sorted(self.table_shards)
        named = range(self.shards) if self.recorded else ()
        return contents.layout_of(self.shards, self.buffer_shards, tables, own, carried, self.scale_shard, named)

    @cached_property
    def cadence(self) -> Cadence:
        return cadence_of(self.config, self.layout.shards)

    @cached_property
    def policy(self) -> ServerPolicy:
        return self.config.policy

    @cached_property
    def same_bytes(self) -> bool:
        """Are contents hashes, of everything that led to them? (Else they are sets of contributions.)"""
        return self.inner or self.sync in (Sync(), AllReduce())

    @cached_property
    def stateful_workers(self) -> bool:
        """Do workers step the optimizer?"""
        return self.config.mode.holder is StateHolder.WORKERS

    def check_stored(self, record: ShardRecord) -> None:
        """A snapshot that lacks a codec state gives other bytes to who goes on from it."""
        shard, states = self.layout.shards[record.shard], sorted(record.codec_states)
        if has_state(self.codec) and shard.group >= 0 and 0 < record.version < self.last_version(shard.index):
            whole = self.may_differ or states == list(range(self.replicas))
            assert whole, f"shard {shard.index} of version {record.version} is stored with codec states {states}"

    @property
    def may_differ(self) -> bool:
        """Are no bytes promised (any more), because state was lost with a member?"""
        return self.loses_states or bool(self.lost)

    @property
    def keeps_inner(self) -> bool:
        """Does a replica's own optimizer go on from round to round, on its worker?"""
        return self.inner and isinstance(self.sync, LocalSteps) and self.sync.keep_inner

    @property
    def delayed(self) -> bool:
        """Do replicas begin a round before its version is here?"""
        return isinstance(self.sync, LocalSteps) and self.sync.delay > 0

    @cached_property
    def rounds(self) -> contents.Rounds:
        """What a replica computes in a round, where there is a delay."""
        return contents.Rounds(self.cadence, self.config.steps_per_round, self.config.steps_ahead(0))

    def averages(self, shard: int) -> bool:
        """Do servers have no more of this shard than the mean of its contributions?"""
        return self.stateful_workers and shard not in self.buffer_shards

    def add(self, total: Content, content: Content) -> Content:
        left, right = name_of(total), name_of(content)
        name = self.floats.sum(combine(left, right), left, right)
        return name if self.same_bytes else self._both(total, content, name)

    def mean(self, total: Content, weight: float) -> Content:
        self.floats.scaled(name := combine(name_of(total), int(weight)), name_of(total), 1.0 / weight)
        return name if self.same_bytes else NamedSet(total, name)

    @staticmethod
    def _both(these: frozenset[Any], those: frozenset[Any], name: int) -> NamedSet:
        assert isinstance(these, frozenset), f"{these} and {those} in one sum"
        assert isinstance(those, frozenset), f"{those} was pushed"
        assert not these & those, f"{sorted(these & those)} are applied twice"
        return NamedSet(these | those, name)

    @property
    def end(self) -> int:
        if self.stop is not None or not self.rules.steers:
            return self.steps if self.stop is None else self.stop.version
        return self.undisturbed_decisions.end if self.trajectory else 0

    def last_version(self, shard: int) -> int:
        """The shard's own version at the end of the job."""
        return self.end if self.cadence.together else self.cadence.updates(shard)

    def contributing(self, shard: int) -> range:
        """The replicas that contribute to this shard."""
        place = self.layout.shards[shard]
        first = place.replica or 0
        return range(first, first + self.config.contributors(place.role))

    def check_end(self, shard: int, content: Content) -> None:
        """AssertionError unless this is what the shard may be at the end of the job."""
        if self.same_bytes:
            assert self.may_differ or content == self.undisturbed()[shard], f"other bytes in shard {shard}"
            return
        if isinstance(self.sync, LocalSteps):
            self.check_version(shard, self.cadence.updates(shard), content)
            return
        replicas = self.contributing(shard)
        if isinstance(self.sync, Sync):
            quorum = 1 if shard in self.buffer_shards else min(self.sync.quorum or self.replicas, self.replicas)
            for step in range(self.steps) if not self.skip else ():
                came = [replica for s, replica in content if s == step]
                assert len(came) == quorum, f"shard {shard}, step {step}: {came} instead of {quorum}"
            return
        wanted = frozenset[Any]().union(*(self.written(shard, replica, self.steps) for replica in replicas))
        wrong = f"missing {sorted(wanted - content)}, too many {sorted(content - wanted)}"
        assert content == wanted, f"shard {shard}: {wrong}"

    def check_version(self, shard: int, version: int, content: Content) -> None:
        """AssertionError unless this is the shard's version `version`: every contribution that is due, once."""
        if self.same_bytes and not self.may_differ:
            round = self.cadence.begun(shard, version)
            assert content == self.trajectory[round][shard], f"other bytes in shard {shard} at version {version}"
        elif not self.same_bytes and isinstance(self.sync, LocalSteps):
            due = [round for round in range(self.steps) if self.cadence.due(shard, round)][:version]
            wanted = frozenset((round, replica) for round in due for replica in self.contributing(shard))
            wrong = f"missing {sorted(wanted - content)}, too many {sorted(content - wanted)}"
            assert content == wanted, f"shard {shard} at version {version}: {wrong}"

    def after(self, content: Content, came: Content, version: int) -> Content:
        """A worker's shard once it has installed what has come of `version`."""
        match came:
            case contents.State(content=state):
                return state
            case contents.Mean(content=None):
                return content
            case contents.Mean(content=mean):
                return self.update(content, mean, version - 1)
            case _:
                return came

    def written(self, shard: int, replica: int, clock: int) -> frozenset[Any]:
        """What is there of this replica once its clock shows so much, where contents are sets of contributions."""
        whole = ("",) if shard not in self.buffer_shards else ("", "gradient", "unseen")
        return frozenset((step, replica) for step in range(clock) if self.defect(step, replica) in whole)

    def first(self, shard: int, worker: str = "") -> Content:
        """Version 0; the same whichever worker brings it."""
        named = combine(7, shard)
        if shard == self.scale_shard:
            self.floats.begins(named := contents.FIRST_SCALE, contents.scale_words(named))
        return named if self.same_bytes else NamedSet(name=named)

    def gradient(self, shard: int, step: int, replica: int, model: Iterable[Content]) -> Content:
        """What `replica` contributes at `step` when the model is `model`."""
        made = combine(shard, step, replica, *model if self.same_bytes else ())
        if shard in self.table_shards:
            self.floats.sparse(made)
        if shard == self.scale_shard:
            self.floats.begins(made, [])
        seen = tuple(model)[shard] if self.config.compensation else None
        return made if self.same_bytes else NamedSet({(step, replica)}, made, seen)

    def inner_after(self, inner: int, round: int, replica: int, model: Iterable[Content]) -> int:
        """The state of a replica's own optimizer after the round; 0 is that of a new one."""
        return combine(inner, round, replica, *model, 17)

    def encoded(self, gradient: Content, residual: int) -> tuple[Content, int]:
        """What a codec with a state makes of a gradient: the contribution, and the residual that it leaves."""
        if not self.same_bytes:
            return gradient, combine(residual, 3)
        return combine(gradient, residual, 1), combine(gradient, residual, 2)

    def defect(self, step: int, replica: int) -> str:
        """What is not finite of this replica at `step`: its "loss", its "gradient", or (its worker has not "seen" it)
        the gradient, which only the servers can find; "" if all is.

        Where several contributions may be one update, or names tell nothing, workers see all.
        """
        seen = isinstance(self.sync, Async) and self.sync.fold > 1
        if (step, replica) == self.poison:
            return "gradient" if seen or (step + replica) % 2 else "unseen"
        if not self.skip or (step * 5 + replica) % 13 != 4:
            return ""
        return ("loss", "gradient", "gradient" if seen or self.same_bytes else "unseen")[(step + replica) % 3]

    def flags(self, shard: int, step: int, replica: int) -> tuple[bool, bool]:
        """What a worker says of its contribution to the shard's own version `step`: that nothing of it is not finite;
        that its values are finite."""
        match self.defect(self.cadence.round_of(shard, step), replica):
            case "loss":
                return False, True
            case "gradient" if shard not in self.buffer_shards:
                return False, False
            case _:
                return True, True

    def look(self, shard: int, step: int, finished: Content) -> tuple[float, int]:
        """What a server finds in a finished sum: its norm, and the first word that is not finite (-1: all are)."""
        if shard in self.buffer_shards:
            return 0.0, -1
        if self.same_bytes:
            norm, poisoned = self.norm(shard, finished), self.poison is not None and step == self.poison[0]
            return norm, 3 if poisoned or not math.isfinite(norm) else -1
        bad = any(self.defect(step, replica) in ("gradient", "unseen") for step, replica in finished)
        return self.norm(shard, finished), 3 if bad else -1

    def check_whole(self, shard: int, version: int, content: Content) -> None:
        """AssertionError if what is published is not finite, in a job that has to stop before that."""
        if self.poison is None or shard in self.buffer_shards:
            return
        whole = version <= self.poison[0] if self.same_bytes else self.poison not in content
        assert whole, f"version {version} of shard {shard} is published, and is not finite"

    def norm(self, shard: int, finished: Content) -> float:
        """The 2-norm of a shard's mean gradient."""
        if not self.same_bytes:
            return float(sum(7 * step + 13 * replica for step, replica in finished) % 101) / 20  # who came tells
        return math.inf if self.skip and shard == 0 and finished % 7 == 0 else finished % 1009 / 1000

    def scaled(self, finished: Content, scale: float) -> Content:
        if scale == 1.0:
            return finished
        name = combine(name_of(finished), int(scale * 2**40))
        return name if self.same_bytes else NamedSet(finished, name)

    def update(self, master: Content, finished: Content, step: int, rate: int = 0, times: float = 1.0) -> Content:
        """The optimizer; `rate`: how often the learning rate is reduced; it is taken so many `times`."""
        name = combine(name_of(master), name_of(finished), step, 99 + rate)
        return name if self.same_bytes else self._both(master, finished, combine(name, hash(times)))

    def undisturbed(self) -> list[Content]:
        """Every shard at the last version, computed without any cluster."""
        return self.trajectory[self.end]

    @cached_property
    def undisturbed_decisions(self) -> Undisturbed:
        return Undisturbed(self.rules, self.every, self.steps)

    @cached_property
    def trajectory(self) -> list[list[Content]]:
        """Every shard at every version, computed without any cluster."""
        models = [[self.first(shard) for shard in range(self.shards)]]
        residuals, inner, trained = dict[tuple[int, int], int](), dict[int, int](), dict[int, Trained]()
        decisions = self.undisturbed_decisions
        for step in range(self.steps):
            model = models[-1]
            decisions.evaluated(step, model)
            if self.delayed:
                pushed = self._delayed_round(step, tuple(model), trained)
                finished = [self._summed([own[shard] for own in pushed]) for shard in range(self.shards)]
            else:
                finished = [self._finished(shard, step, model, residuals, inner) for shard in range(self.shards)]
            scale = self._scale(step, finished, contents.scale_of(model[-1]) if self.fp16 else 1.0)
            models.append([
                self._next(shard, master, finished[shard], self.cadence.updates_before(shard, step), scale,
                           decisions.rate(step))
                if self.cadence.due(shard, step) else master for shard, master in enumerate(model)
            ])  # fmt: skip
            for replica in range(self.replicas if self.keeps_inner else 0):
                inner[replica] = self.inner_after(inner.get(replica, 0), step, replica, model)
        decisions.evaluated(self.steps, models[-1])
        return models

    def _finished(
        self, shard: int, step: int, model: Iterable[Content], residuals: dict[tuple[int, int], int],
        inner: dict[int, int],
    ) -> Content:  # fmt: skip
        replicas, pulled = self.contributing(shard), list(model)[shard : shard + 1]
        contributions = [
            self.gradient(shard, step, r, pulled if self.keys else (*self._seen(step, r, model), inner.get(r, 0)))
            for r in replicas
        ]
        if shard in self.codec_state_shards:
            for replica, gradient in enumerate(contributions):
                before = residuals.get((shard, replica), 0)
                contributions[replica], residuals[shard, replica] = self.encoded(gradient, before)
        return self._summed(contributions)

    def _seen(self, step: int, replica: int, model: Iterable[Content]) -> list[Content]:
        """What the replica computes from: of tables only what its samples need."""
        unseen = self.table_shards.difference(self.looked_up(step, replica))
        return [self.nothing if shard in unseen else content for shard, content in enumerate(model)]

    def _summed(self, contributions: list[Content]) -> Content:
        return combine(tree(contributions), len(contributions))

    def _delayed_round(self, round: int, version: Names, trained: dict[int, Trained]) -> list[Names]:
        """Each replica's contributions; `trained` is what the replicas have come to."""
        for replica in range(self.replicas):
            trained[replica] = self.rounds.undisturbed(trained.get(replica), round, replica, version)
        return [trained[replica].contributions(round, replica, version) for replica in range(self.replicas)]

    def _scale(self, step: int, finished: list[Content], scale: float) -> float | None:
        measured = [s for s in range(self.shards) if s not in self.buffer_shards]
        norms = [self.norm(shard, finished[shard]) for shard in measured]
        losses = not any(self.defect(step, replica) for replica in range(self.replicas))
        whole = losses and all(map(math.isfinite, norms))
        return clip_scale(total_norm(norms) / scale, self.clip) / scale if whole or not self.skip else None

    def _next(self, shard: int, master: Content, finished: Content, step: int, scale: float | None,
              rate: int) -> Content:  # fmt: skip
        if shard == self.scale_shard:
            return contents.scale_after(master, skipped=scale is None)
        decided = self.skip or shard not in self.buffer_shards
        if decided and scale is None:
            return master
        scaled = self.scaled(finished, scale if decided and scale is not None else 1.0)
        return self.update(master, scaled, step, rate)
