"""What a script may set for all of torch changes nothing in a job whose model and data name their own types.

Server, coordinator and worker are in one process here, so each of them meets the script's settings.
"""

from __future__ import annotations

import ast
import copy
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint
import rallypoint as rp
from rallypoint.bridges.wrap import wrap_in
from rallypoint.core.modes import Feature, ModeName
from rallypoint.core.modes.table import TABLE, No
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.tensors import weights_hash

sys.path.insert(0, str(Path(__file__).parent))

from cell_jobs import CellJob, dataset, job_of, train_cell

State = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def start_method(name: str) -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(name, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


STATES: dict[str, State] = {
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "meta": lambda: default_device("meta"),
}  # fmt: skip
RARE: dict[str, State] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "cpu": lambda: default_device("cpu"),
    "a context of meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
}  # fmt: skip
ELSEWHERE = {Feature.RANKS, Feature.SUMS, Feature.KEYED}  # no job of `cell_jobs.py`
DRAWS = {Feature.STREAM, Feature.PASSES}  # its data draw random numbers of the default type
SAME = [ModeName.SYNC, ModeName.ALL_REDUCE, ModeName.LOCAL, ModeName.STAGGERED]
NEEDS_MORE = {Feature.OWN_LOOP, Feature.BACKUP_TASKS}  # than one process: for the first see below


def cells() -> Iterator[tuple[Feature, ModeName]]:
    """Each feature in the first mode that supports it and promises the bytes."""
    for feature, modes in TABLE.items():
        mode = next((mode for mode, cell in modes.items() if mode in SAME and not isinstance(cell, No)), None)
        if mode is not None and feature not in ELSEWHERE | DRAWS | NEEDS_MORE:
            yield feature, mode
    yield from ((Feature.BUFFERS, mode) for mode in SAME[1:])


def trained(cell: CellJob) -> str:
    with EmbeddedJob() as job:
        return train_cell(job, cell)


@cache
def undisturbed(feature: Feature, mode: ModeName) -> str:
    return trained(job_of(feature, mode))


def cases() -> Iterator[Any]:
    for feature, mode in cells():
        for state in [*STATES, *RARE] if feature is Feature.BUFFERS else ["float64", "meta"]:
            yield pytest.param(feature, mode, state, id=f"{feature.name.lower()}-{mode.name.lower()}-{state}")


@pytest.mark.some("buffers-sync-float64", "buffers-sync-meta", "tables-sync-meta", "streamed-sync-float64")
@pytest.mark.parametrize(("feature", "mode", "state"), list(cases()))
def test_no_setting_of_torch_changes_a_byte(
    feature: Feature, mode: ModeName, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, held = undisturbed(feature, mode), list[AbstractContextManager[Any]]()
    own = rp.Job.train

    def train_in_state(self: rp.Job, *args: Any, **settings: Any) -> Any:
        held.append((STATES | RARE)[state]())
        held[0].__enter__()  # the model and the data are there; from here on the script has its setting
        return own(self, *args, **settings)

    monkeypatch.setattr(rp.Job, "train", train_in_state)
    try:
        found = trained(job_of(feature, mode))
    finally:
        held[0].__exit__(None, None, None)
    assert found == expected


@pytest.mark.parametrize("state", ["float64", "bfloat16", "meta"])
def test_a_wrapped_loop_is_that_of_plain_pytorch_whatever_the_script_has_set(state: str) -> None:
    def loop(model: torch.nn.Module, optimizer: Any) -> str:
        for step in range(6):
            model(x[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_hash(model)

    torch.manual_seed(3)
    x = torch.randn(6, 8, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    twin = copy.deepcopy(model)
    with (STATES | RARE)[state]():
        expected = loop(twin, torch.optim.AdamW(twin.parameters(), lr=0.02))
        with EmbeddedJob() as job:
            inner = torch.optim.AdamW(model.parameters(), lr=0.02)
            assert loop(model, wrap_in(job, model, inner, steps=6, replicas=1)) == expected


def test_a_streamed_model_may_be_trained_where_it_was_built_on_the_meta_device() -> None:
    data = dataset()

    def train(around: AbstractContextManager[Any]) -> str:
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3))
        found = []
        with around, EmbeddedJob() as job:
            run = job.train(model, data, batch=4, steps=3, memory=rp.Memory(parameters="streamed"))
            run.every(3)(lambda step: found.append(weights_hash(model)))
            for micro in run:
                with micro:
                    micro.backward((model(micro.batch[0]) - micro.batch[1]).square().mean())
        return found[-1]

    assert train(torch.device("meta")) == train(nullcontext())


def test_another_start_method_of_processes_changes_no_byte() -> None:
    def train() -> str:
        torch.manual_seed(3)
        model = torch.nn.Linear(6, 3)
        with EmbeddedJob() as job:
            run = job.train(model, dataset(), batch=4, steps=3, loader=rp.Loader(workers=1))
            for micro in run:
                with micro:
                    micro.backward((model(micro.batch[0]) - micro.batch[1]).square().mean())
        return weights_hash(model)

    expected = train()
    with start_method("spawn"):
        assert train() == expected


IMPORTED_IN = """
import torch
with torch.inference_mode():
    import rallypoint as rp
torch.set_num_threads(1)
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
with rp.join() as job:
    for micro in job.train(model, torch.linspace(-1, 1, 96).view(32, 3), batch=4, steps=3, codec={"type": "int8"}):
        with micro:
            micro.backward(model(micro.batch).square().mean())
print("trained", all(p.is_inference() is False for p in model.state_dict().values()))
"""


@pytest.mark.slow
def test_the_package_may_be_imported_in_inference_mode() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED_IN], capture_output=True, text=True, timeout=120)
    assert "trained True" in done.stdout, done.stdout + done.stderr


MAKES = {
    *("zeros", "ones", "empty", "full", "tensor", "arange", "linspace", "logspace", "scalar_tensor", "eye", "rand"),
    *("randn", "randint", "randperm", "empty_strided", "normal"),
}
TAKES = {"as_tensor", "asarray"}  # the type of what they are given


@pytest.mark.slow
def test_every_tensor_of_the_package_names_its_type_and_its_device() -> None:
    """What it does not name is the script's default. (The recipes are scripts.)"""
    package, nameless = Path(rallypoint.__file__).parent, []
    for path in sorted(package.rglob("*.py")):
        if "recipes" in path.relative_to(package).parts:
            continue
        tree = ast.parse(path.read_text())
        called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"):
                continue
            wanted = {"dtype", "device"} if node.attr in MAKES else {"device"} if node.attr in TAKES else set[str]()
            call = called.get(id(node))
            if wanted - {keyword.arg for keyword in (call.keywords if call is not None else ())}:
                nameless.append(f"{path.relative_to(package)}:{node.lineno}: torch.{node.attr}")
    assert not nameless, "\n".join(nameless)
