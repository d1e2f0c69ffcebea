"""Modes as data: the description of each mode here, one table of which features each mode supports (`table`)."""

from __future__ import annotations

import enum
from collections.abc import Set

import msgspec

from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Mode, Sync

# The features that a job may use in its mode: the rows of the table.


class Feature(enum.Enum):
    """One thing that a job may use. The value is how a user writes it.

    A job's features come from its configuration, its model, the terms of its cluster and its script. A feature that
    only the script decides cannot be refused before the script runs: `STOP` and `DECIDES` are refused when the script
    asks for it. What an operator orders is refused then. What works wherever a job does (snapshots, resuming, workers
    that join or stand by, evaluations) is none.
    """

    # the configuration
    CLIP = "clip="
    SKIP = 'nonfinite="skip"'
    AVERAGE = "average="
    DECIDES = "plateau= or run.stop_when"
    ACCUMULATE = "accumulate="
    MUON = "optimizer=rp.Muon()"
    GROUPS = "weight_decay= or lr_scale= of a group"
    CODEC = "a lossy codec="
    CODEC_STATE = "a codec= with state (error feedback, momentum, factors)"
    DOWN = "a lossy down="
    FP16 = 'precision="fp16"'
    HOLD = 'hold="bf16"'
    STREAMED = 'parameters="streamed"'
    FINGERPRINTS = "fingerprints="
    AUDIT = "audit="
    OWN_OPTIMIZER = "own_optimizer="
    SUMS = "sums for a loop of the script's own (bridges.ddp, bridges.c10d)"
    OWN_LOOP = "rp.wrap (a loop of its own)"
    KEYED = "job.store"
    STREAM = "rp.Stream"
    PASSES = "passes= of rp.Stream"
    # settings of rp.LocalSteps and its groups
    FRESH_INNER = "keep_inner=False"
    PARTS = "fragments= or sync_every= of a group"
    DELAY = "delay="
    # settings of rp.Async
    FOLD = "fold="
    COMPENSATION = "delay_compensation="
    # the model
    BUFFERS = "buffers (BatchNorm statistics)"
    CARRY = "carry= (state that a replica carries)"
    TABLES = "tables (embeddings whose rows only the servers keep)"
    # the cluster
    REPLICATION = "--replication 2"
    BACKUP_TASKS = "--backup-tasks"
    AGGREGATORS = "--aggregators"
    RANKS = "--ranks (a worker that is a group of ranks)"
    # the script
    STOP = "run.stop or break"

    @classmethod
    def _missing_(cls, value: object) -> Feature | None:
        """As earlier versions wrote it into records."""
        kept = {"plateau=": cls.DECIDES, "fragments=": cls.PARTS, "sync_every= of a group": cls.PARTS}
        return kept.get(str(value))


STAGGERS = frozenset({Feature.PARTS, Feature.DELAY})  # features that make rounds staggered


class ModeName(enum.Enum):
    """The columns of the table. The value is how a user writes it."""

    SYNC = "Sync()"
    QUORUM = "Sync(quorum=k)"
    SSP = "BoundedStaleness(s)"
    ASYNC = "Async()"
    ALL_REDUCE = "AllReduce()"
    LOCAL = "LocalSteps(H)"
    STAGGERED = "LocalSteps(H) with fragments, sync_every or delay"
    LOCAL_QUORUM = "LocalSteps(H, over=Sync(quorum=k))"
    LOCAL_ASYNC = "LocalSteps(H, over=Async())"


class Clock(enum.Enum):
    """What a version of the job counts."""

    STEP = "steps"
    ROUND = "rounds of H steps"
    STAGGERED = "staggered rounds"
    REPLICA = "each replica's own contributions"


class Pace(enum.Enum):
    """Whether replicas go from step to step together."""

    ROUNDS = "all of them begin a round together"
    OWN = "each at a clock of its own, so that no version is common to all shards"


class StateHolder(enum.Enum):
    """Who holds the parameters and the optimizer's state. Losing members of the other kind loses no state."""

    SERVERS = "servers"
    WORKERS = "workers"


class Contribution(enum.Enum):
    """What a replica pushes."""

    GRADIENT = "gradient"
    MOVEMENT = "start - local"


class Bytes(enum.Enum):
    """When the job ends with the same bytes on any number of workers and servers."""

    ALWAYS = "whatever is killed"
    UNDISTURBED = "while no worker dies and nothing rolls back"
    NO = "no"


class ModeTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The description of one mode, for all code but the policies and the workers' sources.

    Attributes:
        name: the column of the table.
        clock: what a version of the job counts.
        holder: who holds the parameters and the optimizer's state.
        contribution: what a replica pushes.
        drops: a contribution that arrives late may be dropped.
        bytes: when the same bytes at the end are promised.
        leaves_state: a replica leaves state on the worker that computes it: the inner optimizer's, or a codec's.
    """

    name: ModeName = ModeName.SYNC
    clock: Clock = Clock.STEP
    holder: StateHolder = StateHolder.SERVERS
    contribution: Contribution = Contribution.GRADIENT
    drops: bool = False
    bytes: Bytes = Bytes.ALWAYS
    leaves_state: bool = False

    @property
    def pace(self) -> Pace:
        """Whether replicas go from step to step together."""
        return Pace.OWN if self.clock is Clock.REPLICA else Pace.ROUNDS

    @property
    def whole_versions(self) -> bool:
        """True if servers step, and every step of a replica is a gradient at one version of all parameters."""
        gradients = self.contribution is Contribution.GRADIENT and self.holder is StateHolder.SERVERS
        return gradients and self.pace is Pace.ROUNDS

    @property
    def accounts(self) -> bool:
        """True if servers report how many contributions they applied, folded and dropped. False where
        contributions can only be applied."""
        return self.drops or self.pace is Pace.OWN


MODES = {
    traits.name: traits
    for traits in (
        ModeTraits(),
        ModeTraits(name=ModeName.QUORUM, drops=True, bytes=Bytes.NO),
        ModeTraits(name=ModeName.SSP, clock=Clock.REPLICA, bytes=Bytes.NO),
        ModeTraits(name=ModeName.ASYNC, clock=Clock.REPLICA, bytes=Bytes.NO),
        ModeTraits(name=ModeName.ALL_REDUCE, holder=StateHolder.WORKERS),
        ModeTraits(
            name=ModeName.LOCAL, clock=Clock.ROUND, contribution=Contribution.MOVEMENT, bytes=Bytes.UNDISTURBED,
            leaves_state=True,
        ),
        ModeTraits(
            name=ModeName.STAGGERED, clock=Clock.STAGGERED, contribution=Contribution.MOVEMENT,
            bytes=Bytes.UNDISTURBED, leaves_state=True,
        ),
        ModeTraits(
            name=ModeName.LOCAL_QUORUM, clock=Clock.ROUND, contribution=Contribution.MOVEMENT, drops=True,
            bytes=Bytes.NO, leaves_state=True,
        ),
        ModeTraits(
            name=ModeName.LOCAL_ASYNC, clock=Clock.REPLICA, contribution=Contribution.MOVEMENT, bytes=Bytes.NO,
            leaves_state=True,
        ),
    )
}  # fmt: skip


def name_of(sync: Mode, features: Set[Feature] = frozenset()) -> ModeName:
    """The mode of a job with this `sync=` setting and these features."""
    match sync:
        case AllReduce():
            return ModeName.ALL_REDUCE
        case BoundedStaleness(staleness=0) | Sync(quorum=None):
            return ModeName.SYNC
        case Sync():
            return ModeName.QUORUM
        case BoundedStaleness():
            return ModeName.SSP
        case Async():
            return ModeName.ASYNC
        case LocalSteps(over=Async()):
            return ModeName.LOCAL_ASYNC
        case LocalSteps(over=Sync(quorum=None)):
            return ModeName.STAGGERED if STAGGERS & features else ModeName.LOCAL
        case LocalSteps():
            return ModeName.LOCAL_QUORUM


def describe(sync: Mode, features: Set[Feature] = frozenset()) -> ModeTraits:
    """The description of `sync`, in a job with these `features`."""
    traits = MODES[name_of(sync, features)]
    if Feature.KEYED in features:  # each key counts its own updates, and what is pushed is the script's own affair
        traits = msgspec.structs.replace(traits, clock=Clock.REPLICA, bytes=Bytes.NO)
    leaves_state = Feature.CODEC_STATE in features or (traits.leaves_state and Feature.FRESH_INNER not in features)
    if leaves_state == traits.leaves_state:
        return traits
    promised = Bytes.UNDISTURBED if leaves_state else Bytes.ALWAYS
    return msgspec.structs.replace(
        traits, leaves_state=leaves_state, bytes=Bytes.NO if traits.bytes is Bytes.NO else promised
    )
