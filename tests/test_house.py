"""Limits on src/: sizes of files, classes, signatures and folders; names that say something; no retired words.

An exception stands in its table with a sentence that says why. An exception that nothing needs any more fails too.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import rallypoint
from rallypoint.cli.app import GONE
from rallypoint.config.tree import JobConfig
from rallypoint.core.modes.table import ALONE, CONFLICTS, TABLE
from rallypoint.core.view import View

pytestmark = pytest.mark.slow  # `make check` plays them
SOURCE, ROOT = Path(rallypoint.__file__).parent, Path(__file__).parents[1]
LINES, METHODS, ARGUMENTS, MODULES = 800, 25, 8, 16  # one noun is one file: a limit of 400 lines made corridors

# ---- exceptions: what, and why ----

LONG_FILES: dict[str, str] = {}
LARGE_CLASSES = {
    "testing/simulation/job.py: SimulatedJob": "the undisturbed computation that every run is compared with",
}
LONG_SIGNATURES = {
    "recipes/gpt.py: _command": "typer makes each option of the command line from an argument",
    "recipes/resnet.py: _command": "typer makes each option of the command line from an argument",
}
BUDGETS = {
    "commands": 24,
    "distinct options": 85,
    "settings of job.train": 24,
    "rows of the feature table": 34,
    "refused pairs": 48,
    "fields of View": 18,
    "lines": 77_393,
    "files": 311,
    "folders": 34,
    "classes that share their name": 2,
}  # what a stranger has to learn: whoever needs more says here why
FULL_FOLDERS: dict[str, str] = {}
UNCALLED = {
    "bridges/ray.py: run_shipped": "the script that the driver sends to workers calls it",
    "launch/engines/kubernetes.py: render": "the command imports it under another name",
    "net/channel.py: Channel.waiting_bytes": "tests measure what a peer that does not read makes wait",
}
RETIRED_NAMES: dict[str, str] = {}

MODE_READERS = {
    "core/job.py": "which version of a shard a snapshot holds, and what the job's mode supports",
    "core/decisions.py": "no mode of a job: torch's word for whether the lowest figure is the best",
    "core/cluster/course.py": "picks the strategies of the coordinator's machine",
    "core/worker/shell.py": "picks a worker's machine, and its part in snapshots",
    "coordinator/progress.py": "picks the tally of steps",
    "server/job.py": "picks the shards' policies and what a worker uploads; asks whether contributions are accounted",
    "server/held.py": "picks what a server holds of a shard",
    "worker/exchange/exchange.py": "hands it to a worker's machines, and picks what comes with a version",
    "worker/loop/own.py": "picks what steps on a worker",
    "worker/tensors.py": "says why a mode does not support a table",
    "bridges/wrap.py": "picks the mode by who steps the optimizer that is given",
    "launch/commands/chaos.py": "compares bytes where the mode promises them",
}  # outside the table, the policies, the configuration and the sources: each reads the description once

NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
RETIRED = {
    *("deal", "deals", "dealt", "dealing", "birth", "births", "turn", "turns", "carrier", "bringer"),
    *("astray", "blow", "blows", "meddle", "mend", "mends", "mended", "complain", "complains", "complaint", "hearing"),
    *("reception", "fed"),
}  # as a part of a name: `next_deal`; not `tick`, which is right for a clock's and wrong for a round only
RETIRED_WHOLE = {"since", "void", "past", "hand"}  # only as the whole name: `hand_over` and `past_the_end` are English


@cache
def files() -> dict[str, str]:
    """The text of every file of the package, by its path below src/rallypoint."""
    return {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def functions(node: ast.AST, inside: tuple[ast.ClassDef, ...] = ()) -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Every function with the names of the classes around it, and: is it a constructor of plain data?"""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions(child, (*inside, child))
        elif isinstance(child, ast.FunctionDef):
            name = ".".join([*(owner.name for owner in inside), child.name])
            yield name, child, child.name == "__init__" and bool(inside) and is_data(inside[-1])
            yield from functions(child, inside)
        else:
            yield from functions(child, inside)


def is_data(owner: ast.ClassDef) -> bool:
    words = " ".join(ast.unparse(node) for node in (*owner.decorator_list, *owner.bases))
    return "dataclass" in words or "Struct" in words


def arguments(function: ast.FunctionDef) -> int:
    """How many a caller may give: `self` and `cls` are not."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(given) - (bool(given) and given[0].arg in ("self", "cls"))


def check(found: dict[str, str], exceptions: dict[str, str], rule: str) -> None:
    """`found` holds what breaks the rule, with a figure: exactly the exceptions may."""
    broken = [f"{what}: {figure}" for what, figure in found.items() if what not in exceptions]
    assert not broken, f"{rule}:\n" + "\n".join(broken)
    settled = sorted(exceptions.keys() - found.keys())
    assert not settled, "these keep the rule now: take them off the list of exceptions:\n" + "\n".join(settled)
    assert all(len(why) > 5 for why in exceptions.values())


def test_no_file_is_longer_than_one_sitting() -> None:
    counts = {path: text.count("\n") for path, text in files().items()}
    found = {path: f"{count} lines" for path, count in counts.items() if count > LINES}
    check(found, LONG_FILES, f"at most {LINES} lines in a file")


def test_no_class_has_more_methods_than_one_can_keep_in_mind() -> None:
    found = {}
    for path, text in files().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(child, ast.FunctionDef) for child in node.body)
                if methods > METHODS:
                    found[f"{path}: {node.name}"] = f"{methods} methods"
    check(found, LARGE_CLASSES, f"at most {METHODS} methods in a class")


def test_no_call_needs_more_arguments_than_one_can_read() -> None:
    found = {}
    for path, text in files().items():
        for name, function, constructs_data in functions(ast.parse(text)):
            if arguments(function) > ARGUMENTS and not constructs_data:
                found[f"{path}: {name}"] = f"{arguments(function)} arguments"
    check(found, LONG_SIGNATURES, f"at most {ARGUMENTS} arguments; more is a dataclass")


def test_no_file_is_named_for_nothing_in_particular() -> None:
    found = {path: "says nothing" for path in files() if NAMELESS & set(re.split(r"[/_.]", path))}
    check(found, {}, f"a file is named for what it holds, not {', '.join(sorted(NAMELESS))}")


def test_no_two_test_files_have_one_name() -> None:
    """Pytest, without packages, would run only the first of them."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    check({name: f"{count} files" for name, count in names.items() if count > 1}, {}, "each test file its own name")


def test_no_folder_holds_more_modules_than_one_looks_through() -> None:
    folders: dict[str, int] = {}
    for path in files():
        folder, _, name = path.rpartition("/")
        folders[folder] = folders.get(folder, 0) + (name != "__init__.py")
    found = {folder: f"{count} modules" for folder, count in folders.items() if count > MODULES}
    check(found, FULL_FOLDERS, f"at most {MODULES} modules in a folder, or sub-folders by noun")


def named(tree: ast.AST) -> Iterator[str]:
    """The names that code uses, and those in texts of a few words: types in quotation marks, `getattr`."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.:\[\], ]{1,80}", text):
                yield from re.findall(r"\w+", text)


def public(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    """Public functions, classes and methods, but for commands and for methods of classes that others' code calls."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if not (node.name.startswith("_") or any("command(" in ast.unparse(one) for one in node.decorator_list)):
            yield node.name
        if isinstance(node, ast.ClassDef) and all(base_of(one) in ours for one in node.bases):
            methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            yield from (f"{node.name}.{name}" for name in methods if not name.startswith("_"))


def base_of(node: ast.expr) -> str:
    return ast.unparse(node).split("[")[0].split(".")[-1]


def test_what_is_public_is_used_by_more_than_tests() -> None:
    trees = {path: ast.parse(text) for path, text in files().items()}
    paths = [path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    beside = [ast.parse(path.read_text()) for path in paths]
    used = {name for tree in (*trees.values(), *beside) for name in named(tree)}
    classes = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    ours = classes | {"Struct", "Protocol", "Generic", "Enum"}
    dead = {
        f"{path}: {name}": "only tests name it"
        for path, tree in trees.items() if not path.startswith("testing/")
        for name in public(tree, ours) if name.split(".")[-1] not in used
    }  # fmt: skip
    check(dead, UNCALLED, "delete what only tests call, with their tests")


MODES_THEMSELVES = ("core/modes/", "core/policy.py", "config/", "worker/sources/", "testing/")
MODE_QUESTION = re.compile(
    r"\.(streaming|staggered|sticky|stateful_workers|leaves_state|drops)\b|\.local\b( is|\.|\)| and|:)"
    r"|\.mode\b|\b(Pace|Holder|Contribution|Clock)\."
    r"|isinstance\([\w.]*(sync|policy|source|mode), |\b(Sync|Async|BoundedStaleness|LocalSteps|AllReduce)\("
)


def code_lines(text: str) -> Iterator[str]:
    """The lines of a file as they run: without comments, texts and docstrings."""
    lines: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            line = lines.setdefault(token.start[0], [])
            line.append(" " if line and line[-1][-1].isalnum() and token.string[0].isalnum() else "")
            line.append(token.string)
    yield from ("".join(line) for line in lines.values())


def test_only_these_places_ask_which_mode_it_is() -> None:
    found: dict[str, str] = {}
    for path, text in files().items():
        asked = [line for line in code_lines(text) if MODE_QUESTION.search(line) and not line.startswith("from ")]
        if asked and not path.startswith(MODES_THEMSELVES):
            found[path] = f"{len(asked)} lines, such as {asked[0]}"
    check(found, MODE_READERS, "the mode's description is read in one place of each role; others get what was picked")


def words(name: str) -> set[str]:
    """The words of `_next_deal`, `NextDeal` or `NEXT_DEAL`, in small letters."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_no_name_has_to_be_learnt_where_the_field_has_a_word() -> None:
    found: dict[str, str] = {}
    for path, text in files().items():
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                retired = words(token.string) & RETIRED or {token.string.strip("_")} & RETIRED_WHOLE
                if retired:
                    found.setdefault(token.string, f"{path}:{token.start[0]} ({', '.join(retired)})")
    check(found, RETIRED_NAMES, "the design has another word (DESIGN.md, section 1)")


def test_words_are_found_in_names_of_every_style() -> None:
    assert words("_next_deal") == words("NextDeal") == words("NEXT_DEAL") == {"next", "deal"}


def test_no_program_of_ours_looks_into_the_working_folder() -> None:
    """``python -m`` imports from there first: a user's token.py, queue.py or random.py would end it."""
    bare = [
        f"{path}: {line.strip()}"
        for path, text in files().items() if not path.startswith("testing/")
        for line in text.splitlines() if '"-m"' in line and '"-P", "-m"' not in line and "==" not in line
    ]  # fmt: skip
    assert bare == []


def command_line() -> tuple[set[str], set[str]]:
    """The commands of `rallypoint`, and the distinct names of their options."""
    from rallypoint.cli import app

    names: set[str] = set()
    options: set[str] = set()

    def look(command: Any, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            look(inner, f"{path} {name}")
        if not hasattr(command, "commands"):
            names.add(path)
            given = [one.opts for one in command.params if one.param_type_name == "option"]
            options.update(next((name for name in opts if name.startswith("--")), opts[0]) for opts in given)

    look(typer.main.get_command(app), "rallypoint")
    return names, options


def test_commands_and_options_that_are_gone_are_not_there() -> None:
    commands, options = command_line()
    assert not {f"rallypoint {name}" for name in GONE} & commands
    assert not GONE.keys() & options


def test_there_is_no_more_to_learn_than_the_budgets_say() -> None:
    """Prints the table: `pytest -s`. What became less is written down too, or it grows back."""
    commands, options = command_line()
    trees = [ast.parse(text) for text in files().values()]
    classes = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    found = {
        "commands": len(commands),
        "distinct options": len(options),
        "settings of job.train": len(JobConfig.__struct_fields__),
        "rows of the feature table": len(TABLE),
        "refused pairs": len(CONFLICTS) + sum(1 + len(alone.takes) for alone in ALONE),
        "fields of View": len(View.__struct_fields__),
        "lines": sum(text.count("\n") for text in files().values()),
        "files": len(files()),
        "folders": len({path.rpartition("/")[0] for path in files()}),
        "classes that share their name": sum(count for count in classes.values() if count > 1),
    }
    print("\n".join(f"{what:32}{count:8,} of {BUDGETS[what]:,}" for what, count in found.items()))
    over = {what: f"{count}, budget {BUDGETS[what]}" for what, count in found.items() if count > BUDGETS[what]}
    check(over, {}, "delete something, or raise the budget and say why beside it")
