"""torch.compile of the model: the bytes of plain PyTorch compiled alike, and no compilation beside those it needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.utils import counters

from rallypoint.config import resolve
from rallypoint.testing.reference import train_reference
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash
from support.gathering import DATA, SETTINGS, build, gathering, loss_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a compiler for C++ takes a minute of a core

STEPS = 12
Model = torch.nn.Module


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for C++")


@pytest.fixture
def compiled(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Model], Model]]:
    """`torch.compile`, without processes and files that stay."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # torch sets it, and leaves it
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield lambda model: torch.compile(model, backend=backend, dynamic=False)  # type: ignore[return-value]
    torch._dynamo.reset()


def reference(compiled: Callable[[Model], Model], **settings: Any) -> str:
    model = build()
    fast = compiled(model)
    train_reference(model, DATA, lambda _, batch: loss_of(fast, batch), resolve({**SETTINGS, **settings}))
    return weights_hash(model)


@pytest.mark.parametrize(("backend", "settings", "whole"), [
    ("aot_eager", {}, False),
    ("aot_eager", {"precision": "bf16"}, True),
    ("aot_eager", {"precision": "fp16"}, False),
    pytest.param("inductor", {}, True, marks=NEEDS_COMPILER),
], ids=["fp32", "bf16, the job gets the compiled one", "fp16", "inductor"])  # fmt: skip
def test_a_compiled_model_trains_to_the_bytes_of_plain_pytorch_with_it(
    compiled: Callable[[Model], Model], settings: dict[str, Any], whole: bool
) -> None:
    settings = {**settings, "steps": STEPS}
    expected = reference(compiled, **settings)
    counters.clear()
    with gathering(2) as cluster, _job_of(cluster) as job:
        model = build()
        fast = compiled(model)
        run = job.train(fast if whole else model, DATA, **{**SETTINGS, **settings})

        @run.every(2)
        def evaluate(step: int) -> dict[str, float]:
            return {"loss": float(loss_of(fast, DATA[:]))}

        for micro in run:
            with micro:
                micro.backward(loss_of(fast, micro.batch))
        assert any("torch.compile is used" in said for said in cluster.sentences())
    assert weights_hash(model) == expected
    assert counters["stats"]["unique_graphs"] <= 2, "one in training (or that of `reference`), one in evaluations"


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_held_parameters_are_compiled_once_in_each_type(compiled: Callable[[Model], Model]) -> None:
    counters.clear()
    with gathering(1) as cluster, _job_of(cluster) as job:
        model = build()
        fast = compiled(model)
        for micro in job.train(model, DATA, **{**SETTINGS, "precision": "bf16", "memory.hold": "bf16"}):
            with micro:
                micro.backward(loss_of(fast, micro.batch))
    assert counters["stats"]["unique_graphs"] == 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def _job_of(cluster: Any) -> Job:
    return Job(id="worker0", coordinator=cluster.coordinator.address, transport=cluster.transport)
