"""A step across data centres: what the links between sites carry, and how long that takes.

Members are spread evenly over the sites. A site's link has one rate in each direction; no two sites share one.
"""

from __future__ import annotations

import math

import msgspec

from rallypoint.core.cost.site import ACKNOWLEDGED, PAYLOAD
from rallypoint.core.cost.workload import Workload
from rallypoint.core.layout import WORD_BYTES

EXCHANGES = 4  # waits of one delay in a step: a push, its backup's copy, the backup's word, the new version


class Sites(msgspec.Struct, frozen=True, kw_only=True):
    """The sites of a job.

    Attributes:
        count: how many.
        rate: bytes a second of one site's link to all others, each direction.
        delay: seconds from one site to another.
        senders: who sends at each site: its workers, or one aggregator.
        replication: with 2, servers send what they have added up, in fp32, to a backup at another site.
        fragments: a round of local steps exchanges the model in so many parts, one after the other (streaming).
    """

    count: int
    rate: float
    delay: float = 0.0
    senders: int = 1
    replication: int = 1
    fragments: int = 1


ONE_SITE = Sites(count=1, rate=math.inf)


def uplink_bytes(workload: Workload, sites: Sites) -> float:
    """Bytes that one site sends to others in a round, and gets: of each sender all but its own site's part.

    Example: 3 sites with a worker and a server each, K of fp32, two copies: 2/3 K of contributions, 2/3 K of versions,
    1/3 K to a backup: 5/3 K. (docs/sites.md has the same for `Sync()`.)
    """
    away = (sites.count - 1) / sites.count
    words = workload.words
    copies = (sites.replication - 1) * WORD_BYTES * words / sites.count
    return sites.senders * away * words * (workload.up + workload.down) + copies


def sites_seconds(workload: Workload, sites: Sites, near: float) -> float:
    """Seconds of a step; `near` are those of a step inside a site, where no link between sites is used.

    Without local steps computing goes on while links carry something, and waits for the delays. A round of local steps
    ends before it is exchanged, and the next one waits for all of that; with fragments an exchange goes on while later
    steps are computed, and must end before the next one begins. The least it can be: TCP's slow start, losses and
    uneven connections come on top (docs/scale.md says how much).
    """
    if sites.count < 2:
        return near
    exchange = uplink_bytes(workload, sites) / sites.fragments / (sites.rate * PAYLOAD / ACKNOWLEDGED)
    between = workload.steps / sites.fragments  # steps from one exchange to the next
    delays = EXCHANGES * sites.delay
    if sites.fragments > 1:
        return max(near, (exchange + delays) / between)
    if workload.steps > 1:
        return near + (exchange + delays) / between
    return max(near, exchange) + delays
