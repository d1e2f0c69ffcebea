"""Control messages about what was computed: digests for replays (`fingerprints=`), findings of audits (`audit=`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from rallypoint.core.sums.digests import DIGEST_BYTES
from rallypoint.core.typed import Index
from rallypoint.core.view import ViewNumber
from rallypoint.net.greetings import AnyMessage

MOST_DIGESTS = 1 << 17
Digests = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=MOST_DIGESTS * DIGEST_BYTES)]

Workers = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=16)]


class Fingerprint(AnyMessage, frozen=True):
    """Digests of 16 bytes each, one after the other, and the generation in which they were computed."""


class Contributed(Fingerprint, frozen=True):
    """From a worker: a replica's contribution to `step`, a digest for each of `dense_shards`, and its mean loss."""

    step: Index
    replica: Index
    loss: float
    digests: Digests
    generation: ViewNumber = ViewNumber()


class Updated(Fingerprint, frozen=True):
    """From a server: what a shard holds at `version`, a digest for each of `pieces_of`."""

    version: Index
    shard: Index
    digests: Digests
    generation: ViewNumber = ViewNumber()


class AuditFound(AnyMessage, frozen=True):
    """From a server: what an audit of this contribution has found, first in this shard.

    `agreed` have sent the same bytes and `others` something else: they have lost. Without `agreed`, all of `others`
    have sent different bytes, and the step waits.
    """

    step: Index
    replica: Index
    shard: Index
    agreed: Workers
    others: Workers
    generation: ViewNumber = ViewNumber()
