"""What stands on a command line besides our options: the user's script or recipe, and its own arguments."""

from __future__ import annotations

import importlib
import os
import sys

import typer

from rallypoint.errors import ConfigError, UsageError, meant


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
    from rallypoint.recipes import RECIPES

    if recipe not in RECIPES:
        raise UsageError(f"there is no recipe {recipe}: choose one of {', '.join(sorted(RECIPES))}")
    argv = [sys.executable, "-P", "-m", RECIPES[recipe], *arguments]
    if "--help" in arguments:
        os.execv(sys.executable, argv)
    return argv


def check_recipe(recipe: str, arguments: list[str]) -> None:
    """Let a recipe check its own options before anything starts. Ends the command if they are wrong."""
    from rallypoint.recipes import CHECKED, RECIPES

    if recipe not in CHECKED:
        return
    module = importlib.import_module(RECIPES[recipe])
    status = module.main([*arguments, "--check"], program=f"rallypoint train {recipe}")
    if status or "--check" in arguments:
        raise typer.Exit(status)


def refuse_option(context: typer.Context, first: str, what: str) -> None:
    """Raise UsageError if what was taken for the script or the recipe is an option that we do not have."""
    if not first.startswith("-"):
        return
    name = first.partition("=")[0]
    known = [option for parameter in context.command.params for option in parameter.opts if option.startswith("--")]
    raise UsageError(
        f"there is no option {name}{meant(name, known) or f'; `rallypoint {context.info_name} --help` lists them'} "
        f"(the {what}'s own options stand after it)"
    )


def hint_at_misplaced(context: typer.Context, given: list[str], first: str) -> None:
    """Say which of our options stand after the script or the recipe: they are passed on to it, as everything there."""
    known = {option for parameter in context.command.params for option in parameter.opts if option.startswith("--")}
    found = list(dict.fromkeys(name for argument in given if (name := argument.partition("=")[0]) in known))
    if found:
        print(
            f"hint: {', '.join(found)} after {first} goes to {first}; if the cluster is meant: "
            f"rallypoint {context.info_name} {found[0]} ... {first}", file=sys.stderr,
        )  # fmt: skip


def hint_at_misspelt(context: typer.Context, first: str) -> None:
    """Say which options that we do not have look like one of ours, where those may stand after the script too."""
    known = {option for parameter in context.command.params for option in parameter.opts if option.startswith("--")}
    for name in [argument.partition("=")[0] for argument in context.args if argument.startswith("--")]:
        if guess := meant(name, known):
            print(f"hint: {name} goes to {first}{guess}", file=sys.stderr)


def sizes(text: str) -> list[int]:
    if not all(part.strip().isdigit() for part in text.split(",") if part.strip()):
        raise ConfigError(f"'{text}' is not a list of numbers of workers: write it as 4,1,3")
    return [int(part) for part in text.split(",") if part.strip()]
