"""`rallypoint chaos` asks for a backup of every shard: not where the job's mode supports none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rallypoint.config import record_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import AllReduce, Mode, Sync
from rallypoint.launch.commands import chaos
from rallypoint.launch.plan import Launch

LAYOUT = build_layout([TensorSpec("w", (64,), "float32", 0)], 64)
STOPPED = 9


@pytest.mark.parametrize(("sync", "replication", "said"), [
    (Sync(), 2, False),
    (AllReduce(), 1, True),
], ids=["sync", "all-reduce"])  # fmt: skip
def test_chaos_uses_the_highest_replication_that_the_mode_supports_and_says_so(
    sync: Mode, replication: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Launch] = []

    def under(plan: Launch, *_: object, **__: object) -> int:
        plans.append(plan)
        return STOPPED

    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(chaos, "_undisturbed", lambda plan, *_, **__: plan)
    monkeypatch.setattr(chaos, "_job_of", lambda plan: record_of(resolve({"sync": sync}), LAYOUT))
    monkeypatch.setattr(chaos, "_under", under)
    assert chaos.chaos(Launch(worker=("train",), replication=2), [], 0, console) == STOPPED
    assert [plan.replication for plan in plans] == [replication]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("every shard is on one server (--replication 2 is not supported under rp.AllReduce()" in text) == said
