"""``make release``: everything that a release needs is built and checked. It is a dry run, unless --tag is given.

    python .ci/release.py               # version, wheel, source distribution, README as a package index shows it, site
    python .ci/release.py --tag         # the same; then the tag v0.1.0 is made in this clone. Nothing is uploaded

The README's relative links lead nowhere on a package index. So the packages are built from a copy of the last commit in
which they point to the project's address (`Source` in pyproject.toml).
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "https://example.org"
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s]+\))")


def version() -> str:
    """The package's version."""
    (found,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "src/rallypoint/__init__.py").read_text(), re.MULTILINE)
    return str(found)


def source() -> str:
    """The project's address."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"])


def for_an_index(readme: str) -> str:
    """The README with links and pictures that work anywhere: those of this version at the project's address."""
    pictures = re.sub(rf"(!\[[^\]]*){LINK.pattern}", rf"\1\2{source()}/raw/v{version()}/\3", readme)
    return LINK.sub(rf"\1{source()}/blob/v{version()}/\2", pictures)


def problems(readme: str) -> list[str]:
    """Why this cannot be released; [] if it can."""
    found = []
    if f"\n## {version()}" not in (ROOT / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md has no section {version()}")
    if f"\nversion: {version()}\n" not in (ROOT / "CITATION.cff").read_text():
        found.append(f"CITATION.cff is not of version {version()}")
    found += [f"README: {link} leads nowhere on a package index" for link in relative_links(readme)]
    if git("status", "--porcelain").strip():
        found.append("there are changes that are not committed; the packages are built from the last commit")
    if source().startswith(PLACEHOLDER):
        found.append(f"the project's addresses in pyproject.toml are placeholders ({source()})")
    return found


def relative_links(text: str) -> list[str]:
    """Links and pictures that need the files beside the README."""
    return [match[2].rstrip(")") for match in LINK.finditer(text)]


def git(*arguments: str) -> str:
    """What git says of this clone."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def run(*argv: str | Path, cwd: Path = ROOT) -> None:
    """Run a program to its end; a failure ends the release."""
    print("$", *argv, flush=True)
    if status := subprocess.run([str(word) for word in argv], cwd=cwd).returncode:
        sys.exit(f"not released: {argv[2] if len(argv) > 2 else argv[0]} ended with status {status}")


def build(into: Path) -> None:
    """The wheel and the source distribution of the last commit."""
    with tempfile.TemporaryDirectory() as copy:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(copy, filter="data")
        readme = Path(copy, "README.md")
        readme.write_text(for_an_index(readme.read_text()))
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", into, copy)


def main() -> None:
    """Build, check, say what is missing; with --tag, tag."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", action="store_true", help="make the tag if nothing is missing")
    parser.add_argument("--no-docs", action="store_true", help="do not build the site")
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    into = given.into.resolve()
    for old in into.glob("rallypoint-*"):
        old.unlink()
    build(into)
    packages = sorted(into.glob("rallypoint-*"))
    run(sys.executable, "-m", "twine", "check", "--strict", *packages)
    if not given.no_docs:
        run(sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", "docs/_build/html")
    for path in packages:
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
    missing = problems(for_an_index((ROOT / "README.md").read_text()))
    print("\n".join(f"missing: {one}" for one in missing) or "nothing is missing")
    if not given.tag:
        print(f"this was a dry run: version {version()} is not tagged (make release TAG=1)")
    elif missing:
        sys.exit(f"not released: version {version()} is not tagged")
    else:
        run("git", "tag", "--annotate", f"v{version()}", "--message", f"Rallypoint {version()}")
        print(f"push the tag v{version()}, then: python -m twine upload {into}/rallypoint-{version()}*")


if __name__ == "__main__":
    main()
