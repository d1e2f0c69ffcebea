"""Writes the table of modes into docs/modes.md: ``python tests/modes/write_docs.py``."""

from __future__ import annotations

import re
from pathlib import Path

from rallypoint.core.modes.markdown import markdown_modes, markdown_table

DOCS = Path(__file__).parents[2] / "docs" / "modes.md"
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
