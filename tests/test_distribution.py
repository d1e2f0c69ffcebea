"""What people install: the wheel and the source distribution, built as `make dist` builds them, and tried elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import rallypoint

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BY_DEFAULT = {
    "torch", "numpy", "msgspec", "fsspec", "zstandard", "xxhash", "cryptography", "safetensors", "rich", "typer",
}  # fmt: skip


def run(*argv: str | Path, cwd: Path) -> str:
    """Run a program to its end, without this checkout on its path; what it printed if it succeeded."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name not in hidden and "RALLYPOINT" not in name}
    done = subprocess.run(
        [str(word) for word in argv], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"{argv}: {done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel that was built from the source distribution, and of that one."""
    source, to = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    others = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "constraints.txt", "Dockerfile")
    for name in ("pyproject.toml", "MANIFEST.in", *others):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    # Without isolation: the registry is not asked for setuptools, which is here.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", to, source, cwd=source)
    return to


def wheel_of(folder: Path) -> Path:
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    package = ROOT / "src/rallypoint"
    files = [*package.glob("watch/page/*"), *package.glob("watch/prometheus/*"), *package.rglob("*.yaml")]
    files += package.rglob("*.py")
    ours = {path.relative_to(ROOT / "src").as_posix() for path in files}
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        names = set(wheel.namelist())
    about = {name for name in names if name.startswith(f"rallypoint-{rallypoint.__version__}.dist-info/")}
    assert names - about == ours | {"rallypoint/py.typed"}
    assert f"rallypoint-{rallypoint.__version__}.dist-info/licenses/LICENSE" in about


@pytest.mark.slow
def test_the_metadata_is_what_an_index_takes(built: Path) -> None:
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        text = wheel.read(f"rallypoint-{rallypoint.__version__}.dist-info/METADATA")
    about = Metadata.from_email(text, validate=True)  # raises for fields that are unknown, double or malformed
    assert (about.name, str(about.version)) == ("rallypoint", rallypoint.__version__)
    assert (about.license_expression, about.license_files) == ("Apache-2.0", ["LICENSE"])
    assert about.description_content_type == "text/markdown"
    assert about.description == (ROOT / "README.md").read_text()
    assert about.requires_python is not None
    assert [version for version in ("3.10", "3.11", "3.12", "3.13") if version in about.requires_python] == [
        "3.11", "3.12", "3.13",
    ]  # fmt: skip
    assert set(about.provides_extra or []) == set(PROJECT["optional-dependencies"])


@pytest.mark.slow
def test_the_source_distribution_holds_what_is_read_and_no_part_of_the_tests(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "runs", "."))]


@pytest.mark.slow
def test_an_installed_package_trains_the_recipe_far_from_the_checkout(built: Path, tmp_path: Path) -> None:
    where = tmp_path / "venv"
    venv.create(where, symlinks=True)
    run(sys.executable, "-m", "pip", "--python", where / "bin/python", "install", "--no-deps", "--no-index",
        wheel_of(built), cwd=tmp_path)  # fmt: skip
    # Dependencies come from this environment: a path in a .pth file is added after the venv's own packages.
    (own,) = where.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    home = run(where / "bin/python", "-c", "import rallypoint; print(rallypoint.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(where)
    assert run(where / "bin/rallypoint", "--version", cwd=tmp_path) == f"rallypoint {rallypoint.__version__}\n"
    said = run(where / "bin/rallypoint", "train", "--workers", "1", "--servers", "1", "gpt", "--steps", "3",
               "--batch", "2", "--layers", "1", "--width", "32", cwd=tmp_path)  # fmt: skip
    assert re.search(r"\ndone: 3 steps, ", said), said
    assert list((tmp_path / "runs").glob("*/model*"))


def test_a_plain_installation_brings_little() -> None:
    names = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert names == BY_DEFAULT, "a new dependency for everybody: is it not one for an extra?"
    assert PROJECT["dynamic"] == ["version"], "the version stands in rallypoint/__init__.py only"


def test_every_pinned_version_is_one_that_the_project_takes() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.+]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for lines in (PROJECT["dependencies"], *extras.values()) for line in lines]
    wrong = [f"{need}: pinned to {pinned[need.name]}" for need in wanted
             if need.name in pinned and not need.specifier.contains(pinned[need.name])]  # fmt: skip
    assert not wrong
