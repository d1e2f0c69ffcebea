"""On which clusters an equality test runs: some always, every other one in `make test-all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def on_clusters(
    always: Mapping[str, Sequence[tuple[int, int]]], *, workers: Sequence[int], servers: Sequence[int]
) -> pytest.MarkDecorator:
    """Parametrize `case`, `workers` and `servers`: every case on every cluster.

    always: for each case, the (workers, servers) that are not `slow`.
    """
    chosen: list[Any] = []
    for case, size in product(always, product(workers, servers)):
        marks = () if size in always[case] else (pytest.mark.slow,)
        chosen.append(pytest.param(case, *size, marks=marks))
    return pytest.mark.parametrize(("case", "workers", "servers"), chosen)
