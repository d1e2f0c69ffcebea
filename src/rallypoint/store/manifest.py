"""The manifest of a snapshot: one small file with its own checksum. It is written last, and it commits the snapshot."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import xxhash

from rallypoint.config.changes import kept_record
from rallypoint.core.decisions import Decided
from rallypoint.core.job import JobRecord
from rallypoint.core.typed import build_now
from rallypoint.core.view import EarlyEnd
from rallypoint.errors import ConfigError, DamagedSnapshot, Explained, SnapshotError, UsageError

Compression = Literal["none", "zstd", "zstd-planes"]

FORMAT = 2
_STATES_OF_A_WORD, _CODEC_BYTES_OF_A_WORD, _BESIDE_BYTES = 64, 32, 16 << 20  # generous: no optimizer keeps so much
_ID = re.compile(r"step-(\d{8,18})-(\d{1,9})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.shards")  # a plain name: it cannot lead out of the snapshot's folder


class ShardEntry(msgspec.Struct, frozen=True):
    """The place of one encoded shard: bytes `offset` to `offset + length` of `file`, with their `checksum_of`."""

    file: str
    offset: int
    length: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True):
    """One committed snapshot: a consistent cut of all shards at one version.

    Attributes:
        id: the snapshot's folder, `snapshot_id(version, attempt)`.
        version: updates that every shard has had.
        record: the JobRecord as msgspec builtins; see `job`.
        created: unix time, seconds.
        metrics: the model's quality, as far as known then, such as {"loss": 2.1}.
        compression: how the records were encoded.
        shards: shard index -> where its record lies.
        files: file name -> size in bytes. The shards of a file cover it without gaps.
        stop: the job's early end, if its script had said it before the snapshot was complete.
        decided: what was decided from evaluations of versions up to this one.
        scales: by which an operator had changed the learning rate, which earlier versions of the package allowed.
        format: number of the format of this file and the records.
    """

    id: str
    version: int
    record: dict[str, Any]
    created: float
    metrics: dict[str, float]
    compression: str
    shards: dict[int, ShardEntry]
    files: dict[str, int]
    stop: EarlyEnd | None = None
    decided: Decided = Decided()
    scales: tuple[Any, ...] = ()
    format: int = FORMAT

    @property
    def job(self) -> JobRecord:
        """The job of this snapshot.

        Raises DamagedSnapshot when the record is invalid, ConfigError when it is from an older version of the package
        that cannot be continued.
        """
        if self.scales:
            raise ConfigError(
                f"snapshot {self.id} is of a run whose learning rate an operator had changed, which this version of "
                "Rallypoint does not know: go on with the version that wrote it, or from an earlier snapshot"
            )
        wrong = f"snapshot {self.id} is damaged: its job record is wrong"
        with Explained(DamagedSnapshot, wrong, of=(msgspec.ValidationError,)):
            return kept_record(self.record, f"snapshot {self.id}")

    def missing(self) -> list[int]:
        return [shard.index for shard in self.job.layout.shards if shard.index not in self.shards]


class _Format(msgspec.Struct):
    format: int


def most_bytes(words: int, replicas: int) -> int:
    """The most bytes that the arrays of a shard of so many words may have, in a job of so many replicas."""
    return words * (4 * _STATES_OF_A_WORD + _CODEC_BYTES_OF_A_WORD * replicas) + _BESIDE_BYTES


def most_of_shards(job: JobRecord) -> dict[int, int]:
    """The most bytes that the arrays of each of a job's shards may have."""
    replicas = int(job.config.get("replicas", 1))
    return {shard.index: most_bytes(shard.words, replicas) for shard in job.layout.shards}


def latest_text(snapshot_id: str) -> bytes:
    """The content of `latest`: the name and its checksum. Without one, a changed digit could name another snapshot."""
    return f"{snapshot_id}\n{checksum_of(snapshot_id.encode())}\n".encode()


def snapshot_id(version: int, attempt: int) -> str:
    """Return the name of a snapshot: `step-00000042-1`. An attempt is one try to write a version, counted from 1."""
    if version < 0 or attempt < 0:
        raise UsageError(f"a snapshot of version {version}, attempt {attempt} is impossible: both count upward from 0")
    return f"step-{version:08d}-{attempt}"


def age(identifier: str) -> tuple[int, int] | None:
    """Return (version, attempt) of a snapshot's name, which sorts from old to new; None for any other name."""
    match = _ID.fullmatch(identifier)
    return (int(match[1]), int(match[2])) if match else None


def located(snapshot: str, url: str) -> tuple[str, str]:
    """Return where a snapshot is, and its name: ``NAME`` is in the store at `url`, ``PLACE/NAME`` is in another."""
    place, slash, name = snapshot.rpartition("/")
    return (place or slash or url), name


def checksum_of(*chunks: bytes | memoryview) -> str:
    """Return the 16-byte XXH3 of the concatenated chunks, in hex. It detects damage; it proves no author."""
    state = xxhash.xxh3_128()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as bytes: the checksum of the rest on the first line, then JSON.

    Leaves out metrics that are not finite: JSON cannot hold them, and such a snapshot can never be the best. Raises
    UsageError when anything else cannot be written exactly.
    """
    finite = {name: value for name, value in manifest.metrics.items() if math.isfinite(value)}
    plain = msgspec.to_builtins(msgspec.structs.replace(manifest, metrics=finite), str_keys=True)
    try:
        body = json.dumps(plain, allow_nan=False).encode()  # msgspec would silently write a NaN as null
    except ValueError:
        raise UsageError(f"snapshot {manifest.id}: the job's configuration has a NaN or infinite setting") from None
    return checksum_of(body).encode() + b"\n" + body


_formats, _manifests = msgspec.json.Decoder(_Format), msgspec.json.Decoder(Manifest)
build_now(JobRecord)


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in `data`.

    Raises DamagedSnapshot when the data is not exactly what was written, SnapshotError for a format that is not ours.
    """
    written, _, body = data.partition(b"\n")
    if written != checksum_of(body).encode():
        raise DamagedSnapshot("the manifest is not what was written (its checksum differs)")
    with Explained(DamagedSnapshot, "the manifest cannot be read", of=(msgspec.DecodeError, UnicodeDecodeError)):
        found = _formats.decode(body).format
        if found == FORMAT:
            return _sound(_manifests.decode(body))
    raise SnapshotError(
        f"the snapshot is of format {found}, and this version of Rallypoint reads format {FORMAT}: "
        "use the version that wrote it"
    )


def _sound(manifest: Manifest) -> Manifest:
    parsed = age(manifest.id)
    if parsed is None or parsed[0] != manifest.version:
        raise DamagedSnapshot(f"the manifest's name {manifest.id!r} is not that of version {manifest.version}")
    shards = shards_by_file(manifest)
    for file in sorted(manifest.files.keys() | shards.keys()):
        if not _FILE.fullmatch(file):
            raise DamagedSnapshot(f"the manifest names {file!r}, which no file of a snapshot is called")
        if not _covers(shards.get(file, []), manifest.files.get(file)):
            raise DamagedSnapshot(f"the manifest's shards do not cover file {file} exactly")
    return manifest


def shards_by_file(manifest: Manifest) -> dict[str, list[tuple[int, ShardEntry]]]:
    """Return the shards in each file, in the file's order."""
    inside: dict[str, list[tuple[int, ShardEntry]]] = {}
    for shard, entry in sorted(manifest.shards.items(), key=lambda item: item[1].offset):
        inside.setdefault(entry.file, []).append((shard, entry))
    return inside


def _covers(shards: Iterable[tuple[int, ShardEntry]], size: int | None) -> bool:
    position = 0
    for _, entry in shards:
        if entry.offset != position or entry.length < 1:
            return False
        position += entry.length
    return position == size
