"""The job's configuration: one typed tree, from the script, a file and dotted overrides; unknown keys are refused.

Precedence, the last one wins: defaults, the script's arguments of `job.train`, the file (`--config job.toml`), dotted
overrides (`--set optimizer.lr.peak=1e-3`). The resolved tree is part of the job record, which all members read.
"""

from __future__ import annotations

from rallypoint.config.resolve import overrides_from as overrides_from
from rallypoint.config.resolve import parse as parse
from rallypoint.config.resolve import record_of as record_of
from rallypoint.config.resolve import resolve as resolve
from rallypoint.config.resolve import with_own_optimizer as with_own_optimizer
from rallypoint.config.tree import Audit as Audit
from rallypoint.config.tree import Evaluation as Evaluation
from rallypoint.config.tree import Group as Group
from rallypoint.config.tree import GroupSettings as GroupSettings
from rallypoint.config.tree import JobConfig as JobConfig
from rallypoint.config.tree import Memory as Memory
from rallypoint.config.tree import Network as Network
from rallypoint.config.tree import Reading as Reading
from rallypoint.config.tree import Settings as Settings
from rallypoint.config.tree import audits_of as audits_of
from rallypoint.config.tree import cadence_of as cadence_of
from rallypoint.config.tree import codec_of as codec_of
from rallypoint.config.tree import group_of as group_of
from rallypoint.config.tree import matrices_of as matrices_of
from rallypoint.config.tree import of_group as of_group
from rallypoint.config.tree import paces_by_port as paces_by_port
from rallypoint.config.tree import ranks_of as ranks_of
from rallypoint.config.tree import settings_applied as settings_applied
from rallypoint.config.tree import settings_of as settings_of
from rallypoint.config.tree import with_start_values as with_start_values
