"""What does not go together with sums for a script's own loop, and why: a part of the table's conflicts."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.core.modes.features import Feature

_ALONE = "nobody else can compute what a worker of the script's own loop does; use job.train"
NOT_WITH_SUMS: Mapping[Feature, str] = {
    Feature.CLIP: "servers do not know what is summed; use torch.nn.utils.clip_grad_norm_ in the script",
    Feature.SKIP: "servers do not know what is summed; use torch.amp.GradScaler in the script",
    Feature.AVERAGE: "the script holds the parameters; use torch.optim.swa_utils.AveragedModel there",
    Feature.PLATEAU: "the script steps; use torch.optim.lr_scheduler.ReduceLROnPlateau there",
    Feature.CODEC: "sums are exact, of whatever the script sums; use the raw codec",
    Feature.DOWN: "sums are exact, of whatever the script sums; leave down= out",
    Feature.FP16: "the script scales its own loss; use torch.amp.GradScaler there",
    Feature.STREAMED: "the script holds the parameters; use parameters=local",
    Feature.AUDIT: _ALONE,
    Feature.AGGREGATORS: "each sum is a round of its own, of some of the shards; use servers near the workers",
    Feature.BACKUP_TASKS: _ALONE,
}
