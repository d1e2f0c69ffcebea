"""The documents: links lead somewhere, commands and names exist, and they stay short."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import rallypoint
from rallypoint.cli import app

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
MOST_README, MOST_GUIDE, MOST_TOGETHER = 700, 900, 44_500  # words, as `wc -w` counts them
REFERENCE = {"architecture", "internals", "mode-table", "performance", "protocol", "security"}


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
    assert all(words[page.name] <= MOST_GUIDE for page in DOCS if page.name in words and page.stem not in REFERENCE)
    assert sum(words.values()) <= MOST_TOGETHER


def test_the_readmes_figures_are_among_the_results() -> None:
    section = README.read_text().partition("## Three figures")[2].partition("\n## ")[0]
    figures = re.findall(r"(\d+(?:\.\d+)?) (?:s|times|MB)\b(?! of)", section.replace("**", ""))
    assert len(figures) >= 5
    results = (ROOT / "docs/performance.md").read_text()
    assert not [figure for figure in figures if not re.search(rf"\b{re.escape(figure)}\b", results)]


def test_results_have_their_command_commit_and_day() -> None:
    missing = []
    for section in (ROOT / "docs/performance.md").read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        source = r"(?:`(?:sudo )?(?:python|pytest|rallypoint|benchmarks)[^`]*`|by hand).* · [0-9a-f]{8}\b.* \d\d?\b"
        if title != "Compared with DDP" and not re.search(source, text):  # which takes its figures from the others
            missing.append(title)
    assert not missing


@pytest.mark.slow
def test_messages_that_are_explained_are_printed() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    trees = [ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    printed = "\n".join(text for text in texts if isinstance(text, str))
    assert len(rows) >= 10
    assert not [row for row in rows if row not in printed]


RECIPES = ("gpt", "resnet", "digits")
OPTIONS_OF_RUN = ("slurm", "k8s", "train", "chaos", "resume", "import")  # commands that hand them on


def options_of(command: Any) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `rallypoint` command that a page has, without what another program gets."""
    text = page.read_text().replace("\\|", "|")
    lines = re.findall(r"^\s*(?:\$ )?(?:\w+=\S+ )*(rallypoint .*)$", text, re.MULTILINE)
    lines += re.findall(r"`(?:\w+=\S+ )*(rallypoint [^`\n]*)`", text)
    for line in lines:
        try:
            yield shlex.split(re.split(r" [|>;&#]|\.\.\.", line)[0])[1:]
        except ValueError:  # prose with an apostrophe
            continue


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page: Path) -> None:
    root: Any = typer.main.get_command(app)
    unknown = []
    for words in commands(page):
        command, path = root, []
        while words and words[0] in getattr(command, "commands", {}):
            path.append(words.pop(0))
            command = command.commands[path[-1]]
        known = options_of(command) | {"--help"}
        if path and path[0] in OPTIONS_OF_RUN:
            known |= options_of(root.commands["run"])
        if not path and words and words[0].isalpha() and words[0].islower():
            unknown.append(words[0])
        for word in words:
            if word.endswith(".py") or word == "--" or word in RECIPES:
                break  # what follows is the script's
            if word.startswith("--") and path and word.partition("=")[0] not in known:
                unknown.append(" ".join([*path, word]))
    assert not unknown


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.stem)
def test_names_of_the_package_exist(page: Path) -> None:
    names = set(re.findall(r"\brp\.([A-Za-z_]\w*)", page.read_text()))
    assert not [name for name in names if not hasattr(rallypoint, name)]
