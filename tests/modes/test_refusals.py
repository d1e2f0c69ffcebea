"""Every cell of FEATURE x MODE that is not supported is refused with the table's sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rallypoint.config import record_of, with_own_optimizer
from rallypoint.config.checks import check_ranks
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.modes import Feature, ModeName
from rallypoint.core.modes.table import ALONE, CONFLICTS, TABLE, Conflict, No, Only, StandsAlone, why_not
from rallypoint.errors import ConfigError, ModelError
from rallypoint.worker.tensors import ModelTensors

sys.path.insert(0, str(Path(__file__).parent))

from cell_jobs import CellJob

UNSUPPORTED = [
    pytest.param(feature, mode, id=f"{feature.name.lower()}-{mode.name.lower()}")
    for feature, cells in TABLE.items() for mode, cell in cells.items() if isinstance(cell, No | Only)
]  # fmt: skip
TERMS = {
    Feature.AGGREGATORS: Terms(aggregators=1),
    Feature.BACKUP_TASKS: Terms(backup_tasks=True),
    Feature.REPLICATION: Terms(replication=2),
}
LAYOUT = build_layout([TensorSpec("weight", (64,), "float32", 0)], 64)


def _refused(job: CellJob) -> str:
    """The sentence with which a job is refused, wherever that is; fails where nothing is."""
    terms = frozenset[Feature]().union(*(TERMS[feature].features for feature in job.features if feature in TERMS))
    try:
        if job.has(Feature.OWN_OPTIMIZER):
            with_own_optimizer(job.config, "torch.optim.adamw.AdamW")
        if job.has(Feature.RANKS):
            check_ranks(job.config, carries=job.has(Feature.CARRY))
        layout = LAYOUT
        if job.has(Feature.TABLES):
            layout = ModelTensors(torch.nn.Embedding(9, 2, sparse=True, device="meta"), job.config).layout
        if job.has(Feature.BUFFERS):
            layout = ModelTensors(torch.nn.BatchNorm1d(40), job.config).layout
        if job.has(Feature.CARRY):
            layout = ModelTensors(torch.nn.Linear(2, 2), job.config, carry=torch.zeros(2)).layout
        asks = {Feature.STOP, Feature.DECIDES} & {*job.features}
        of_script = frozenset({*asks, Feature.RANKS} if asks else ()) & {*job.features}
        return record_of(job.config, layout).refusal_of(terms | of_script)
    except (ConfigError, ModelError) as error:
        return str(error)


@pytest.mark.parametrize(("feature", "mode"), UNSUPPORTED)
def test_what_the_table_does_not_support_is_refused_with_its_sentence(feature: Feature, mode: ModeName) -> None:
    cell = TABLE[feature][mode]
    assert isinstance(cell, No | Only)
    sentence = _refused(CellJob(mode, (feature,)))
    assert cell.why in sentence
    assert feature is Feature.TABLES or sentence.startswith(feature.value)


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda c: f"{c.first.name}-{c.second.name}".lower())
def test_features_that_do_not_go_together_are_refused_with_the_table_s_sentence(conflict: Conflict) -> None:
    pair = (conflict.first, conflict.second)
    modes = [mode for mode in ModeName if mode in conflict.modes and not any(why_not(mode, one) for one in pair)]
    for mode in modes:
        assert conflict.why in _refused(CellJob(mode, pair)), mode
    assert modes


@pytest.mark.parametrize("other", [one for one in Feature if one not in (Feature.KEYED, Feature.SUMS)], ids=str)
@pytest.mark.parametrize("alone", ALONE, ids=lambda one: one.feature.name.lower())
def test_what_stands_alone_takes_what_it_says_and_nothing_else(alone: StandsAlone, other: Feature) -> None:
    pair = (alone.feature, other)
    for mode in ModeName if pair != (Feature.SUMS, Feature.MUON) else ():  # both are the optimizer
        if not any(why_not(mode, one) for one in pair):
            assert why_not(mode, other, {alone.feature}) == ("" if other in alone.takes else alone.why)
            assert other in alone.takes or alone.why in _refused(CellJob(mode, pair))


@pytest.mark.parametrize("mode", ModeName)
def test_a_feature_that_needs_another_is_accepted_with_it(mode: ModeName) -> None:
    for feature, cells in TABLE.items():
        if isinstance(cell := cells[mode], Only):
            assert _refused(CellJob(mode, (cell.beside, feature))) == ""
