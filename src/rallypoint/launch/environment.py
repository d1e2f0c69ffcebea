"""What a launcher tells the processes it starts: where the job is, who they are, how to prove it. Not what to do."""

from __future__ import annotations

COORDINATOR = "RALLYPOINT_COORDINATOR"
TOKEN = "RALLYPOINT_TOKEN"
ID = "RALLYPOINT_ID"
LIFELINE = "RALLYPOINT_LIFELINE"
ANNOUNCE = "RALLYPOINT_ANNOUNCE"
LISTENS_AT = "the coordinator listens at "  # how the line begins that a coordinator prints once it is ready
