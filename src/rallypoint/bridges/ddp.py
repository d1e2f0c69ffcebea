"""A communication hook for DistributedDataParallel: its gradients are added up by Rallypoint's servers.

    import rallypoint.bridges.ddp as rallypoint_ddp

    state = rallypoint_ddp.join()                        # before init_process_group
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
    model.register_comm_hook(state, rallypoint_ddp.hook)

DDP gives the hook one bucket of gradients after the other, and gets each one's mean back in the bucket itself.
"""

# No `from __future__ import annotations`: torch looks at the hook's annotations, and wants the classes themselves.

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from rallypoint.bridges.joining import SUMMED, SumPart, sum_of, sums
from rallypoint.errors import UsageError
from rallypoint.worker.collective import Sums

__all__ = ["hook", "join"]


def join() -> Sums:
    """Join the cluster; the result is the hook's state. Call it before ``init_process_group``, on all workers.

    See `bridges.joining.sums`. The first call under ``torchrun`` does not return: the script begins anew.
    """
    return sums()


def hook(state: Sums, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of all workers' gradients of one bucket: the sum by a fixed tree over ranks, in fp32, times 1/world.

    Gradients of 16 bits are added up in fp32, and the mean is rounded once. A bucket on a GPU is copied to the host and
    back. The mean is written into the bucket, where ``gradient_as_bucket_view=True`` has the parameters' gradients.

    The future raises JobAborted when a worker is gone. Raises UsageError for gradients of another type.
    """
    values = bucket.buffer()
    if values.dtype not in SUMMED:
        raise UsageError(f"gradients of {values.dtype}: servers add up in fp32; use float32, bfloat16 or float16")
    return sum_of(state, [SumPart(values, values, factor=1.0 / state.world)], values, values.device)
