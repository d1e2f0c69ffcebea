"""How SQLite keeps a file whole on the disk where it is: by a log that needs shared memory, or by an older way."""

from __future__ import annotations

import re
from pathlib import Path

WAL, ROLLBACK = "wal", "truncate"
_MOUNTS = Path("/proc/self/mountinfo")
_SHARED = re.compile(  # file systems of networks; of FUSE's nobody knows, but for those of local disks
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|beegfs|ceph|glusterfs|afs|ncpfs|ocfs2|gfs2?|pvfs2|orangefs|9p|virtiofs|"
    r"fuse(?!blk|ctl).*"
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


def journal_mode(path: Path) -> str:
    """Return SQLite's ``journal_mode`` for the database at `path`: WAL, or ROLLBACK on a file system of a network.

    With WAL the processes that use a file share memory, which those of two hosts cannot: SQLite does not support it
    there. A rollback journal needs file locks alone, and costs two more flushes for each transaction.
    """
    try:
        mounts = _MOUNTS.read_text(errors="replace")
    except OSError:  # no Linux
        return WAL
    return ROLLBACK if _SHARED.fullmatch(kind_of(path.resolve(), mounts)) else WAL


def kind_of(path: Path, mounts: str) -> str:
    """Return the kind of the file system that holds `path`, as ``ext4``, by the text of ``mountinfo``; "": unknown."""
    found, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, about = before.split(" "), after.split(" ")
        if len(fields) < 5 or not about[0]:
            continue
        place = Path(_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4]))
        if path.is_relative_to(place) and len(place.parts) >= found:  # the last one hides those before it
            found, kind = len(place.parts), about[0]
    return kind


def is_over(path: Path) -> bool:
    """True if nobody has the database at `path` open, as far as its files say: it may be read without locks.

    Without locks SQLite leaves no files of its own beside it. With a rollback journal the files do not say it.
    """
    with path.open("rb") as file:
        header = file.read(20)
    return header[18:20] == b"\x02\x02" and not path.with_name(f"{path.name}-wal").exists()  # its mode is WAL
