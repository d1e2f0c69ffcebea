"""Folders that are open, and the files in them: nobody leads us elsewhere by links, pipes or other people's files.

A path is looked up anew each time that it is used, so who may write one of its folders chooses where it leads. A folder
that is open stays the same one: `OpenFolder` makes and reads its files relative to it, and follows no link in it.

    with opened(folder, make=True) as own:
        if why := own.not_private():
            raise UsageError(f"{folder} {why}")
        own.write("token", text)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe would wait for the process at its other end
_MOST_LINKS = 20
_LOOK_S = 0.05  # between two looks at a lock
LOCK, COORDINATOR_LOCK = "lock", "coordinator.lock"  # of a run's folder
MOST_BYTES = 64 << 20  # of a file that is read whole: a sparse one may claim to be larger than all memory


@contextlib.contextmanager
def opened(path: Path, *, make: bool = False) -> Iterator[OpenFolder]:
    """In the body the folder at `path` is open. `make`: it is made before, with its parents, for this user alone.

    If `path` itself is a link, it is followed only if it is this user's or root's. Raises OSError if there is no
    folder, or it is another user's link.
    """
    if make and not os.path.lexists(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(_followed(path), _FOLDER)
    try:
        yield OpenFolder(path, descriptor)
    finally:
        os.close(descriptor)


class OpenFolder:
    """A folder that is open, see `opened`. Names are of files directly in it; `path` is for messages.

    Any thread may use it while it is open. All methods raise OSError as the disk does.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    def not_private(self) -> str:
        """Return why the folder is not this user's alone; "" if it is: see `not_private`."""
        return not_private(os.fstat(self.descriptor))

    @contextlib.contextmanager
    def folder(self, name: str, *, make: bool = False) -> Iterator[OpenFolder]:
        """In the body a folder in this one is open. `make`: it is made before if it is not there."""
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
        descriptor = os.open(name, _FOLDER, dir_fd=self.descriptor)
        try:
            yield OpenFolder(self.path / name, descriptor)
        finally:
            os.close(descriptor)

    def open(self, name: str) -> BinaryIO:
        """Open a file to read it. Raises OSError if it is a link, or no regular file (a pipe, a device)."""
        return os.fdopen(self._regular(name, os.O_RDONLY), "rb", buffering=0)

    def read(self, name: str, most: int = MOST_BYTES) -> bytes:
        """Return the bytes of a file: see `open`. Raises OSError if they are more than `most`."""
        with self.open(name) as file:
            return _whole(file, most)

    def lock_file(self, name: str) -> int:
        """Return the descriptor of a file to lock, made if it is not there: see `open`. The caller closes it."""
        return self._regular(name, os.O_RDWR | os.O_CREAT)

    def make(self, name: str, mode: int = 0o600) -> BinaryIO:
        """Make a new file and open it to write. Raises FileExistsError if anything has that name, a link too."""
        flags = _FILE | os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return os.fdopen(os.open(name, flags, mode, dir_fd=self.descriptor), "wb", buffering=0)

    def write(self, name: str, *parts: bytes, mode: int = 0o600, beside: str = "") -> None:
        """Write a file whole or not at all, in place of any of that name.

        It is written under the name `beside` first ("": ``NAME.new``), which two writers must not have at once.
        """
        beside = beside or f"{name}.new"
        self.unlink(beside)  # of a process that was killed
        try:
            with self.make(beside, mode) as file:
                for part in parts:
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]
            os.replace(beside, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            self.unlink(beside)
            raise

    def unlink(self, name: str) -> None:
        """Delete a file or a link. Does nothing if there is none."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def touch(self, name: str) -> None:
        """Let a file count as used now."""
        os.utime(name, dir_fd=self.descriptor, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """True if there is a regular file of that name."""
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def names(self) -> list[str]:
        """Return the names of what is in the folder."""
        return os.listdir(self.descriptor)

    def stat(self, name: str) -> os.stat_result:
        """Return what is known of a file, or of a link itself."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def _regular(self, name: str, flags: int) -> int:
        descriptor = os.open(name, _FILE | flags, 0o600, dir_fd=self.descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(self.path / name))


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of any file that a user has named; links are followed.

    Raises OSError as the disk does, if it is no regular file (a pipe, a device), or has more than `most` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return _whole(file, most)


def _whole(file: BinaryIO, most: int) -> bytes:
    if os.fstat(file.fileno()).st_size > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(file.name))
    return file.read()


def not_ours(about: os.stat_result) -> str:
    """Return why others decide what is in a file or folder, as ``belongs to another user (number 7)``; else "".

    This user and root may own it; nobody else may write it.
    """
    if about.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (number {about.st_uid})"
    return "may be written by other users" if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def is_alone_in_group(about: os.stat_result, owner: int | None = None) -> bool:
    """True if the `owner` (None: this user) owns it, and of others only a group may write it that is his own.

    That is the group with his name; where neither has a name (in a container), the one with his number.
    """
    owner = os.geteuid() if owner is None else owner
    if about.st_uid != owner or about.st_mode & stat.S_IWOTH:
        return False
    user: pwd.struct_passwd | None = None
    group: grp.struct_group | None = None
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(about.st_uid)
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(about.st_gid)
    if user is None or group is None:
        return user is None and group is None and about.st_gid == about.st_uid
    return (user.pw_gid, user.pw_name) == (group.gr_gid, group.gr_name) and set(group.gr_mem) <= {user.pw_name}


def not_private(about: os.stat_result) -> str:
    """Return why a file or folder is not this user's alone, or others may read it: as a part of a sentence; else ""."""
    if about.st_uid != os.geteuid():
        return f"belongs to another user (number {about.st_uid})"
    return "may be read by other users" if about.st_mode & 0o077 else ""


def _followed(path: Path) -> Path:
    """Return where a link leads, if `path` is one of this user's or root's. Raises OSError if it is another user's."""
    for _ in range(_MOST_LINKS):
        try:
            about = os.lstat(path)
        except FileNotFoundError:
            break  # who opens it says so
        if not stat.S_ISLNK(about.st_mode):
            break
        if about.st_uid not in (os.geteuid(), 0):
            raise OSError(errno.ELOOP, "it is a link of another user", str(path))
        path = path.parent / os.readlink(path)
    return path


def delete_oldest(paths: Iterable[Path], keep: int) -> None:
    """Delete the files that were written longest ago, but for `keep` of them. Links are deleted themselves."""
    for path in sorted(paths, key=lambda path: path.lstat().st_mtime, reverse=True)[keep:]:
        path.unlink(missing_ok=True)


def lock_within(descriptor: int, seconds: float, look: float) -> bool:
    """Lock a file that is open, for this descriptor alone; look again every `look` seconds. False if it stays held."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(look)
        else:
            return True


@contextlib.contextmanager
def held(folder: Path, name: str, seconds: float, refusal: Callable[[int], Exception]) -> Iterator[int]:
    """In the body this process has the lock `name` of a folder, which ends with it. Yields the descriptor of its file.

    A lock that another process has is waited for; after so many seconds what `refusal` makes of the descriptor is
    raised. A file system without locks (ENOLCK, ENOSYS, ENOTSUP) keeps nobody out.
    """
    with opened(folder) as own:
        descriptor, free = own.lock_file(name), True
    try:
        with contextlib.suppress(OSError):
            free = lock_within(descriptor, seconds, _LOOK_S)
        if not free:
            raise refusal(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def is_held(path: Path, *, unknown: bool = False) -> bool:
    """True if a process has this lock; `unknown` if there is the file, and it or its lock cannot be looked at."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return unknown and not isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return unknown
    finally:
        os.close(fd)
    return False


def is_running(folder: Path, *, unknown: bool = False) -> bool:
    """True if a launcher or a coordinator on this machine runs the run in this folder. `unknown`: see `is_held`."""
    return is_held(folder / LOCK, unknown=unknown) or is_held(folder / COORDINATOR_LOCK, unknown=unknown)


def was_left(folder: Path) -> bool:
    """True if a launcher had begun the run in this folder, its coordinator was on this machine, and both are gone."""
    with contextlib.suppress(OSError):
        here = read_file(folder / COORDINATOR_LOCK).endswith(f" on {socket.gethostname()}".encode())
        return here and (folder / LOCK).exists() and not is_running(folder, unknown=True)
    return False
