"""Which codec state a worker encodes a contribution with. The TCP encoder and the simulation's use it."""

from __future__ import annotations

import enum


class Encoding(enum.Enum):
    """What a worker does with the codec state that it keeps of a (shard, replica)."""

    AGAIN = "send the kept contribution again"
    OVER = "send nothing of use: the shard is past this step"
    NEXT = "encode with the kept state, if any"
    ANEW = "drop the kept state, which is stale, and encode without one"


def encoding_of(kept: int | None, step: int, *, drops: bool) -> Encoding:
    """What to do with a contribution to `step`, where the kept state is the one after step `kept` (None: no state).

    Without `drops` each replica contributes to every step. So a state that lacks a step is stale: this worker was given
    up, and another one has contributed that step from a codec state of its own. Example: this worker keeps the state
    after step 2, and is to encode step 4. With `drops` (a quorum) a step may have done without the replica, and the
    state goes on.
    """
    if kept is None:
        return Encoding.NEXT
    if kept >= step:
        return Encoding.AGAIN if kept == step else Encoding.OVER
    return Encoding.NEXT if drops or kept == step - 1 else Encoding.ANEW
