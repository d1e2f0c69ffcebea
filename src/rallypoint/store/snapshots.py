"""The snapshots of one job on any fsspec filesystem: written in parts, committed at once, verified when read.

    <root>/latest                                 the newest committed snapshot's name, and the name's checksum
    <root>/step-00000042-1/<part>-<n>.shards      encoded shard records, one after the other
    <root>/step-00000042-1/manifest.json          written last: a folder without it is no snapshot

Importing this module loads neither torch nor numpy, because a process that only commits and cleans up needs none.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Literal

import msgspec

from rallypoint.errors import ConfigError, DamagedSnapshot, Explained, SnapshotError, SnapshotFailed, UsageError
from rallypoint.store.files import Chunk, Files, StoreSilent, read_again
from rallypoint.store.manifest import (
    Compression,
    Manifest,
    ShardEntry,
    age,
    checksum_of,
    decode_manifest,
    encode_manifest,
    latest_text,
    most_of_shards,
    shards_by_file,
)

if TYPE_CHECKING:
    from rallypoint.store.record import ShardRecord

Format = Literal["safetensors", "pt", "hf", "dcp"]  # of the checkpoint that is made of a snapshot
MODEL_FILE = "model.safetensors"  # in a Hugging Face folder

# ---- Which snapshots are newest and which are kept: pure decisions on names and manifests ----


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which snapshots are kept. A snapshot is kept if any of these rules asks for it; the newest usable one always is.

    Attributes:
        keep_last: keep this many of the newest.
        keep_best: keep the one with the best value of this metric; "" for none.
        best_is: whether the smallest or the largest value is the best.
    """

    keep_last: int = 3
    keep_best: str = ""
    best_is: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.keep_last < 0:
            raise ConfigError(f"keep_last={self.keep_last}: it cannot be negative; 0 keeps none")


def newest_first(identifiers: Iterable[str], latest: str | None) -> list[str]:
    """Order snapshot names: the one that `latest` names, then those before it, then those after it.

    There are some after it when the job went on from an older snapshot. They belong to the abandoned course of the job.
    """
    bound = order(latest) if latest is not None else None
    return sorted(identifiers, key=lambda name: (bound is None or order(name) <= bound, order(name)), reverse=True)


def wanted(newest: Sequence[Manifest], retention: Retention) -> set[str]:
    """Return the names of the snapshots (given newest first) that the retention keeps."""
    names = {manifest.id for manifest in newest[: retention.keep_last]}
    metric = retention.keep_best
    scored = [manifest for manifest in newest if metric in manifest.metrics]
    if metric and scored:
        best = min if retention.best_is == "min" else max
        names.add(best(scored, key=lambda manifest: manifest.metrics[metric]).id)
    return names


def order(identifier: str) -> tuple[int, int]:
    """Return (version, attempt) of a valid snapshot name."""
    found = age(identifier)
    assert found is not None, f"{identifier} is no snapshot's name"
    return found


# How large the files of a part are: small in a slow store, because only a durable file tells of progress.

FIRST_BYTES = 8 << 20  # of the first file, when nothing is known of the store
FILE_S = 5.0  # a file should be durable after so many seconds


class WritePace:
    """Measures how long files take. It bounds their size, for the next ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bytes, self._began = float(FIRST_BYTES), clock()

    def is_full(self, size: int) -> bool:
        """True if the file that is being written, of `size` bytes until now, should end here."""
        return size >= self._bytes or self._clock() - self._began >= FILE_S

    @contextmanager
    def measured(self) -> Iterator[Callable[[int], None]]:
        """Measure the writing of one file until it is durable. Yields a function that takes its size in bytes."""
        sizes: list[int] = []
        self._began = self._clock()
        yield sizes.append
        took = max(self._clock() - self._began, 1e-9)
        right = sum(sizes) / took * FILE_S
        # Of a small file that was fast enough most of the time may be the store's latency
        self._bytes = right if took > FILE_S else max(self._bytes, right)


FILE_BYTES = 64 << 20
_MOST_BYTES = 256 << 20  # of a manifest: of a model with a million tensors it has about half of that
_MANIFEST = "manifest.json"
_LATEST = "latest"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class SnapshotPart(msgspec.Struct, frozen=True):
    """What one writer added to a snapshot: its files (name -> size in bytes), and where each shard lies in them."""

    files: dict[str, int]
    shards: dict[int, ShardEntry]


class SnapshotStore:
    """The snapshots below one URL (`s3://bucket/run/snapshots`, `memory://x`) or local path.

    Any number of processes may write parts and read; only one at a time may commit and retain. Snapshots are ordered by
    version, then attempt. Reading raises SnapshotError when the filesystem does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._files, self._pace = Files(url), WritePace()

    # Writing

    def write_part(
        self, snapshot_id: str, part: str, records: Iterable[ShardRecord], compression: Compression,
        written: Callable[[SnapshotPart], object] = lambda file: None,
    ) -> SnapshotPart:  # fmt: skip
        """Write some of a snapshot's shards as files `<part>-<n>.shards`; `part` is the writer's own name, or a hash of
        one that cannot be a file's.

        Takes one record after the other, each when the one before it has been written. `written` gets each file as soon
        as it is there. Removes the part's files on any failure. Raises SnapshotFailed when the filesystem refuses.
        """
        _check_name(snapshot_id)
        part = part if _PART.fullmatch(part) else checksum_of(part.encode())
        files: dict[str, int] = {}
        shards: dict[int, ShardEntry] = {}
        try:
            coming = iter(records)
            while (first := next(coming, None)) is not None:
                name = f"{part}-{len(files)}.shards"
                with self._pace.measured() as measure, self._writing(snapshot_id, f"{snapshot_id}/{name}") as write:
                    entries = _write_file(name, chain((first,), coming), compression, write, self._pace)
                    measure(size := sum(entry.length for entry in entries.values()))
                files[name] = size
                shards |= entries
                written(SnapshotPart({name: files[name]}, entries))
        except BaseException:
            for name in files:  # the disk may be full: remove what nobody will need
                with contextlib.suppress(OSError):
                    self._files.remove(f"{snapshot_id}/{name}")
            raise
        return SnapshotPart(files, shards)

    def commit(self, manifest: Manifest, after: str | None = "") -> None:
        """Commit a snapshot whose parts are all written. After that it is durable. `after`: the newest one as far as
        its coordinator knows; "": it does not.

        Raises SnapshotFailed when a shard is missing, a later coordinator has stored one, or the filesystem refuses.
        """
        _check_name(manifest.id)
        if missing := manifest.missing():
            raise SnapshotFailed(
                f"snapshot {manifest.id} lacks {len(missing)} shards (the first is {missing[0]}) and is not committed"
            )
        data = encode_manifest(manifest)
        with Explained(SnapshotFailed, f"snapshot {manifest.id} is not committed", of=(SnapshotError,)):
            decode_manifest(data)  # a manifest that cannot be read again must not become the newest snapshot
        self._put(manifest.id, f"{manifest.id}/{_MANIFEST}", data)
        other = self.latest() or manifest.id
        if after not in ("", other) and order(other)[1] > order(manifest.id)[1]:  # it was paused, or cut off
            raise SnapshotFailed(f"another coordinator, in place of this one, has stored {other}: end this one")
        self._put(manifest.id, _LATEST, latest_text(manifest.id))

    def unseen(self, manifest: Manifest) -> list[str]:
        """Return the snapshot's files that are not here, or have another size than their writers have told."""
        with self._reading("", manifest.id):
            found = self._files.sizes(manifest.id)
        return [file for file, size in sorted(manifest.files.items()) if found.get(file) != size]

    def amend(self, manifest: Manifest) -> bool:
        """Write a committed snapshot's manifest again, with other metrics. Returns False if the snapshot is gone.

        Raises SnapshotFailed when the filesystem refuses.
        """
        if not self._is_committed(manifest.id):
            return False
        self._put(manifest.id, f"{manifest.id}/{_MANIFEST}", encode_manifest(manifest))
        return True

    def discard(self, snapshot_id: str) -> None:
        """Delete a snapshot, or an attempt at one: first the manifest, so a half-deleted one is not committed."""
        _check_name(snapshot_id)
        with self._deleting(snapshot_id):
            self._files.remove(f"{snapshot_id}/{_MANIFEST}")
            self._files.remove_folder(snapshot_id)

    # Reading

    def latest_usable(self, say: Callable[[str], None]) -> Manifest | None:
        """Return the newest committed snapshot whose bytes all verify; None when there is none.

        `say` gets one sentence for each snapshot that is skipped. Raises SnapshotError when one has a format that this
        version cannot read: using an older one would lose work.
        """
        candidates = self._newest_first(say)
        for position, snapshot_id in enumerate(candidates):
            try:
                manifest = self.load(snapshot_id)
                self.verify(manifest)
            except DamagedSnapshot as error:
                last = position + 1 == len(candidates)
                say(f"{error}; {'there is none before it' if last else 'using the one before it'}")
            else:
                return manifest
        return None

    def holds_any(self) -> bool:
        """True if there is a committed snapshot, usable or not."""
        return any(map(self._is_committed, self._folders()))

    def manifests(self) -> list[Manifest]:
        """Return all committed snapshots but damaged ones and those of another format, oldest first."""
        found = []
        for snapshot_id in self._folders():
            try:
                found.append(self.load(snapshot_id))
            except StoreSilent:  # it may be the best, or the newest
                raise
            except SnapshotError:
                continue
        return found

    def load(self, snapshot_id: str) -> Manifest:
        """Return the manifest of a committed snapshot.

        Raises DamagedSnapshot when it is missing or not what was written.
        """
        _check_name(snapshot_id)
        with self._reading(snapshot_id, _MANIFEST):
            data = read_again(lambda: self._files.get(f"{snapshot_id}/{_MANIFEST}", 0, _MOST_BYTES + 1))
        if len(data) > _MOST_BYTES:
            raise DamagedSnapshot(_damage(snapshot_id, _MANIFEST, f"it has more than {_MOST_BYTES} bytes"))
        try:
            manifest = decode_manifest(data)
        except DamagedSnapshot as error:
            raise DamagedSnapshot(_damage(snapshot_id, _MANIFEST, str(error))) from None
        except SnapshotError as error:
            raise SnapshotError(f"snapshot {snapshot_id} cannot be used: {error}") from None
        if manifest.id != snapshot_id:
            raise DamagedSnapshot(_damage(snapshot_id, _MANIFEST, f"it is the manifest of {manifest.id}"))
        return manifest

    def read(self, manifest: Manifest, shards: Iterable[int]) -> Iterator[ShardRecord]:
        """Return the verified records of some shards, in the given order; only their bytes are read.

        Raises DamagedSnapshot naming the snapshot, the file and the shard; SnapshotError for a shard that it does not
        have.
        """
        from rallypoint.store.record import decode_record  # needs numpy, which importing this module must not

        job = manifest.job
        most = most_of_shards(job)
        for shard in shards:
            entry = manifest.shards.get(shard)
            if entry is None:
                raise SnapshotError(f"snapshot {manifest.id} has no shard {shard}")
            data = self._checked(manifest, shard, entry, most)
            try:
                record = decode_record(data, most[shard])
            except DamagedSnapshot as error:
                raise DamagedSnapshot(_damage(manifest.id, entry.file, f"shard {shard}: {error}")) from None
            right = job.version_at(shard, manifest.version)
            version = record.version if right is None else right
            if (record.shard, record.version) != (shard, version):
                found = f"holds shard {record.shard} at version {record.version} where shard {shard} should be"
                raise DamagedSnapshot(_damage(manifest.id, entry.file, found))
            yield record

    def verify(self, manifest: Manifest) -> None:
        """Read every byte of a snapshot.

        Raises DamagedSnapshot naming the first file and shard that is not as written.
        """
        if missing := manifest.missing():
            raise DamagedSnapshot(_damage(manifest.id, _MANIFEST, f"it has no shard {missing[0]}"))
        self._check_sizes(manifest)
        most = most_of_shards(manifest.job)
        for shards in shards_by_file(manifest).values():
            for shard, entry in shards:
                self._checked(manifest, shard, entry, most)

    # Cleaning up

    def retain(
        self, retention: Retention, keep: Collection[str] = (), versions: Callable[[int], bool] = lambda version: False
    ) -> None:
        """Delete the snapshots that neither `retention` nor `keep` (names) nor `versions` asks for, and older attempts.

        The newest usable snapshot is always kept: the newest one whose files have their sizes. Raises SnapshotFailed
        when something cannot be deleted.
        """
        committed = self.manifests()
        by_id = {manifest.id: manifest for manifest in committed}
        newest = [by_id[name] for name in newest_first(by_id, self.latest())]
        kept = wanted(newest, retention) | set(keep) | {found.id for found in committed if versions(found.version)}
        unwanted = [manifest.id for manifest in committed if manifest.id not in kept]
        if unwanted:
            self._delete_but_the_newest_usable(unwanted, newest)
        if newest:
            self.give_up(newest[0].id, keep)
        with self._deleting():
            self._files.sweep(_LATEST)

    def give_up(self, before: str, keep: Collection[str] = ()) -> None:
        """Delete attempts at snapshots before this one: they take room that it may need. Raises SnapshotFailed."""
        for snapshot_id in self._folders():
            if order(snapshot_id) < order(before) and snapshot_id not in keep and not self._is_committed(snapshot_id):
                self.discard(snapshot_id)

    def _delete_but_the_newest_usable(self, unwanted: list[str], newest: list[Manifest]) -> None:
        usable = next((manifest.id for manifest in newest if not self.unseen(manifest)), None)
        if usable is None:
            return  # no snapshot is usable: delete nothing, the user may still rescue something
        for snapshot_id in unwanted:
            if snapshot_id != usable:
                self.discard(snapshot_id)

    # What exists

    def _newest_first(self, say: Callable[[str], None]) -> list[str]:
        """Return the names of the committed snapshots, damaged ones too, in the order in which to try them."""
        committed = [name for name in self._folders() if self._is_committed(name)]
        latest = self.latest(say)
        if committed and latest is not None and latest not in committed:
            say(f"{self._files.where(_LATEST)} names snapshot {latest}, which is not there; using the one before it")
        return newest_first(committed, latest)

    def latest(self, say: Callable[[str], None] = lambda _: None) -> str | None:
        """The name of the newest committed snapshot; None if there is none, or it cannot be told: `say` gets why."""
        with self._reading("", _LATEST):
            try:
                data = read_again(lambda: self._files.get(_LATEST, 0, 200))  # a name and a checksum
            except FileNotFoundError:
                return None
        name = data.partition(b"\n")[0].decode("ascii", "replace")
        if age(name) is not None and data == latest_text(name):
            return name
        say(f"{self._files.where(_LATEST)} is damaged; using the snapshot with the highest version")
        return None

    def _folders(self) -> list[str]:
        with self._reading("", ""):
            return sorted((name for name in self._files.names() if age(name) is not None), key=order)

    def _is_committed(self, snapshot_id: str) -> bool:
        """Whether it has a manifest. Of what the disk cannot read `load` says so; fsspec's `exists` would say False."""
        try:
            with self._reading(snapshot_id, _MANIFEST):
                return _MANIFEST in read_again(lambda: self._files.names(snapshot_id))
        except DamagedSnapshot:
            return True

    # Bytes

    def _check_sizes(self, manifest: Manifest) -> None:
        for file, size in manifest.files.items():
            with self._reading(manifest.id, file):
                found = read_again(partial(self._files.size, f"{manifest.id}/{file}"))
            if found != size:
                raise DamagedSnapshot(_damage(manifest.id, file, f"it has {found} bytes instead of {size}"))

    def _checked(self, manifest: Manifest, shard: int, entry: ShardEntry, most: Mapping[int, int]) -> bytes:
        if entry.length > 2 * most.get(shard, 0):  # (what cannot be compressed becomes a little larger)
            raise DamagedSnapshot(_damage(manifest.id, entry.file, f"shard {shard} cannot have {entry.length} bytes"))
        with self._reading(manifest.id, entry.file):
            path, stop = f"{manifest.id}/{entry.file}", entry.offset + entry.length
            data = read_again(lambda: self._files.get(path, entry.offset, stop))
        if len(data) != entry.length or checksum_of(data) != entry.checksum:
            raise DamagedSnapshot(_damage(manifest.id, entry.file, f"shard {shard} is not what was written"))
        return data

    def _put(self, snapshot_id: str, path: str, data: bytes) -> None:
        with self._writing(snapshot_id, path) as write:
            write(data)

    @contextmanager
    def _writing(self, snapshot_id: str, path: str) -> Iterator[Callable[[Chunk], object]]:
        try:
            with self._files.writing(path) as write:
                yield write
        except OSError as error:
            raise SnapshotFailed(
                f"snapshot {snapshot_id} failed: {self._files.where(path)} cannot be written: {_reason(error)}; "
                "make room there, or write snapshots elsewhere"
            ) from None

    @contextmanager
    def _deleting(self, path: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self._files.where(path)
            raise SnapshotFailed(f"{where} cannot be deleted: {_reason(error)}; delete it by hand") from None

    @contextmanager
    def _reading(self, snapshot_id: str, file: str) -> Iterator[None]:
        """Raise DamagedSnapshot for a missing file or a disk that keeps failing, StoreSilent for other errors."""
        try:
            yield
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)  # (s3fs says EIO of every answer that it does not know)
            if snapshot_id and (missing or (error.errno == errno.EIO and self._files.on_disks)):
                found = "it is missing" if missing else _reason(error)
                raise DamagedSnapshot(_damage(snapshot_id, file, found)) from None
            where = self._files.where(f"{snapshot_id}/{file}".strip("/"))
            raise StoreSilent(f"{where} cannot be read: {_reason(error)}") from None


def _write_file(
    file: str, records: Iterator[ShardRecord], compression: Compression, write: Callable[[Chunk], object],
    pace: WritePace,
) -> dict[int, ShardEntry]:  # fmt: skip
    """Write encoded records until the file is full or there are no more. Returns where each shard lies."""
    from rallypoint.store.record import encode_chunks  # needs numpy, which importing this module must not

    entries: dict[int, ShardEntry] = {}
    size = 0
    for record in records:
        chunks = encode_chunks(record, compression)
        entry = ShardEntry(file, size, sum(map(len, chunks)), checksum_of(*chunks))
        for chunk in chunks:
            write(chunk)
        entries[record.shard] = entry
        size += entry.length
        if size >= FILE_BYTES or pace.is_full(size):
            break
    return entries


def _check_name(snapshot_id: str) -> None:
    if age(snapshot_id) is None:
        raise UsageError(f"{snapshot_id!r} is no snapshot's name: they are like step-00000120-10003")


def _damage(snapshot_id: str, file: str, what: str) -> str:
    return f"snapshot {snapshot_id} is damaged: file {file}: {what}"


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
