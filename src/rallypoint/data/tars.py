"""Tars of samples, as WebDataset writes them, read by position."""

from __future__ import annotations

import hashlib
import io
import secrets
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import numpy as np
import numpy.typing as npt

from rallypoint.data.cache import Cache, cache_of
from rallypoint.data.files import File, StoredFiles
from rallypoint.data.shards import Rows, ShardedDataset, Transform
from rallypoint.errors import DataError, Explained
from rallypoint.own_files import opened

PIECE_BYTES = 16 << 20  # samples that are read in one request, unless one is larger
BLOCK_BYTES = 4 << 20  # of a store's tar, that a cache keeps
HEADERS_BYTES = 1 << 20  # of a store's tar, read at once for the index

Member = tuple[str, int, int]  # the extension, where its bytes begin in the tar, how many they are
Sample = tuple[str, list[Member]]  # the key
Tar = tuple[str, int, str]  # its name, its bytes, its mark: see `remote.File`

_HEADER = tarfile.BLOCKSIZE  # bytes of a member's header, just before its own
_SUMS = np.dtype("<u4")  # of their checksums


class TarPiece(msgspec.Struct, frozen=True, array_like=True):
    """Samples that follow each other in one tar."""

    tar: int  # the number of the tar
    start: int  # where their bytes begin
    stop: int  # where they end
    count: int  # how many they are
    samples: bytes  # their members, packed, because a data set may have 10^8 of them
    headers: bytes  # a checksum of each member's header, packed: that of another member has another one


class WebDataset(ShardedDataset):
    """Samples in tars: ``rp.WebDataset("s3://bucket/train-*.tar", transform=decode)``.

    Members whose names are the same up to the first dot after the last slash are one sample, if they follow each other:
    ``{"__key__": "a/17", "jpg": b"...", "cls": b"3"}``. `transform` decodes it. The tars are read once, when it is
    made, to know where each sample is; then a sample is found by its position, and about 16 MiB of samples are read in
    one request.

    Arguments:
        urls: a local path or any URL of fsspec; a pattern; a folder, of which the files `.tar` are taken in the order
            of their names; or several of these.
        transform: makes a sample of the dict; what it draws from the global random generators is seeded.
        index: a file on this machine that keeps where the samples are: if it exists and is of these tars, they are not
            read for that again. A tar that was written again, as its size, its time or its ETag tells, is.
        cache_bytes: of samples that each process keeps.
        threads: tars, or pieces of them, that are read at once.
        storage_options: what fsspec needs for the store: keys, endpoints.
        cache: a `Cache`, or a folder for one: what is read from a store is kept on this machine's disk.

    Raises DataError when there are no such files; when one is no tar, is compressed, damaged or cut, has sparse files,
    hard links, names that are not UTF-8, or one twice in a sample; when a tar is another one than it was; and when a
    store fails five times in a row.
    """

    def __init__(
        self, urls: str | Path | Sequence[str | Path], transform: Transform | None = None, *,
        index: str | Path | None = None, cache_bytes: int = 1 << 30, threads: int = 8,
        storage_options: Mapping[str, Any] | None = None, cache: Cache | str | Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cache_bytes=cache_bytes, threads=threads, transform=transform)
        self._store = StoredFiles(storage_options, cache=cache_of(cache), block=BLOCK_BYTES)
        self._files = self._store.found(urls, ".tar")
        with ThreadPoolExecutor(threads, "reading tars") as pool:
            tars = [(str(file), file.size, file.mark) for file in self._files]
            found = None if index is None else _kept(Path(index), tars)
            if found is None:
                found = [piece for of in pool.map(self._pieces_of, range(len(tars))) for piece in of]
                if index is not None:
                    _keep(Path(index), tars, found)
        self._pieces = found
        self._index(piece.count for piece in found)
        if not len(self):
            raise DataError(f"there are no samples in {self._files[0]}" + " and the other tars" * (len(tars) > 1))

    def fingerprint(self) -> bytes:
        """Return a digest of the tars' names and sizes, and of the names, sizes and places of the samples in them."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(msgspec.msgpack.encode([(file.name, file.size) for file in self._files]))
        for piece in self._pieces:
            digest.update(msgspec.msgpack.encode((piece.tar, piece.samples)))
        return digest.digest()

    def ranges(self, shard: int) -> list[tuple[File, int, int]]:
        """Return the piece of a tar."""
        piece = self._pieces[shard]
        return [(self._files[piece.tar], piece.start - _HEADER, piece.stop)]

    def _read(self, shard: int) -> Rows:
        piece = self._pieces[shard]
        file, start = self._files[piece.tar], piece.start - _HEADER
        data = self._store.read(file, start, piece.stop)
        samples = msgspec.msgpack.decode(piece.samples, type=list[Sample])
        return PieceRows(str(file), data, start, samples, np.frombuffer(piece.headers, _SUMS))

    def _pieces_of(self, number: int) -> list[TarPiece]:
        file, pieces = self._files[number], list[TarPiece]()
        opened = io.BufferedReader(self._store.open(file), HEADERS_BYTES)
        samples, sums = list[Sample](), list[int]()

        def end_piece() -> None:
            (_, start, _), (_, last, size) = samples[0][1][0], samples[-1][1][-1]
            packed, headers = msgspec.msgpack.encode(samples), np.asarray(sums, _SUMS).tobytes()
            pieces.append(TarPiece(number, start, last + size, len(samples), packed, headers))
            samples.clear()
            sums.clear()

        try:
            for sample, headers in _samples(opened, str(file)):
                if samples and sample[1][-1][1] + sample[1][-1][2] - samples[0][1][0][1] > PIECE_BYTES:
                    end_piece()
                samples.append(sample)
                sums += headers
            if samples:
                end_piece()
        except (tarfile.TarError, EOFError) as error:
            raise DataError(
                f"{file} cannot be read as a tar: {error}; one that is compressed must be unpacked: samples are read "
                "from its middle"
            ) from error
        return pieces


class PieceRows:
    """Samples of one piece, in memory. `data` begins at the byte `start` of the tar."""

    def __init__(
        self, tar: str, data: bytes, start: int, samples: list[Sample], headers: npt.NDArray[np.uint32]
    ) -> None:
        self.nbytes = len(data)
        self._tar, self._data, self._start, self._samples, self._headers = tar, data, start, samples, headers
        self._firsts = list(accumulate((len(members) for _, members in samples), initial=0))  # of `headers`

    def row(self, number: int) -> dict[str, Any]:
        """Return one sample: its key, and the bytes of its members by their extensions.

        Raises DataError if its members are not where they were.
        """
        key, members = self._samples[number]
        found: dict[str, Any] = {"__key__": key}
        headers = self._headers[self._firsts[number] : self._firsts[number + 1]]
        for (extension, begin, size), header in zip(members, headers, strict=True):
            at = begin - self._start
            if zlib.crc32(self._data[at - _HEADER : at]) != header:
                raise DataError(
                    f"{self._tar} is another tar than it was when it was indexed: {key}.{extension} is no longer at "
                    f"byte {begin}. Begin again, and delete the file of index= before, if there is one"
                )
            found[extension] = self._data[at : at + size]
        return found


class _Header(tarfile.TarInfo):
    """A member, with the checksum of its header."""

    sum: int

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        found.sum = zlib.crc32(buf)
        return found


def _samples(opened: Any, tar_name: str) -> Iterator[tuple[Sample, list[int]]]:
    """Each sample, with the checksums of its members' headers."""
    key, members, sums = "", list[Member](), list[int]()
    with tarfile.open(fileobj=opened, mode="r:", tarinfo=_Header, encoding="utf-8") as tar:
        while (info := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
            folder, slash, name = info.name.rpartition("/")
            stem, dot, extension = name.partition(".")
            if not (info.isfile() or info.islnk()) or not dot or not stem:
                continue
            _check_member(info, tar_name)
            if members and key != folder + slash + stem:
                yield (key, members), sums
                members, sums = [], []
            if any(extension == known for known, _, _ in members):
                raise DataError(f"{tar_name} has two members {info.name} in one sample: write them with other names")
            key = folder + slash + stem
            members.append((extension, info.offset_data, info.size))
            sums.append(cast(_Header, info).sum)
        opened.seek(tar.offset)
        if opened.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:  # what `next` takes for the end too
            raise tarfile.ReadError(f"it is damaged, or cut, at byte {tar.offset}")
    if members:
        yield (key, members), sums


def _check_member(info: tarfile.TarInfo, tar_name: str) -> None:
    try:
        info.name.encode()
    except UnicodeEncodeError:
        raw = info.name.encode(errors="surrogateescape")
        raise DataError(
            f"{tar_name} has a member whose name is not UTF-8 ({raw!r}): write it with another name"
        ) from None
    if info.issparse() or info.islnk():
        what, how = ("hard link", "with --hard-dereference") if info.islnk() else ("sparse file", "without --sparse")
        raise DataError(f"{tar_name} has {info.name} as a {what}, without all of its bytes: write the tar {how}")


_MOST_INDEX_BYTES = 8 << 30


class _Index(msgspec.Struct):
    tars: list[Tar]
    pieces: list[TarPiece]


def _kept(path: Path, tars: list[Tar]) -> list[TarPiece] | None:
    """The index that this file keeps; None if there is none, or it is of other tars."""
    try:
        whole = path.resolve()
        with opened(whole.parent) as folder:
            found = msgspec.msgpack.decode(folder.read(whole.name, _MOST_INDEX_BYTES), type=_Index)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    except OSError as error:
        raise DataError(f"index={path} cannot be read: {error.strerror}; name another file") from None
    return found.pieces if found.tars == tars else None


def _keep(path: Path, tars: list[Tar], pieces: list[TarPiece]) -> None:
    partial = f".{path.name}.{secrets.token_hex(8)}.partial"  # other workers may write it too: each one whole
    cannot = Explained(DataError, f"index={path} cannot be written", "; name another file")
    with cannot, opened(path.parent, make=True) as folder:
        folder.write(path.name, msgspec.msgpack.encode(_Index(tars, pieces)), mode=0o666, beside=partial)
