"""What a launcher tells its processes by environment variables: the job's address, their name, the token.

No settings.
"""

from __future__ import annotations

import os

from rallypoint.net.tcp import TcpTransport

COORDINATOR = "RALLYPOINT_COORDINATOR"
TOKEN = "RALLYPOINT_TOKEN"
ID = "RALLYPOINT_ID"
LIFELINE = "RALLYPOINT_LIFELINE"
ANNOUNCE = "RALLYPOINT_ANNOUNCE"
TRUST_NETWORK = "RALLYPOINT_TRUST_NETWORK"
LISTENS_AT = "the coordinator listens at "  # the beginning of the line that a coordinator prints when it is ready


def transport() -> TcpTransport:
    """TCP that trusts the networks of RALLYPOINT_TRUST_NETWORK (10.0.0.0/8,fd00::/8) beside loopback.

    UsageError if one of them is no network. Both ends of a connection must trust it: see docs/security.md.
    """
    return TcpTransport(network for network in os.environ.get(TRUST_NETWORK, "").split(",") if network)
