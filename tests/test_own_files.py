"""Another user of the machine puts links, pipes and files where ours will be: nothing of his is run, believed, waited
for or overwritten.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.bridges import joining
from rallypoint.data import tars
from rallypoint.data.cache import Cache, CacheEntries, FilePiece
from rallypoint.errors import DataError, UsageError
from rallypoint.launch import environment
from rallypoint.launch.engines.discovery import FolderBoard, FoundJob, Place, check_own, look, private_folder
from rallypoint.launch.folder import COORDINATOR_LOCK, Where, coordinated, write_where
from rallypoint.launch.plan import Launch, write_plan
from rallypoint.own_files import is_alone_in_group, not_ours, not_private, opened
from rallypoint.store import files

SOMEBODY = 65534
PLACE = Place(launcher="mpirun", rank=1, world=2, local_rank=1, nodes=1, attempt="7")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of the victim's."""
    path = tmp_path / "home" / "precious"
    path.parent.mkdir()
    path.write_text("years of work")
    return path


def returns(call: Callable[[], object]) -> object:
    """What a call raises or returns, in a process of its own: one that waits for ever fails the test alone."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def run() -> None:
        try:
            send.send(call())
        except Exception as error:
            send.send(error)

    process = context.Process(target=run)
    process.start()
    send.close()
    try:
        assert receive.poll(20), "it waits for ever"
        return receive.recv()
    finally:
        process.kill()
        process.join()
        receive.close()


# ---- the helper ----


def test_a_link_of_ones_own_is_followed_and_none_inside(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "link").symlink_to(precious.parent)
    with opened(tmp_path / "link") as folder:
        assert folder.read("precious") == b"years of work"
        (precious.parent / "inside").symlink_to(precious)
        for use in (folder.read, folder.lock_file, folder.make):
            with pytest.raises(OSError, match=r"symbolic links|File exists"):
                use("inside")
        (precious.parent / "sub").symlink_to(tmp_path)
        with pytest.raises(OSError, match=r"Not a directory|symbolic links"), folder.folder("sub", make=True):
            pass


@as_root
def test_a_link_of_somebody_else_is_not_followed(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "link").symlink_to(precious.parent)
    os.lchown(tmp_path / "link", SOMEBODY, SOMEBODY)
    with pytest.raises(OSError, match="a link of another user"), opened(tmp_path / "link"):
        pass


def test_a_file_is_written_whole_or_the_one_before_stays(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "folder", make=True) as folder:
        folder.write("file", b"first")
        assert stat.S_IMODE(folder.stat("file").st_mode) == 0o600
        with pytest.raises(TypeError):
            folder.write("file", b"second", 3)  # type: ignore[arg-type]
        assert folder.names() == ["file"]
        assert folder.read("file") == b"first"
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700


def test_a_pipe_is_no_file_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with opened(tmp_path) as folder:
        for use in (folder.read, folder.lock_file):
            with pytest.raises(OSError, match="no regular file"):
                use("pipe")
        assert not folder.has("pipe")


def test_whose_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    about = path.stat()
    assert (not_ours(about), not_private(about)) == ("", "")
    path.chmod(0o644)
    assert (not_ours(path.stat()), not_private(path.stat())) == ("", "may be read by other users")
    path.chmod(0o620)
    assert not_ours(path.stat()) == "may be written by other users"
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert "belongs to another user" in not_private(about)
    assert not is_alone_in_group(about)


# ---- the cache ----


def piece() -> FilePiece:
    return FilePiece(b"f" * 16, 0, 100)


def test_a_cache_overwrites_nothing_through_links(tmp_path: Path, precious: Path) -> None:
    folder, name = tmp_path / "cache", piece().name
    (folder / "entries" / name[:2]).mkdir(parents=True)
    for link in ("size.new", f"entries/{name[:2]}/{name}.partial"):
        (folder / link).symlink_to(precious)
    cache = Cache(folder)
    assert cache.get(piece(), lambda: bytes(100)) == bytes(100)
    assert cache.get(piece(), lambda: b"") == bytes(100)
    assert precious.read_text() == "years of work"


def test_a_cache_deletes_nothing_through_links(
    tmp_path: Path, precious: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path / "cache", limit=1000)
    (tmp_path / "cache" / "entries" / "aa").symlink_to(precious.parent)
    (tmp_path / "cache" / "size").write_text("5000")  # so room has to be made
    assert cache.get(piece(), lambda: bytes(100)) == bytes(100)
    assert "keeps nothing more in the cache" in caplog.text
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("name", ["size", "locks/size"])
def test_nobody_waits_for_a_pipe_in_a_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    (tmp_path / "locks").mkdir()
    os.mkfifo(tmp_path / name)
    got, said = returns(lambda: (Cache(tmp_path).get(piece(), lambda: bytes(100)), caplog.text))  # type: ignore[misc]
    assert got == bytes(100)
    assert "no regular file" in said


def test_an_entry_that_is_a_link_is_not_read(tmp_path: Path, precious: Path) -> None:
    entries = CacheEntries(tmp_path / "cache", 1000)
    entries.prepare()
    entries.keep("aa11", bytes(10))
    (tmp_path / "cache/entries/aa/aa11").rename(tmp_path / "elsewhere")
    (tmp_path / "cache/entries/aa/aa11").symlink_to(tmp_path / "elsewhere")
    assert not entries.has("aa11")
    with pytest.raises(OSError, match="symbolic links"):
        entries.read("aa11")


# ---- the index of tars ----


def test_an_index_overwrites_nothing_through_links(tmp_path: Path, precious: Path) -> None:
    index = tmp_path / "index"
    (tmp_path / f".index.{os.getpid()}.partial").symlink_to(precious)
    index.symlink_to(precious)
    tars._keep(index, [("a.tar", 1, "")], [])
    assert precious.read_text() == "years of work"
    assert not index.is_symlink()
    assert tars._kept(index, [("a.tar", 1, "")]) == []


def test_an_index_that_is_a_pipe_is_a_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index")
    found = returns(lambda: tars._kept(tmp_path / "index", []))
    assert isinstance(found, DataError)
    assert "no regular file; name another file" in str(found)


# ---- the folder in /tmp, whose name can be guessed ----


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /tmp; returns the folder where the processes of PLACE will meet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(environment.FOLDER, raising=False)
    return tmp_path / f"rallypoint-{os.geteuid()}-7"


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder)


def a_pipe_inside(folder: Path) -> None:
    folder.mkdir(0o700)
    os.mkfifo(folder / "coordinator-7.json", 0o600)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "coordinator-7.json").touch(0o600)


@pytest.mark.parametrize("put", [a_pipe, a_pipe_inside, open_to_all])
def test_what_others_put_there_is_refused_at_once(shared: Path, put: Callable[[Path], None]) -> None:
    put(shared)
    assert isinstance(returns(lambda: look(PLACE, 5.0)), UsageError)


def test_what_others_put_there_is_no_private_folder(shared: Path) -> None:
    a_pipe(shared)
    with pytest.raises(UsageError, match=r"RALLYPOINT_FOLDER to a folder of your own"), private_folder(PLACE):
        pass


@as_root
@pytest.mark.parametrize("what", ["folder", "link"])
def test_a_folder_of_another_user_is_refused(shared: Path, what: str, precious: Path) -> None:
    if what == "folder":
        shared.mkdir(0o700)
    else:
        precious.parent.chmod(0o700)
        shared.symlink_to(precious.parent)
    os.lchown(shared, SOMEBODY, SOMEBODY)
    for use in (lambda: FolderBoard(PLACE).read(), lambda: private_folder(PLACE).__enter__()):
        with pytest.raises(UsageError, match="another user"):
            use()


def test_our_own_folder_there_is_used_and_goes(shared: Path) -> None:
    board = FolderBoard(PLACE)
    assert board.read() is None
    with private_folder(PLACE) as folder, board.published(b"here"):
        assert folder == shared
        assert board.read() == b"here"
    assert not shared.exists()


def test_a_token_file_that_is_a_link_or_a_pipe_is_not_used(tmp_path: Path, precious: Path) -> None:
    precious.chmod(0o600)
    check_own(precious)
    (tmp_path / "link").symlink_to(precious)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe"):
        found = returns(lambda name=name: check_own(tmp_path / name))  # type: ignore[misc]
        assert isinstance(found, UsageError)


# ---- a run's folder, and where a script's processes meet ----


def links(folder: Path, precious: Path, *names: str) -> None:
    for name in names:
        (folder / name).symlink_to(precious)


def test_what_is_written_into_a_run_s_folder_goes_through_no_link(tmp_path: Path, precious: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    links(run, precious, "run.json.new", "run.new", "cluster.json.new", "cluster.json", "torch-meeting.json.new")
    links(run, precious, "torch-meeting.new")
    write_plan(Launch(worker=("true",), folder=str(run)))
    write_where(run, Where("127.0.0.1:1", "token"))
    job: Any = msgspec.defstruct("Job", [("welcome", Any)])(msgspec.defstruct("Welcome", [("folder", str)])(str(run)))
    joining._meeting(job, 0, "127.0.0.1:1", "run")
    assert precious.read_text() == "years of work"


def test_a_coordinator_s_lock_that_is_a_link_is_refused(tmp_path: Path, precious: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    links(run, precious, COORDINATOR_LOCK)
    with pytest.raises(UsageError, match="cannot hold the journal"), coordinated(run):
        pass
    assert precious.read_text() == "years of work"


def test_a_file_past_the_page_cache_is_a_new_one(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file system has no direct writing, and another user knew the file's name."""
    monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)  # with O_CREAT this is EINVAL
    links(tmp_path, precious, "file")
    buffer = files.new_buffer()
    with files.DirectFile(str(tmp_path / "file"), buffer) as file:
        file.write(b"ours")
        file.sync()
    buffer.close()
    assert precious.read_text() == "years of work"


def test_found_is_what_the_board_has(shared: Path) -> None:
    found = msgspec.json.encode(FoundJob("127.0.0.1:1"))  # where nobody listens
    refused = pytest.raises(UsageError, match="rank 0 has started no coordinator")
    with private_folder(PLACE), FolderBoard(PLACE).published(found), refused:
        look(PLACE, 0.3)
