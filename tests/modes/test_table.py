"""The table FEATURE x MODE: whole, without contradictions, and printed in the documents as it is in the code."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from write_docs import PRINTED, printed

from rallypoint.core.modes import MODES, Bytes, Feature, ModeName, describe
from rallypoint.core.modes.table import ALONE, CONFLICTS, TABLE, No, Only, refusal
from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Mode, Sync


def test_there_is_a_cell_for_every_feature_in_every_mode() -> None:
    assert set(TABLE) == set(Feature)
    assert all(set(cells) == set(ModeName) for cells in TABLE.values())
    assert list(MODES) == list(ModeName)


def test_every_refusal_is_a_sentence_that_says_what_to_do() -> None:
    whys = [cell.why for cells in TABLE.values() for cell in cells.values() if isinstance(cell, No | Only)]
    for why in {*whys, *(one.why for one in (*CONFLICTS, *ALONE))}:
        assert re.search(r"\b(use|leave|set|give|needs|with|do not move)\b", why), why
        assert not why.endswith("."), why


@pytest.mark.parametrize("name", PRINTED)
def test_the_documents_print_the_table(name: str) -> None:
    assert printed(name) == PRINTED[name], "run python tests/modes/write_docs.py"


@pytest.mark.parametrize(("sync", "features", "name"), [
    (Sync(), (), ModeName.SYNC),
    (BoundedStaleness(0), (), ModeName.SYNC),
    (Sync(quorum=2), (), ModeName.QUORUM),
    (BoundedStaleness(1), (), ModeName.SSP),
    (Async(fold=2), (Feature.FOLD,), ModeName.ASYNC),
    (AllReduce(), (), ModeName.ALL_REDUCE),
    (LocalSteps(4), (), ModeName.LOCAL),
    (LocalSteps(4, delay=1), (Feature.DELAY,), ModeName.STAGGERED),
    (LocalSteps(4), (Feature.PARTS,), ModeName.STAGGERED),
    (LocalSteps(4, over=Sync(quorum=2)), (), ModeName.LOCAL_QUORUM),
    (LocalSteps(4, over=Async()), (), ModeName.LOCAL_ASYNC),
], ids=str)  # fmt: skip
def test_every_setting_of_sync_is_one_of_the_modes(sync: Mode, features: tuple[Feature, ...], name: ModeName) -> None:
    assert describe(sync, frozenset(features)).name is name


def test_only_a_mode_that_promises_bytes_can_break_the_promise_by_state_on_workers() -> None:
    assert describe(Sync()).bytes is Bytes.ALWAYS
    assert describe(Sync(), {Feature.CODEC_STATE}).bytes is Bytes.UNDISTURBED
    assert describe(LocalSteps(4), {Feature.FRESH_INNER}).bytes is Bytes.ALWAYS
    assert describe(LocalSteps(4, over=Async()), {Feature.FRESH_INNER}).bytes is Bytes.NO


def test_conflicting_features_are_supported_one_by_one() -> None:
    """A pair of which one is refused anyway needs no conflict."""
    for conflict in CONFLICTS:
        assert any(
            not refusal(mode, {conflict.first}) and not refusal(mode, {conflict.second}) for mode in conflict.modes
        )
    pairs = [frozenset({conflict.first, conflict.second}) for conflict in CONFLICTS]
    assert not any(one == other for one, other in combinations(pairs, 2))
