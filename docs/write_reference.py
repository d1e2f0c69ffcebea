"""Writes docs/reference/api.md and docs/reference/commands.md from the code: ``python docs/write_reference.py``."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import rallypoint
from rallypoint.cli import app

FOLDER = Path(__file__).parent / "reference"


def api() -> Iterator[str]:
    """Every name of ``rallypoint.__all__``, with its public methods."""
    yield "# Python API\n\nEvery public name, as `import rallypoint as rp` gives it. Written from the docstrings."
    for name in sorted(set(rallypoint.__all__) - {"__version__"}, key=str.lower):
        thing = getattr(rallypoint, name)
        yield f"## `rp.{name}`"
        yield from _described(name, thing)
        if not inspect.isclass(thing):
            continue
        for member, value in vars(thing).items():
            if member.startswith("_"):
                continue
            if isinstance(value, property):
                yield f"### `{name}.{member}`\n\n{_text(value)}"
            elif inspect.isfunction(inspect.unwrap(value)):
                yield f"### `{name}.{member}()`"
                yield from _described(member, value)


def _described(name: str, thing: Any) -> Iterator[str]:
    try:
        signature = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", str(inspect.signature(thing)))  # without modules
    except (TypeError, ValueError):
        signature = "(...)"
    signature = re.sub(r" at 0x\w+", "", signature)
    if len(signature) > 80:
        signature = re.sub(r", (?=\*{0,2}\w+[:,=)]|\*)", ",\n    ", signature)
    yield f"```{{code-block}} text\n:class: signature\n\n{name}{signature}\n```"
    yield _text(thing)


def _text(thing: Any) -> str:
    """The docstring; examples that are indented stay as they are."""
    return re.sub(r"::$", ":", inspect.getdoc(thing) or "", flags=re.MULTILINE)


def commands() -> Iterator[str]:
    """Every command of ``rallypoint``, with its arguments and options."""
    yield "# Commands\n\nEvery command and option, as `rallypoint COMMAND --help` says them."
    yield from _command("rallypoint", typer.main.get_command(app))


def _command(name: str, command: Any) -> Iterator[str]:
    if name != "rallypoint":
        yield f"## `{name}`"
        yield _plain(command.help)
        rows = [_row(param) for param in command.params if not param.hidden] if command.params else []
        if rows:
            yield "\n".join(["| option | | default |", "|---|---|---|", *rows])
    for sub, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _command(f"{name} {sub}", inner)


def _row(param: Any) -> str:
    names = param.opts + param.secondary_opts if param.param_type_name == "option" else [param.metavar or param.name]
    default = param.default
    shown = f"`{default}`" if isinstance(default, str | int | float | Path) and default not in ("", False) else ""
    says = " ".join(_plain(getattr(param, "help", "")).split()).replace("|", "\\|")
    return f"| {' '.join(f'`{one}`' for one in names)} | {says} | {'needed' if param.required else shown} |"


def _plain(text: str | None) -> str:
    """Without rich's markup; what stands in angle brackets is no HTML."""
    return re.sub(r"(?<!\\)\[/?\w+\]", "", inspect.cleandoc(text or "")).replace("\\[", "[").replace("<", "&lt;")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, parts in (("api", api()), ("commands", commands())):
        (FOLDER / f"{name}.md").write_text("\n\n".join(part for part in parts if part) + "\n")


if __name__ == "__main__":
    main()
