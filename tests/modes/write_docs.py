"""Writes the table of modes into docs/mode-table.md: ``python tests/modes/write_docs.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rallypoint.core.modes import MODES, Feature, ModeName
from rallypoint.core.modes.table import ALONE, CONFLICTS, TABLE, Cell, No, Only

DOCS = Path(__file__).parents[2] / "docs" / "mode-table.md"


def markdown_modes() -> str:
    """A Markdown table with the description of every mode, one row each."""
    rows = [
        (
            _mode(traits.name, "rp."),
            traits.clock.value, traits.holder.value, traits.contribution.value, "yes" if traits.drops else "no",
            traits.bytes.value, "yes" if traits.leaves_state else "no",
        )
        for traits in MODES.values()
    ]  # fmt: skip
    head = (
        "mode", "a version counts", "state is held by", "contribution", "may be dropped", "same bytes",
        "state on workers",
    )  # fmt: skip
    return _table(head, rows)


def markdown_table() -> str:
    """A Markdown table of what each mode supports, one row for each feature; then the conflicts.

    Why not is said by the error that a user gets.
    """
    rows = [(_written(feature), *(_cell(TABLE[feature][mode]) for mode in ModeName)) for feature in Feature]
    table = _table(("feature", *(_mode(mode) for mode in ModeName)), rows)
    conflicts = _table(("feature", "not with", "because"), list(_conflicts()))
    return f"{table}\n\n## What does not work together\n\n{conflicts}"


def _cell(cell: Cell) -> str:
    match cell:
        case No():
            return "no"
        case Only(beside=beside):
            return f"with `{beside.value}`"
        case _:
            return "yes"


def _conflicts() -> Iterator[tuple[str, str, str]]:
    """A feature, the others with which it is refused for one reason, and the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for conflict in CONFLICTS:
        where = ", ".join(_mode(mode) for mode in ModeName if mode in conflict.modes)
        only = "" if conflict.modes == frozenset(ModeName) else f" (under {where})"
        found.setdefault((_short(conflict.first), _cause(conflict.why)), []).append(f"{_short(conflict.second)}{only}")
    for (first, why), others in found.items():
        yield first, " or ".join(others), why
    for alone in ALONE:
        takes = " or ".join(_short(feature) for feature in Feature if feature in alone.takes)
        yield _short(alone.feature), f"anything but {takes}", _cause(alone.why)


def _cause(why: str) -> str:
    """The reason alone: the error that a user gets says what to do too."""
    return why.partition(";")[0]


def _mode(mode: ModeName, before: str = "") -> str:
    """The mode as Markdown code; settings that it is used with follow in words."""
    setting, _, others = mode.value.partition(" with ")
    return f"`{before}{setting}`" + (" with " + " or ".join(f"`{other}`" for other in _names(others)) if others else "")


def _names(words: str) -> list[str]:
    return words.replace(" or ", ", ").split(", ")


def _written(feature: Feature) -> str:
    """Settings as code, the rest as words."""
    return re.sub(
        r"--replication 2|--[a-z-]+|run\.every|\w+=[^\s()]*(?:\(\))?", lambda found: f"`{found[0]}`", feature.value
    )


def _short(feature: Feature) -> str:
    """Without the words in brackets, which the table has."""
    return re.sub(r" \(.*?\)$", "", _written(feature))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PRINTED = {"modes": markdown_modes(), "table": markdown_table()}


def marks(name: str) -> tuple[str, str]:
    """What stands before and after a printed part."""
    return f"<!-- {name}: printed by tests/modes/write_docs.py -->\n", f"\n<!-- end of {name} -->"


def printed(name: str) -> str:
    """The part as it stands in the document."""
    start, end = marks(name)
    return DOCS.read_text().split(start)[1].split(end)[0]


if __name__ == "__main__":
    text = DOCS.read_text()
    for name, part in PRINTED.items():
        start, end = marks(name)
        text = re.sub(f"(?s)(?<={re.escape(start)}).*?(?={re.escape(end)})", lambda _, new=part: new, text)
    DOCS.write_text(text)
