"""FEATURE x MODE: what works in which mode, and why the rest does not; and which features exclude one another.

`config` refuses from it, the coordinator refuses a cluster's terms from it, `docs/mode-table.md` prints it, and
`tests/modes` runs a job for every cell that is supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import msgspec

from rallypoint.core.modes import Feature, ModeName, name_of
from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Mode, Sync

# ---- Features that do not work together, whatever the table says of each ----

# What a loop of the script's own (`rp.wrap`) does not go together with, and why.

OWN_LOOP = {
    Feature.BACKUP_TASKS: "no other process has the replica's batches; leave --backup-tasks out",
    Feature.AUDIT: "no other process has the replica's batches; leave audit out",
    Feature.FINGERPRINTS: "a replay would need the loop's own batches; leave fingerprints out",
    Feature.STREAMED: "the script's own passes need whole parameters; leave parameters out",
    Feature.FP16: "the script scales its own losses; use bf16 in its own autocast",
    Feature.TABLES: "rows are pulled in the job's own loop; use sparse=False, or job.train",
    Feature.AGGREGATORS: "it is not tested together; leave --aggregators out",
    Feature.DECIDES: "evaluations are the script's own; use optimizer.finish(), or change the rate in the loop",
    Feature.ACCUMULATE: "the script adds up its own micro-batches; leave accumulate out",
}


_F = Feature
_STREAMING = frozenset({ModeName.SSP, ModeName.ASYNC, ModeName.LOCAL_ASYNC})


class Conflict(msgspec.Struct, frozen=True):
    """Two features that do not work together, in these modes (by default in all)."""

    first: Feature
    second: Feature
    why: str
    modes: frozenset[ModeName] = frozenset(ModeName)


CONFLICTS = (
    *(Conflict(*pair, why) for pair, why in {
        (_F.BACKUP_TASKS, _F.CODEC_STATE):
            "the codec's state of a replica is on the worker that computes it; use a codec without state "
            "(error_feedback=False), or leave --backup-tasks out",
        (_F.AGGREGATORS, _F.BACKUP_TASKS):
            "an aggregator waits for the replicas of the workers near it, so the copy elsewhere would be waited for in "
            "vain; leave one of them out",
        (_F.AGGREGATORS, _F.CODEC_STATE):
            "servers keep the state with the contribution that it was made for, and an aggregator adds contributions "
            "up; use a codec without state (error_feedback=False), or leave --aggregators out",
        (_F.AGGREGATORS, _F.TABLES):
            "replicas contribute different rows, so their sum would hardly be smaller; use sparse=False, or leave "
            "--aggregators out",
        (_F.FP16, _F.CODEC_STATE):
            "what a codec keeps of one step is scaled by that step's loss scale, and is sent with the next; use a "
            "codec without state (error_feedback=False), or precision=\"bf16\"",
    }.items()),
    *(Conflict(_F.STREAMED, other, f"{why}, or leave {_F.STREAMED.value} out") for other, why in {
        _F.ACCUMULATE: "the sum over micro-batches would take as much memory as the model; use more replicas in place "
                       "of accumulate",
        _F.CODEC: "gradients leave as they are made; use the raw codec",
        _F.DOWN: "workers pull parts of shards, and those are not encoded; leave down= out",
        _F.TABLES: "its rows are pulled in another way; use sparse=False",
        _F.AGGREGATORS: "an aggregator passes whole versions on, and workers pull parts; leave --aggregators out",
        _F.RANKS: "ranks share whole versions among themselves; use FSDP2 with --ranks",
    }.items()),
    *(Conflict(_F.DECIDES, other, f"{why}, or leave plateau= and run.stop_when out") for other, why in {
        _F.HOLD: "workers hold rounded versions, so none can be evaluated again; use fp32",
        _F.DOWN: "workers get rounded versions, so none can be evaluated again; leave down= out",
        _F.STREAMED: "a version cannot be evaluated again by a worker that holds no parameters; use "
        "memory.parameters=local",
        _F.TABLES: "no worker holds its rows, so no version can be evaluated again; use sparse=False",
        _F.RANKS: "only one rank hears what is decided; use workers of one process",
    }.items()),
    *(Conflict(_F.CARRY, other, f"{why}, or leave carry= out") for other, why in {
        _F.RANKS: "the ranks of a worker share one model, and would each have a part of what a replica carries; use "
                  "workers of one process",
        _F.STREAMED: "a worker that keeps no parameters takes no whole versions; use memory.parameters=local",
        _F.DELAY: "each round would have to begin with what the one before has left; use delay=0",
    }.items()),
    *(Conflict(_F.AUDIT, other, f"{why}, or leave audit out") for other, why in {
        _F.CODEC_STATE: "what a codec remembers of a replica is on the worker that computes it, so no other sends the "
                        "same bytes; use a codec without state (error_feedback=False)",
        _F.STREAMED: "a worker that keeps no parameters computes each replica once; use memory.parameters=local",
        _F.TABLES: "audits do not compare rows of tables yet; use sparse=False",
        _F.RANKS: "workers of several ranks do not audit each other yet; use workers of one process",
        _F.AGGREGATORS: "an aggregator adds contributions up before servers can compare them; leave --aggregators out",
    }.items()),
    *(Conflict(_F.OWN_LOOP, other, why) for other, why in OWN_LOOP.items()),
    *(Conflict(*pair, why) for pair, why in {
        (_F.STREAM, _F.RANKS):
            "each rank of a worker would read the stream by itself, which is not tested; use workers of one process",
        (_F.PASSES, _F.BACKUP_TASKS):
            "a worker that the others do not wait for may see the stream's end; leave --backup-tasks or passes out",
        (_F.FOLD, _F.REPLICATION):
            "the backup applies each contribution by itself, so none is folded into another's update; use fold=1, or "
            "leave --replication out",
        (_F.GROUPS, _F.OWN_OPTIMIZER):
            "groups cannot set a decay or a rate where own_optimizer steps; give them to its own param_groups",
        (_F.TABLES, _F.AVERAGE):
            "every row of it would have to be averaged at every step, also rows that are not used; use sparse=False, "
            "or leave average out",
        (_F.TABLES, _F.COMPENSATION):
            "delay compensation is not supported for it; set it to 0, or use sparse=False",
    }.items()),
    Conflict(
        _F.TABLES, _F.CLIP,
        "in a streaming mode its gradient cannot be clipped; set clip to None, or use sparse=False",
        _STREAMING,
    ),
    Conflict(
        _F.BUFFERS, _F.DELAY,
        "each round would have to begin with the buffers of the round before; use delay=0, or GroupNorm and the like",
    ),
)  # fmt: skip


class StandsAlone(msgspec.Struct, frozen=True):
    """A feature of jobs without a training loop of ours: it goes together with `takes`, and with nothing else."""

    feature: Feature
    takes: frozenset[Feature]
    why: str


ALONE = (
    StandsAlone(
        _F.KEYED, frozenset({_F.SKIP, _F.TABLES, _F.REPLICATION}),
        "a store has no steps: each push to a key is an update of its own; leave it out, do it "
        "before you push, or use job.train",
    ),
    StandsAlone(
        _F.SUMS, frozenset({_F.STOP, _F.REPLICATION}),
        "servers add up exactly what the script gives them, and do not know what it is; leave it out, and do it in the "
        "script (with torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler, torch.optim), or use job.train",
    ),
)  # fmt: skip


class Yes(msgspec.Struct, frozen=True):
    """The feature works, and the mode's promises hold with it."""


class No(msgspec.Struct, frozen=True):
    """The feature is refused; `why` says the reason and what to do."""

    why: str


class Only(msgspec.Struct, frozen=True):
    """The feature works only together with `beside`; `why` says what to do without it."""

    beside: Feature
    why: str


Cell = Yes | No | Only
YES = Yes()

_M, _F = ModeName, Feature
_LOCAL = {_M.LOCAL, _M.STAGGERED, _M.LOCAL_QUORUM, _M.LOCAL_ASYNC}
_STREAMING = frozenset({_M.SSP, _M.ASYNC, _M.LOCAL_ASYNC})

_OF_LOCAL = No("it is for sync=rp.LocalSteps; leave it out")
_OF_ASYNC = No("it is a setting of rp.Async; leave it out")
_OVER_SYNC = No("it needs over=rp.Sync() without a quorum; use that, or leave it out")
_OWN_CLOCKS = No("each replica goes on at its own clock and nobody waits for a straggler; leave --backup-tasks out")
_ONLY_FRESH = Only(
    _F.FRESH_INNER,
    "the inner optimizer's state stays on the worker that computes a replica; use keep_inner=False, or leave "
    "--backup-tasks out",
)
_ONE_BY_ONE = No(
    "a quorum takes replicas one by one, in the order in which they come, so there is nothing to add up on the way; "
    "leave --aggregators out"
)
_DECIDES_NOT = No(
    "it counts from a version that all replicas compute from, and that anybody can evaluate again; use sync=rp.Sync() "
    "without a quorum, or leave it out"
)
_NO_KEYS = No("each key of a store goes on by itself; use sync=rp.Sync(), rp.BoundedStaleness(s) or rp.Async()")


def _row(others: Cell = YES, cells: Mapping[ModeName, Cell] | None = None) -> dict[ModeName, Cell]:
    return {mode: (cells or {}).get(mode, others) for mode in ModeName}


def _local(cell: Cell) -> dict[ModeName, Cell]:
    return dict.fromkeys(_LOCAL, cell)


def _staggering() -> dict[ModeName, Cell]:
    over = {_M.LOCAL_QUORUM: _OVER_SYNC, _M.LOCAL_ASYNC: _OVER_SYNC}
    return _row(_OF_LOCAL, {_M.LOCAL: YES, _M.STAGGERED: YES, **over})


def _of_async() -> dict[ModeName, Cell]:
    return _row(_OF_ASYNC, {_M.ASYNC: YES, _M.LOCAL_ASYNC: YES})


TABLE: Mapping[Feature, Mapping[ModeName, Cell]] = {
    _F.CLIP: _row(),
    _F.SKIP: _row(
        YES,
        {_M.STAGGERED: No("what a replica has changed since its last round would be lost with the step; use 'stop'")},
    ),
    _F.AVERAGE: _row(YES, {
        _M.ALL_REDUCE: No(
            "workers hold the parameters, and the script can average its own model: use "
            "torch.optim.swa_utils.AveragedModel there, or sync=rp.Sync()"
        )
    }),
    _F.DECIDES: _row(_DECIDES_NOT, {_M.SYNC: YES}),
    _F.ACCUMULATE: _row(),
    _F.GROUPS: _row(),
    _F.MUON: _row(YES, {
        **_local(No("workers step between two rounds; use another optimizer, or sync=rp.Sync()")),
        _M.ALL_REDUCE: No("workers step: use torch's own, own_optimizer=torch.optim.Muon(...), or sync=rp.Sync()"),
    }),
    _F.CODEC: _row(),
    _F.CODEC_STATE: _row(),
    _F.DOWN: _row(),
    _F.FP16: _row(
        No(
            "its loss scale follows from decisions that servers take once for all replicas of a step; use "
            'precision="bf16", which needs no scale'
        ),
        {_M.SYNC: YES},
    ),
    _F.HOLD: _row(YES, {
        **_local(No("under rp.LocalSteps workers step the parameters themselves, which needs fp32; leave it out")),
        _M.ALL_REDUCE: No("workers step the parameters themselves, which needs fp32; leave it out"),
    }),
    _F.STREAMED: _row(No(
        "a worker that keeps no parameters needs versions that all of them compute from, and each replica's "
        "gradient once; use sync=rp.Sync() without a quorum, or leave it out"
    ), {_M.SYNC: YES}),
    _F.FINGERPRINTS: _row(YES, {
        **dict.fromkeys((_M.SSP, _M.ASYNC, _M.LOCAL_ASYNC, _M.QUORUM, _M.LOCAL_QUORUM), No(
            "what a version has of which replica depends on when it came, so no step can be computed again alike; "
            "leave it out"
        )),
        _M.ALL_REDUCE: No("the optimizer is on the workers, which replays do not restore yet; leave it out"),
        **dict.fromkeys((_M.LOCAL, _M.STAGGERED), No(
            "a round is many steps of a replica's own, which replays do not go through yet; leave it out"
        )),
    }),
    _F.AUDIT: _row(No(
        "a second worker has to compute the same contribution from the same version, and the step has to wait for "
        "it; use sync=rp.Sync() without a quorum, or leave it out"
    ), {_M.SYNC: YES}),
    _F.SUMS: _row(No("a script's loop waits for sums of all workers; use sync=rp.Sync()"), {_M.SYNC: YES}),
    _F.OWN_OPTIMIZER: _row(
        No("it needs sync=rp.AllReduce(), where workers step; use optimizer= in other modes"),
        {_M.ALL_REDUCE: YES},
    ),
    _F.OWN_LOOP: _row(
        No("such a loop waits for each version after its own gradient; use sync=rp.Sync() or sync=rp.AllReduce()"),
        {_M.SYNC: YES, _M.ALL_REDUCE: YES},
    ),
    _F.FRESH_INNER: _row(_OF_LOCAL, {
        **_local(YES),
        _M.STAGGERED: No(
            "what a replica has changed goes on from round to round, and so must its optimizer's state; leave "
            "keep_inner out, or synchronise everything at once"
        ),
    }),
    _F.PARTS: _staggering(),
    _F.DELAY: _staggering(),
    _F.FOLD: _of_async(),
    _F.COMPENSATION: _of_async(),
    _F.BUFFERS: _row(),
    _F.CARRY: _row(YES, {
        **dict.fromkeys((_M.QUORUM, _M.LOCAL_QUORUM), No(
            "a step may do without a replica, and what that replica carries would be left behind; use "
            "sync=rp.Sync() without a quorum, or leave carry= out"
        )),
        **dict.fromkeys(_STREAMING, No(
            "each replica goes on at its own clock, and what it carries belongs to a version that all have; use "
            "sync=rp.Sync(), or leave carry= out"
        )),
    }),
    _F.TABLES: _row(YES, {
        **_local(No("under rp.LocalSteps the worker would have to hold it; use another mode, or sparse=False")),
        _M.ALL_REDUCE: No("under rp.AllReduce the worker would have to hold it; use another mode, or sparse=False"),
    }),
    _F.REPLICATION: _row(YES, {
        _M.ALL_REDUCE: No(
            "every worker holds the whole state, so nothing is lost with a server; leave --replication out"
        )
    }),
    _F.BACKUP_TASKS: _row(YES, {
        **dict.fromkeys(_STREAMING, _OWN_CLOCKS),
        _M.ALL_REDUCE: No("a worker that is overtaken could not follow any more; leave --backup-tasks out"),
        _M.LOCAL: _ONLY_FRESH,
        _M.LOCAL_QUORUM: _ONLY_FRESH,
        _M.STAGGERED: No("what a replica has changed stays on the worker that computes it; leave --backup-tasks out"),
    }),
    _F.AGGREGATORS: _row(YES, {
        **dict.fromkeys(_STREAMING, No(
            "each replica's contribution is applied by itself, so there is nothing to add up on the way; leave "
            "--aggregators out"
        )),
        _M.QUORUM: _ONE_BY_ONE,
        _M.LOCAL_QUORUM: _ONE_BY_ONE,
    }),
    _F.RANKS: _row(
        No("the parameters or the optimizer of a replica would have to be kept on each rank; use sync=rp.Sync()"),
        {_M.SYNC: YES, _M.QUORUM: YES, **dict.fromkeys((_M.SSP, _M.ASYNC), No(
            "a version may come in part, and ranks take whole ones; use sync=rp.Sync()"
        ))},
    ),
    _F.STOP: _row(YES, {
        **dict.fromkeys(_STREAMING, No(
            "each replica goes on at its own clock, so there is no last version that all could end with; use a "
            "lower steps="
        )),
        _M.STAGGERED: No(
            "all layers are synchronised in the last round, which has to be known at the start; use a lower steps="
        ),
    }),
    _F.STREAM: _row(),
    _F.PASSES: _row(No(
        "the job would have to end where a replica has no batch any more, and its replicas are not all at one "
        "step; leave passes out, and give steps"
    ), {_M.SYNC: YES, _M.ALL_REDUCE: YES}),
    _F.KEYED: _row(_NO_KEYS, dict.fromkeys((_M.SYNC, _M.SSP, _M.ASYNC), YES)),
}


# The sentences that refuse the features that a job's mode does not support.


def refusal(mode: ModeName, features: Set[Feature]) -> str:
    """The sentence why a job cannot use these `features` in this mode; "" if it can."""
    if (found := next(_unsupported(mode, frozenset(features)), None)) is None:
        return ""
    pair, why = found
    where = f"under rp.{mode.value}" if len(pair) == 1 else f"together with {pair[1].value}"
    return f"{pair[0].value} is not supported {where}: {why}"


# Settings that are fields of one mode's class only.
_FIELDS = {
    "keep_inner": Feature.FRESH_INNER, "fragments": Feature.PARTS, "delay": Feature.DELAY, "fold": Feature.FOLD,
    "delay_compensation": Feature.COMPENSATION,
}  # fmt: skip
_TYPES: dict[str, Mode] = {
    "sync": Sync(), "bounded-staleness": BoundedStaleness(1), "async": Async(), "all-reduce": AllReduce(),
    "local-steps": LocalSteps(1),
}  # fmt: skip


def of_another_mode(sync: Mapping[str, Any]) -> str:
    """The sentence that refuses a field of `sync` (as plain data) that only another mode has; "" if there is none."""
    mode, over = _TYPES.get(sync.get("type", "sync")), sync.get("over")
    if mode is None:
        return ""
    strange = _strange(mode, sync)
    if isinstance(over, Mapping) and (policy := _TYPES.get(over.get("type", "sync"))) is not None:
        strange |= _strange(policy, over)
    return refusal(name_of(mode), strange)


def _strange(mode: Mode, fields: Iterable[str]) -> set[Feature]:
    return {_FIELDS[field] for field in fields if field in _FIELDS and field not in type(mode).__struct_fields__}


def why_not(mode: ModeName, feature: Feature, features: Set[Feature] = frozenset()) -> str:
    """The reason, without the sentence, why `feature` does not work in this mode with `features`; "" if it does."""
    together = frozenset({*features, feature})
    return next((why for pair, why in _unsupported(mode, together) if feature in pair), "")


def _unsupported(mode: ModeName, features: frozenset[Feature]) -> Iterator[tuple[tuple[Feature, ...], str]]:
    """Each feature that is not supported, or pair that does not go together, and why."""
    for feature in Feature:
        if feature in features and (why := _why_not(TABLE[feature][mode], features)):
            yield (feature,), why
    for conflict in CONFLICTS:
        if mode in conflict.modes and {conflict.first, conflict.second} <= features:
            yield (conflict.first, conflict.second), conflict.why
    for alone in ALONE:
        for feature in Feature if alone.feature in features else ():
            if feature in features - alone.takes and feature is not alone.feature:
                yield (alone.feature, feature), alone.why


def _why_not(cell: Cell, features: frozenset[Feature]) -> str:
    match cell:
        case No(why=why):
            return why
        case Only(beside=beside, why=why) if beside not in features:
            return why
        case _:
            return ""
