"""What stands on a command line besides our options: the user's script or recipe, and its own arguments."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import shlex
import sys
from pathlib import Path

import typer

from rallypoint.cli.app import GONE
from rallypoint.errors import ConfigError, UsageError, meant, to_install
from rallypoint.launch.plan import RUN_FILE


def without_settings(given: list[str]) -> tuple[list[str], list[str]]:
    """A recipe's arguments, and each `--set key=value` that stood among them: those are the job's."""
    rest: list[str] = []
    settings: list[str] = []
    arguments = iter(given)
    for argument in arguments:
        if argument == "--set":
            settings.append(next(arguments, ""))
        elif argument.startswith("--set="):
            settings.append(argument.removeprefix("--set="))
        else:
            rest.append(argument)
    return rest, settings


def recipe_argv(recipe: str, arguments: list[str]) -> list[str]:
    """The command that runs a recipe. Raises UsageError if there is none, or it has no such option."""
    from rallypoint.recipes import RECIPES

    if why := GONE.get(f"train {recipe}"):
        raise UsageError(f"the recipe {recipe} is gone: {why}")
    if recipe not in RECIPES:
        raise UsageError(f"there is no recipe {recipe}: choose one of {', '.join(sorted(RECIPES))}")
    argv = [sys.executable, "-P", "-m", RECIPES[recipe], *arguments]
    if "--help" in arguments:
        os.execv(sys.executable, argv)
    check_recipe(recipe, arguments)
    return argv


def options_of(recipe: str) -> list[str]:
    """Return the names of a recipe's own options, as its source has them: to import it takes seconds."""
    from rallypoint.recipes import RECIPES

    found = importlib.util.find_spec(RECIPES[recipe])
    source = Path(str(found and found.origin)).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "_command":
            words = [one.value for one in ast.walk(node.args) if isinstance(one, ast.Constant)]
            named = [word for word in words if isinstance(word, str) and word.startswith("--") and " " not in word]
            return [*named, *(f"--{argument.arg.replace('_', '-')}" for argument in node.args.args)]
    raise AssertionError(f"the recipe {recipe} has no _command")


def check_recipe(recipe: str, arguments: list[str]) -> None:
    """Raise UsageError for an option that the recipe does not have, before anything starts."""
    known, before = options_of(recipe), ""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and len(name) > 2 and name not in known and before not in known:
            listed = f"; `rallypoint train {recipe} --help` lists them"
            gone = f": {GONE[name]}" if name in GONE else ""
            raise UsageError(f"{recipe} has no option {name}{gone or meant(name, known) or listed}")
        before = argument


def refuse_option(context: typer.Context, first: str, what: str) -> None:
    """Raise UsageError if what was taken for the script or the recipe is an option that we do not have."""
    if not first.startswith("-"):
        return
    name = first.partition("=")[0]
    if name in GONE:
        raise UsageError(f"there is no option {name}: {GONE[name]}")
    known = _ours(context)
    if what == "recipe" and (owner := _owner(name, context.args)):
        words = [word for word in context.args if word != owner]
        raise UsageError(f"{name} is {owner}'s: rallypoint {context.info_name} {shlex.join([owner, first, *words])}")
    if name in known:
        raise UsageError(f"{name} stands before all else: rallypoint {context.info_name} {name} ...")
    raise UsageError(
        f"there is no option {name}{meant(name, known) or f'; `rallypoint {context.info_name} --help` lists them'} "
        f"(the {what}'s own options stand after it)"
    )


def _ours(context: typer.Context) -> list[str]:
    return [option for parameter in context.command.params for option in parameter.opts if option.startswith("--")]


def _owner(name: str, words: list[str]) -> str:
    """Return the recipe among `words` that has an option of this name; "" if there is none."""
    from rallypoint.recipes import RECIPES

    return next((word for word in words if word in RECIPES and name in options_of(word)), "")


def hint_at_folder(folder: str) -> None:
    """Say it where a run's files will stand among others: the folder is there, and holds no run."""
    path = Path(folder)
    with contextlib.suppress(OSError):
        others = sorted(entry.name for entry in path.iterdir())
        if others and not (path / RUN_FILE).exists():
            print(
                f"hint: {folder} holds other files ({others[0]}{', ...' if others[1:] else ''}): the run's own will "
                "stand among them; --folder runs/NAME keeps them apart", file=sys.stderr,
            )  # fmt: skip


def hint_at_page(watch: bool | None) -> None:
    """Say why a run that is watched from a terminal has no page, where nobody has said whether it should."""
    from rallypoint.launch.observing.beside import missing

    if watch is None and sys.stdout.isatty() and (name := missing()):
        print(f"hint: this run has no page, which needs {name}: {to_install('watch')}", file=sys.stderr)


def hint_at_misplaced(context: typer.Context, given: list[str], first: str) -> None:
    """Say which of our options stand after the script or the recipe: they are passed on to it, as everything there."""
    known = _ours(context)
    found = list(dict.fromkeys(name for argument in given if (name := argument.partition("=")[0]) in known))
    if found:
        print(
            f"hint: {', '.join(found)} after {first} goes to {first}; if the cluster is meant: "
            f"rallypoint {context.info_name} {found[0]} ... {first}", file=sys.stderr,
        )  # fmt: skip


def hint_at_misspelt(context: typer.Context, first: str) -> None:
    """Say which options that we do not have look like one of ours, where those may stand after the script too."""
    known = _ours(context)
    for name in [argument.partition("=")[0] for argument in context.args if argument.startswith("--")]:
        if guess := meant(name, known):
            print(f"hint: {name} goes to {first}{guess}", file=sys.stderr)


def sizes(text: str) -> list[int]:
    if not all(part.strip().isdigit() for part in text.split(",") if part.strip()):
        raise ConfigError(f"'{text}' is not a list of numbers of workers: write it as 4,1,3")
    return [int(part) for part in text.split(",") if part.strip()]
