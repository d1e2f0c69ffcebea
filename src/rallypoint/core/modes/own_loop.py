"""What a loop of the script's own (`rp.wrap`) does not go together with, and why."""

from __future__ import annotations

from rallypoint.core.modes.features import Feature

OWN_LOOP = {
    Feature.BY_SPEED: "a replica's batches are in its own process; replicas do not move",
    Feature.BACKUP_TASKS: "no other process has the replica's batches; leave --backup-tasks out",
    Feature.AUDIT: "no other process has the replica's batches; leave audit out",
    Feature.FINGERPRINTS: "a replay would need the loop's own batches; leave fingerprints out",
    Feature.STREAMED: "the script's own passes need whole parameters; leave parameters out",
    Feature.FP16: "the script scales its own losses; use bf16 in its own autocast",
    Feature.TABLES: "rows are pulled in the job's own loop; use sparse=False, or job.train",
    Feature.AGGREGATORS: "it is not tested together; leave --aggregators out",
    Feature.RANKS: "each process is one replica; leave --ranks out, or use job.train",
    Feature.STOP_WHEN: "evaluations are the script's own; use optimizer.finish()",
    Feature.PLATEAU: "evaluations are the script's own; use a schedule, or change the rate in the loop",
    Feature.ACCUMULATE: "the script adds up its own micro-batches; leave accumulate out",
}
