"""Imports point downward, from each layer to lower ones only; decisions at the bottom touch no mechanism."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rallypoint

SOURCE = Path(rallypoint.__file__).parent

# The layer of every package; the longest name that fits counts. A module may import from lower layers, and from its own
# folder. Folders of one layer are siblings and do not know each other.
LAYERS = {
    "errors": 0,
    "own_files": 0,  # opens folders and makes files in them; needs nothing of ours
    "core": 1,
    "config": 2,
    "observe": 3,  # spans and waits: below the links that use them
    "net": 4,
    "codec.spec": 1,  # which codec, as data: part of the configuration
    "codec": 6,
    "optim": 7,
    "store": 8,
    "data": 9,
    "parallel": 9,
    "coordinator": 10,
    "server": 10,
    "worker": 10,
    "aggregator": 11,
    "launch": 12,
    "watch": 11,  # observers: they know messages, and no process
    "": 13,  # the public names
    "bridges": 14,
    "recipes": 14,
    "testing": 15,
    "cli": 16,
    "__main__": 17,
}
NOT_IN_CORE = {
    "asyncio", "concurrent", "io", "multiprocessing", "numpy", "os", "pathlib", "queue", "random", "secrets",
    "selectors", "shutil", "signal", "socket", "socketserver", "ssl", "subprocess", "sys", "tempfile", "threading",
    "time", "torch",
}  # fmt: skip


@cache
def paths() -> dict[str, Path]:
    """Every module's file, by the module's dotted name without `rallypoint.`."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package. Not while tests are collected: every process of them would wait for it."""
    return {name: ast.parse(path.read_text(), str(path)) for name, path in paths().items()}


def targets(node: ast.stmt | ast.AST, here: str) -> Iterator[str]:
    """The absolute names that an import statement names, `a.b` for each of `from a import b`."""
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{here} has a relative import"
        assert node.module is not None
        yield from (f"{node.module}.{name.name}" for name in node.names)


def ours(target: str) -> str | None:
    """The module of this package that an absolute name leads to; None when it is somebody else's."""
    if target != "rallypoint" and not target.startswith("rallypoint."):
        return None
    name = target.removeprefix("rallypoint").removeprefix(".")
    while name not in paths():
        name = name.rpartition(".")[0]
    return name


def layer(module: str) -> int:
    name = module
    while name and name not in LAYERS:
        name = name.rpartition(".")[0]
    assert name or not module, f"{module} has no layer: give its package a number in LAYERS"
    return LAYERS[name]


def folder(module: str) -> str:
    return module.partition(".")[0]


def test_imports_point_downward() -> None:
    wrong = []
    for module, tree in modules().items():
        if not module:
            continue  # the public names are looked up when first used; see below
        for node in ast.walk(tree):
            for target in targets(node, module):
                used = ours(target)
                if used is None or (folder(used) == folder(module) and layer(used) <= layer(module)):
                    continue
                if layer(used) >= layer(module):
                    line = getattr(node, "lineno", 0)
                    wrong.append(f"{module}:{line} (layer {layer(module)}) imports {used} (layer {layer(used)})")
    assert not wrong, "\n".join(wrong)


def test_the_front_door_imports_nothing_until_it_is_asked() -> None:
    assert [ours(t) for node in modules()[""].body for t in targets(node, "") if ours(t) is not None] == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {module: set(_at_import(tree, module)) for module, tree in modules().items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for used in sorted(graph[module]):
                visit(used, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def _at_import(tree: ast.Module, module: str) -> Iterator[str]:
    """What importing a module imports of ours: statements of its body, not those for type checkers."""
    for node in tree.body:
        for target in targets(node, module):
            used = ours(target)
            if used is not None and used != module:
                yield used


def test_every_layer_in_the_table_is_named_once() -> None:
    unknown = [name for name in LAYERS if name and not (SOURCE / name.replace(".", "/")).with_suffix(".py").is_file()]
    assert {name for name in unknown if not (SOURCE / name).is_dir()} <= {"codec", "store"}


@pytest.mark.parametrize("module", [name for name in paths() if folder(name) in ("core", "errors")])
def test_what_decides_touches_no_mechanism(module: str) -> None:
    roots = {target.partition(".")[0] for node in ast.walk(modules()[module]) for target in targets(node, module)}
    assert not roots & NOT_IN_CORE, f"{module} is to be pure, but imports {', '.join(sorted(roots & NOT_IN_CORE))}"


@pytest.mark.some("rallypoint.recipes")
@pytest.mark.parametrize("module", ["rallypoint.cli", "rallypoint.coordinator.service", "rallypoint.recipes"])
def test_what_must_start_in_no_time_imports_no_torch(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{'torch', 'numpy'}} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout.strip() == ""
