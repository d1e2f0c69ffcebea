"""Features that do not work together, whatever the table says of each: the other half of FEATURE x MODE."""

from __future__ import annotations

import msgspec

from rallypoint.core.modes import Feature, ModeName

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
    Conflict(
        _F.BACKUP_TASKS, _F.CODEC_STATE,
        "the codec's state of a replica is on the worker that computes it; use a codec without state "
        "(error_feedback=False), or leave --backup-tasks out",
    ),
    Conflict(
        _F.AGGREGATORS, _F.BACKUP_TASKS,
        "an aggregator waits for the replicas of the workers near it, so the copy elsewhere would be waited for in "
        "vain; leave one of them out",
    ),
    Conflict(
        _F.AGGREGATORS, _F.CODEC_STATE,
        "servers keep the state with the contribution that it was made for, and an aggregator adds contributions up; "
        "use a codec without state (error_feedback=False), or leave --aggregators out",
    ),
    Conflict(
        _F.AGGREGATORS, _F.TABLES,
        "replicas contribute different rows, so their sum would hardly be smaller; use sparse=False, or leave "
        "--aggregators out",
    ),
    Conflict(
        _F.FP16, _F.CODEC_STATE,
        "what a codec keeps of one step is scaled by that step's loss scale, and is sent with the next; use a codec "
        "without state (error_feedback=False), or precision=\"bf16\"",
    ),
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
    Conflict(
        _F.STREAM, _F.RANKS,
        "each rank of a worker would read the stream by itself, which is not tested; use workers of one process",
    ),
    Conflict(
        _F.PASSES, _F.BACKUP_TASKS,
        "a worker that the others do not wait for may see the stream's end; leave --backup-tasks or passes out",
    ),
    Conflict(
        _F.FOLD, _F.REPLICATION,
        "the backup applies each contribution by itself, so none is folded into another's update; use fold=1, or leave "
        "--replication out",
    ),
    Conflict(
        _F.GROUPS, _F.OWN_OPTIMIZER,
        "groups cannot set a decay or a rate where own_optimizer steps; give them to its own param_groups",
    ),
    Conflict(
        _F.TABLES, _F.AVERAGE,
        "every row of it would have to be averaged at every step, also rows that are not used; use sparse=False, or "
        "leave average out",
    ),
    Conflict(
        _F.TABLES, _F.COMPENSATION,
        "delay compensation is not supported for it; set it to 0, or use sparse=False",
    ),
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
