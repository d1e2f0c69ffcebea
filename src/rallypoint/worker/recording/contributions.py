"""Digests of a replica's contribution, shard by shard, taken while it is on its way (`fingerprints=`)."""

from __future__ import annotations

import torch

from rallypoint.codec.base.leaf import digest_of
from rallypoint.core.layout import Layout
from rallypoint.core.sums.digests import DIGEST_BYTES, dense_shards

_UNKNOWN = bytes(DIGEST_BYTES)


class Contributions:
    """The digests of the replica in progress, at every `every`-th step; 0: never.

    Calls for each replica: `begin`, `filled` for each shard, `take`. `filled` comes from the thread that fills slots,
    which is idle when `take` is called.
    """

    def __init__(self, layout: Layout, every: int) -> None:
        self._every = every
        self._places = {shard: place for place, shard in enumerate(dense_shards(layout))}
        self._digests: list[bytes] = []
        self.active = False

    def begin(self, step: int, replica: int) -> None:
        """A replica begins. `active` is True while its contribution is recorded."""
        self.active = self._every > 0 and step % self._every == 0
        self._digests = [_UNKNOWN] * len(self._places) if self.active else []

    def filled(self, shard: int, gradient: torch.Tensor, weight: float) -> None:
        """The replica's gradient for this shard is whole: fp32, 1-D, in the host's memory. It is not changed."""
        if self.active and (place := self._places.get(shard)) is not None:
            self._digests[place] = digest_of(gradient, weight)

    def take(self) -> bytes:
        """The replica is computed: return the digests in the order of `dense_shards`.

        They are zeros for a shard that was not seen; b"" if none are recorded.
        """
        found, self._digests, self.active = b"".join(self._digests), [], False
        return found
