"""What a launcher tells its processes by environment variables: the job's address, their name, the token.

No settings.
"""

from __future__ import annotations

COORDINATOR = "RALLYPOINT_COORDINATOR"
TOKEN = "RALLYPOINT_TOKEN"
TOKEN_FILE = "RALLYPOINT_TOKEN_FILE"
ID = "RALLYPOINT_ID"
NEAR = "RALLYPOINT_NEAR"  # the place where a member is: a host or a rack, by any name (see `core.view.Member`)
LIFELINE = "RALLYPOINT_LIFELINE"
ANNOUNCE = "RALLYPOINT_ANNOUNCE"
LISTENS_AT = "the coordinator listens at "  # the beginning of the line that a coordinator prints when it is ready
