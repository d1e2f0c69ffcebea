"""The features that a job may use in its mode: the rows of the table."""

from __future__ import annotations

import enum


class Feature(enum.Enum):
    """One thing that a job may use. The value is how a user writes it.

    A job's features come from its configuration, its model, the terms of its cluster and its script. A feature that
    only the script decides cannot be refused before the script runs: `EVALUATION` works in every mode, and `STOP` and
    `STOP_WHEN` are refused when the script asks for it. What an operator orders is refused then.
    """

    # the configuration
    CLIP = "clip="
    SKIP = 'nonfinite="skip"'
    AVERAGE = "average="
    PLATEAU = "plateau="
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
    FRAGMENTS = "fragments="
    SYNC_EVERY = "sync_every= of a group"
    DELAY = "delay="
    # settings of rp.Async
    FOLD = "fold="
    COMPENSATION = "delay_compensation="
    # the model
    BUFFERS = "buffers (BatchNorm statistics)"
    CARRY = "carry= (state that a replica carries)"
    TABLES = "tables (embeddings whose rows only the servers keep)"
    # the cluster
    SNAPSHOTS = "snapshots"
    ON_DEMAND = "a snapshot on demand"
    RESUME = "resume"
    REPLICATION = "--replication 2"
    BACKUP_TASKS = "--backup-tasks"
    STANDBY = "--standby"
    RESIZE = "workers that join"
    AGGREGATORS = "--aggregators"
    RANKS = "--ranks (a worker that is a group of ranks)"
    BY_SPEED = "assignment by speed"
    # the script
    EVALUATION = "run.every"
    STOP = "run.stop or break"
    STOP_WHEN = "run.stop_when"


STAGGERS = frozenset({Feature.FRAGMENTS, Feature.SYNC_EVERY, Feature.DELAY})  # features that make rounds staggered
UNASKED = frozenset({Feature.BY_SPEED})  # used wherever the mode supports it: no setting asks for it
