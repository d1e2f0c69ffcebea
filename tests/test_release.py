"""A release: what `make release` builds and checks, and the files that a project has for those who find it."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import rallypoint

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "release.py"


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_the_readme_has_no_link_that_a_package_index_cannot_follow(release: dict[str, Any]) -> None:
    readme = (ROOT / "README.md").read_text()
    assert release["relative_links"](readme), "it has some in a clone"
    shown = release["for_an_index"](readme)
    assert release["relative_links"](shown) == []
    at = f"{release['source']()}/raw/v{rallypoint.__version__}"
    assert f"]({at}/docs/images/page.png)" in shown
    assert "](docs/" not in shown


def test_nothing_is_missing_but_the_projects_address(release: dict[str, Any]) -> None:
    missing = release["problems"](release["for_an_index"]((ROOT / "README.md").read_text()))
    assert [one for one in missing if "placeholder" not in one and "not committed" not in one] == []


def test_the_citation_has_the_version_and_the_address() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert citation["version"] == rallypoint.__version__
    assert citation["repository-code"] == urls["Source"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_changelog_is_short_and_has_the_version() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert f"## {rallypoint.__version__}" in lines
    assert len(lines) <= 60


def test_issue_templates_have_what_a_forge_reads() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"):
        _, head, body = path.read_text().split("---\n", 2)
        assert yaml.safe_load(head).keys() == {"name", "about"}
        assert body.strip()


@pytest.mark.parametrize("name", ["llms.txt", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text())
    assert links
    assert [link for link in links if ":" not in link and not (ROOT / link).exists()] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("twine") is None, reason="needs twine: make release brings it")
def test_a_dry_run_builds_what_an_index_takes(tmp_path: Path) -> None:
    argv = [sys.executable, str(SCRIPT), "--no-docs", "--into", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this was a dry run" in done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert list(tmp_path.glob("*.tar.gz"))
    with zipfile.ZipFile(wheel) as files:
        about = files.read(f"rallypoint-{rallypoint.__version__}.dist-info/METADATA").decode()
    assert "](docs/" not in about
