"""The public surface: what `import rallypoint` offers, held by a list; everything in it is documented."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import rallypoint
from rallypoint.core.policy import Policy

EXPORTED = [
    "ASGD", "DGC", "EMA", "SGD", "SWA", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "AllReduce", "Async",
    "Audit", "Bf16", "BoundedStaleness", "Cache", "Evaluation", "Fp16", "Group", "Int4", "Int8", "Job", "JobConfig",
    "Lanes", "Loader", "LocalSteps", "LossScaling", "Memory", "Micro", "Muon", "NAdam", "Network", "Parallel",
    "Parquet", "PowerSGD", "RAdam", "RMSprop", "RandomK", "Raw", "Reading", "ReduceOnPlateau", "Run", "Sign",
    "Stream", "Sync", "TokenFiles", "TopK", "WebDataset", "WrappedOptimizer", "__version__", "constant", "cosine",
    "join", "linear", "scaled_lr", "step_decay", "tabulated", "wrap",
]
POLICIES = (rallypoint.Sync, rallypoint.BoundedStaleness, rallypoint.Async)
DOCUMENTED = [name for name in EXPORTED if name != "__version__"]


def test_the_public_names_are_these() -> None:
    said = "a change of the public surface: change this list with it, and the docs"
    assert sorted(rallypoint.__all__) == sorted(EXPORTED), said


def test_dir_and_the_homes_say_the_same() -> None:
    assert dir(rallypoint) == sorted(EXPORTED)
    assert sorted(rallypoint._HOMES) == sorted(DOCUMENTED)


def test_what_type_checkers_see_is_what_is_there() -> None:
    tree = ast.parse(Path(rallypoint.__file__).read_text())
    homes: dict[str, str | None] = {}
    for block in (node for node in tree.body if isinstance(node, ast.If)):
        for node in block.body:
            assert isinstance(node, ast.ImportFrom)
            homes |= {name.name: node.module for name in node.names}
    assert homes == rallypoint._HOMES


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_exported_name_is_there_and_documented(name: str) -> None:
    thing = getattr(rallypoint, name)
    assert thing.__module__ == rallypoint._HOMES[name]
    assert documented(thing), f"rallypoint.{name} has no docstring"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_whatever_is_reachable_through_it_is_documented(name: str) -> None:
    bare = [member for member, value in public_members(getattr(rallypoint, name)) if not documented(value)]
    assert not bare, f"rallypoint.{name}: no docstring on {', '.join(bare)}"


def test_the_version_is_one() -> None:
    assert all(part.isdigit() for part in rallypoint.__version__.split(".")[:2])


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rallypoint' has no attribute 'Trainer'"):
        _ = rallypoint.Trainer


def documented(thing: object) -> bool:
    if thing is None:
        return False
    doc = thing.fget.__doc__ if isinstance(thing, property) and thing.fget else thing.__doc__
    return bool(doc and doc.strip() and not doc.startswith("Initialize self"))


def public_members(thing: object) -> Iterator[tuple[str, object]]:
    """Methods and properties that a class of ours defines itself."""
    if inspect.isclass(thing):
        for name, value in vars(thing).items():
            if issubclass(thing, POLICIES) and documented(getattr(Policy, name, None)):
                continue  # the interface has said what it does
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, (property, classmethod))):
                yield name, value
