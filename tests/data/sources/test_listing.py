"""Which files a folder and a pattern mean, also where a store fails to list them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.data import files
from rallypoint.data.files import File, StoredFiles, meant
from rallypoint.errors import DataError

from failing_store import FailingStore, failing_store  # isort: skip

NAMES = (
    "a.tar", "notes.txt", "_SUCCESS", ".a.tar.crc", "_c.tar", "day=1/b.tar", "day=1/_temporary/0/b.tar", "day=2/c.tar",
    "_day=3/d.tar", "day=4/deep/e.tar", "out.tar/part-0.tar", "out.tar/_SUCCESS", ".cache/f.tar", "_temporary/0/g.tar",
)  # fmt: skip
MEANT = ["_day=3/d.tar", "a.tar", "day=1/b.tar", "day=2/c.tar", "day=4/deep/e.tar", "out.tar/part-0.tar"]


@pytest.fixture
def store(monkeypatch: Any) -> Iterator[type[FailingStore]]:
    with failing_store(monkeypatch) as made:
        for name in NAMES:
            FailingStore().pipe_file(f"/web/{name}", name.encode())
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / "web" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "web" / name).write_text(name)
    return tmp_path / "web"


CASES = [
    ("", MEANT), ("/", MEANT), ("/a.tar", ["a.tar"]), ("/notes.txt", ["notes.txt"]), ("/out.tar", ["part-0.tar"]),
    ("/_temporary", ["0/g.tar"]), ("/*.tar", ["a.tar", "out.tar/part-0.tar"]),
    ("/*", [*MEANT[:2], "day=1/b.tar", "day=2/c.tar", "day=4/deep/e.tar", "notes.txt", "out.tar/part-0.tar"]),
    ("/_*.tar", ["_c.tar"]), ("/day=[12]/*.tar", ["day=1/b.tar", "day=2/c.tar"]),
    ("/day=?", ["day=1/b.tar", "day=2/c.tar", "day=4/deep/e.tar"]),
    ("/day=*/_temporary/*/*.tar", ["day=1/_temporary/0/b.tar"]), ("/**/*.tar", MEANT), ("/**", MEANT),
    ("/day=4/**/e.tar", ["deep/e.tar"]), ("/day=4/deep/**/e.tar", ["e.tar"]), ("/*/deep/e.tar", ["day=4/deep/e.tar"]),
]


@pytest.mark.parametrize(("below", "names"), CASES, ids=[below for below, _ in CASES])
def test_the_files_that_are_meant(below: str, names: list[str], store: type[FailingStore], folder: Path) -> None:
    for url in (f"failing://web{below}", f"{folder}{below}"):
        found = StoredFiles().found(url, ".tar")
        assert [file.name for file in found] == names
        for file in found:
            data = StoredFiles().read(file, 0, file.size).decode()
            assert data.endswith(file.name)


def test_brackets_in_the_name_of_what_is_there_are_no_pattern(tmp_path: Path) -> None:
    """As in a folder that is called after a setting."""
    inside = tmp_path / "run[seed=1]" / "part[0].tar"
    inside.parent.mkdir()
    inside.write_text("whole")
    for given in (inside.parent, inside):
        (found,) = StoredFiles().found(given, ".tar")
        assert (found.name, StoredFiles().read(found, 0, found.size)) == ("part[0].tar", b"whole")


@pytest.mark.parametrize("below", ["", "/**/*.tar"])
def test_a_listing_that_fails_costs_no_file(below: str, store: type[FailingStore]) -> None:
    store.refused = 2
    assert [file.name for file in StoredFiles().found(f"failing://web{below}", ".tar")] == MEANT


def test_a_listing_that_always_fails_is_an_error(store: type[FailingStore]) -> None:
    store.refused = 100
    for below in ("", "/*/*.tar"):
        with pytest.raises(DataError, match=r"web cannot be read: OSError: the store is too busy .* \(5 tries\)"):
            StoredFiles().found(f"failing://web{below}", ".tar")


def test_a_folder_that_is_deleted_meanwhile_is_told(
    store: type[FailingStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or is empty: some stores have no such folders, and list the object that stands for it."""
    files = FailingStore.ls

    def listed(self: FailingStore, path: str, detail: bool = True, **more: Any) -> Any:
        if path in gone:
            raise FileNotFoundError(path)
        return files(self, path, detail=detail, **more)

    monkeypatch.setattr(FailingStore, "ls", listed)
    gone = {"/web/day=2"}
    found = StoredFiles().found("failing://web", ".tar")
    assert [file.name for file in found] == [n for n in MEANT if "day=2" not in n]
    assert "/web/day=2 is not there, though its folder has it" in caplog.text
    gone = {"/web"}
    with pytest.raises(DataError, match="web cannot be read"):
        StoredFiles().found("failing://web", ".tar")


def test_what_was_written_meanwhile_is_found(store: type[FailingStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with s3fs, which keeps what it has listed."""
    kept: dict[str, Any] = {}
    files = FailingStore.ls

    def listed(self: FailingStore, path: str, detail: bool = True, **more: Any) -> Any:
        return kept.setdefault(path, files(self, path, detail=detail, **more))

    monkeypatch.setattr(FailingStore, "ls", listed)
    monkeypatch.setattr(FailingStore, "invalidate_cache", lambda self, path=None: kept.clear())
    assert len(StoredFiles().found("failing://web/day=2", ".tar")) == 1
    FailingStore().pipe_file("/web/day=2/more.tar", b"")
    assert len(StoredFiles().found("failing://web/day=2", ".tar")) == 2


def test_a_link_to_a_file_is_one_and_a_link_to_a_folder_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in the cache of huggingface_hub. A folder may hold itself by a link."""
    (folder / "day=2" / "link.tar").symlink_to(folder / "a.tar")
    (folder / "day=2" / "nowhere").symlink_to(folder / "nowhere")
    (folder / "day=2" / "latest").symlink_to(folder)
    found = StoredFiles().found(folder / "day=2", ".tar")
    assert [(file.name, file.size) for file in found] == [("c.tar", 11), ("link.tar", 5)]
    assert [line for line in caplog.messages if "latest is a link to a folder" in line]
    (folder / "day=2" / "nowhere.tar").symlink_to(folder / "nowhere")
    with pytest.raises(DataError, match=r"nowhere\.tar cannot be read"):
        StoredFiles().found(folder / "day=2", ".tar")


def test_a_file_has_the_name_by_which_it_can_be_asked_for() -> None:
    for url, path, said in (
        ("https://host/data/", "https://host/data/0.tar", "https://host/data/0.tar"),
        ("s3://bucket/data", "bucket/data/0.tar", "s3://bucket/data/0.tar"),
        ("failing://web", "/web/0.tar", "failing://web/0.tar"),
        ("simplecache::s3://bucket", "bucket/0.tar", "simplecache::s3://bucket/0.tar"),
        ("/here", "/here/0.tar", "/here/0.tar"),
    ):
        assert str(File(path, "0.tar", 1, "", url=url)) == said


class Web:
    """As fsspec shows a web server: everything is a file, and a page with links can be listed."""

    protocol = ("http", "https")

    def __init__(self, host: str) -> None:
        self.pages = {
            f"{host}/data/": ["?C=N;O=D", f"{host}/data/", "a.tar", "_b.tar", "day=1/"],
            f"{host}/data/day=1/": ["c.tar", f"{host}/data/day=1/d.tar"],
        }

    def info(self, path: str) -> dict[str, Any]:
        page = path.rstrip("/") + "/" in self.pages
        return {"name": path, "type": "file", "size": 5, **({"mimetype": "text/html"} if page else {})}

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        path = path.rstrip("/") + "/"
        names = [name if "://" in name else path + name for name in self.pages[path]]
        return [{"name": name, "type": "directory" if name.endswith("/") else "file", "size": None} for name in names]


def test_a_web_servers_pages_are_listed() -> None:
    host = "https://host:8443"
    for url, names in (
        ("/data", ["a.tar", "day=1/c.tar", "day=1/d.tar"]), ("/data/", ["a.tar", "day=1/c.tar", "day=1/d.tar"]),
        ("/data/*/*.tar", ["day=1/c.tar", "day=1/d.tar"]), ("/data/a.tar", ["a.tar"]),
        ("/data/a.tar?signed=4b/2*?", ["a.tar"]), ("/data/*.tar?signed=4b", []),
    ):  # fmt: skip
        found = meant(Web(host), host + url, ".tar")
        assert [file.name for file in found] == names
        assert all(file.path.startswith(f"{host}/data/") for file in found)


class OfHttp(Exception):
    """As aiohttp raises them."""

    __module__ = "aiohttp.client_exceptions"

    def __init__(self, status: int | None) -> None:
        super().__init__(f"status {status}")
        if status is not None:
            self.status = status


@pytest.mark.parametrize(
    ("cause", "tries"),
    [
        (OfHttp(500), 5), (OfHttp(503), 5), (OfHttp(429), 5), (OfHttp(None), 5), (TimeoutError(), 5), (OfHttp(404), 1),
        (OfHttp(403), 1), (FileNotFoundError(), 1), (ValueError(), 1), (None, 1),
    ],
    ids=repr,
)  # fmt: skip
def test_a_web_server_that_fails_is_asked_again(
    cause: Exception | None, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec says then that the file is not there."""
    monkeypatch.setattr(files, "PAUSES_S", (0.0,) * 4)
    made = []

    def ask() -> None:
        made.append(1)
        raise FileNotFoundError("https://host/0.tar") from cause

    with pytest.raises(DataError, match=re.escape("0.tar cannot be read")):
        files.patiently(ask, "0.tar")
    assert len(made) == tries
