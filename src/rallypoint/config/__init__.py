"""The job's configuration: one typed tree, from the script, a file and dotted overrides; unknown keys are refused.

Precedence, the last one wins: defaults, the script's arguments of `job.train`, the file (`--config job.toml`), dotted
overrides (`--set optimizer.lr.peak=1e-3`). The resolved tree is part of the job record, which all members read.
"""

from __future__ import annotations

from rallypoint.config.resolve import overrides_from, parse, record_of, resolve, with_own_optimizer

from rallypoint.config.tree import (  # isort: skip
    Audit, Evaluation, Group, GroupSettings, JobConfig, Memory, Network, Reading, Settings, audits_of, cadence_of,
    codec_of, group_of, matrices_of, of_group, paces_by_port, ranks_of, settings_applied, settings_of,
    with_start_values,
)  # fmt: skip

__all__ = [
    "Audit", "Evaluation", "Group", "GroupSettings", "JobConfig", "Memory", "Network", "Reading", "Settings",
    "audits_of", "cadence_of", "codec_of", "group_of", "matrices_of", "of_group", "overrides_from", "paces_by_port",
    "parse", "ranks_of", "record_of", "resolve", "settings_applied", "settings_of", "with_own_optimizer",
    "with_start_values",
]  # fmt: skip
