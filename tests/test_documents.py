"""The documents: every link leads somewhere, and they stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
MOST_README, MOST_TOGETHER = 700, 45_000  # words, as `wc -w` counts them


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        assert anchor not in found, f"{page.name} has two headings that give #{anchor}"
        found.add(anchor)
    return found


@pytest.mark.parametrize(
    "page", [README, ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", *DOCS], ids=lambda page: page.stem
)
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):  # another site's
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


def test_the_documents_are_short() -> None:
    words = {page.name: len(page.read_text().split()) for page in [README, *DOCS] if page.stem != "index"}
    assert words["README.md"] <= MOST_README
    assert sum(words.values()) <= MOST_TOGETHER
