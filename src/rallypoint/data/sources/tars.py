"""Tars of samples, as WebDataset writes them, read by position."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.data.sources.remote import Files
from rallypoint.data.sources.shards import Rows, ShardedDataset, Transform
from rallypoint.errors import DataError

PIECE_BYTES = 16 << 20  # samples that are read in one request, unless one is larger
HEADERS_BYTES = 1 << 20  # of a store's tar, read at once for the index

Member = tuple[str, int, int]  # the extension, where its bytes begin in the tar, how many they are
Sample = tuple[str, list[Member]]  # the key


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Samples that follow each other in one tar.

    Attributes:
        tar: the number of the tar.
        start: where their bytes begin.
        stop: where they end.
        count: how many they are.
        samples: their members, packed, because a data set may have 10^8 of them.
    """

    tar: int
    start: int
    stop: int
    count: int
    samples: bytes


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
            read for that again.
        cache_bytes: of samples that each process keeps.
        threads: tars, or pieces of them, that are read at once.
        storage_options: what fsspec needs for the store: keys, endpoints.

    Raises DataError when there are no such files, when one is no tar, is compressed, damaged or cut, and when a
    store fails five times in a row.
    """

    def __init__(
        self, urls: str | Path | Sequence[str | Path], transform: Transform | None = None, *,
        index: str | Path | None = None, cache_bytes: int = 1 << 30, threads: int = 8,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cache_bytes=cache_bytes, threads=threads, transform=transform)
        self._store = Files(storage_options)
        self._files = self._store.found(urls, ".tar")
        with ThreadPoolExecutor(threads, "reading tars") as pool:
            self._sizes = list(pool.map(self._store.size, self._files))
            tars = [(str(file), size) for file, size in zip(self._files, self._sizes, strict=True)]
            found = None if index is None else _kept(Path(index), tars)
            if found is None:
                found = [piece for of in pool.map(self._pieces_of, range(len(tars))) for piece in of]
                if index is not None:
                    _keep(Path(index), tars, found)
        self._pieces = found
        self._index(piece.count for piece in found)
        if not len(self):
            raise DataError(f"there are no samples in {self._files[0]}" + " and the other tars" * (len(tars) > 1))

    def _read(self, shard: int) -> Rows:
        piece = self._pieces[shard]
        data = self._store.read(self._files[piece.tar], piece.start, piece.stop)
        return PieceRows(data, piece.start, msgspec.msgpack.decode(piece.samples, type=list[Sample]))

    def _pieces_of(self, number: int) -> list[Piece]:
        file, pieces = self._files[number], list[Piece]()
        opened = io.BufferedReader(self._store.open(file, self._sizes[number]), HEADERS_BYTES)
        try:
            samples = list[Sample]()
            for sample in _samples(opened):
                if samples and sample[1][-1][1] + sample[1][-1][2] - samples[0][1][0][1] > PIECE_BYTES:
                    pieces.append(_piece(number, samples))
                    samples = []
                samples.append(sample)
            if samples:
                pieces.append(_piece(number, samples))
        except (tarfile.TarError, EOFError) as error:
            raise DataError(
                f"{file} cannot be read as a tar: {error}; one that is compressed must be unpacked: samples are read "
                "from its middle"
            ) from error
        return pieces


class PieceRows:
    """Samples of one piece, in memory."""

    def __init__(self, data: bytes, start: int, samples: list[Sample]) -> None:
        self.nbytes = len(data)
        self._data, self._start, self._samples = data, start, samples

    def row(self, number: int) -> dict[str, Any]:
        """Return one sample: its key, and the bytes of its members by their extensions."""
        key, members = self._samples[number]
        found: dict[str, Any] = {"__key__": key}
        for extension, begin, size in members:
            found[extension] = self._data[begin - self._start : begin - self._start + size]
        return found


def _samples(opened: Any) -> Iterator[Sample]:
    key, members = "", list[Member]()
    with tarfile.open(fileobj=opened, mode="r:") as tar:
        while (info := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
            folder, slash, name = info.name.rpartition("/")
            stem, dot, extension = name.partition(".")
            if not info.isfile() or not dot or not stem:
                continue
            if members and key != folder + slash + stem:
                yield key, members
                members = []
            key = folder + slash + stem
            members.append((extension, info.offset_data, info.size))
        opened.seek(tar.offset)
        if opened.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:  # what `next` takes for the end too
            raise tarfile.ReadError(f"it is damaged, or cut, at byte {tar.offset}")
    if members:
        yield key, members


def _piece(tar: int, samples: list[Sample]) -> Piece:
    (_, start, _), (_, last, size) = samples[0][1][0], samples[-1][1][-1]
    return Piece(tar, start, last + size, len(samples), msgspec.msgpack.encode(samples))


class _Index(msgspec.Struct):
    tars: list[tuple[str, int]]
    pieces: list[Piece]


def _kept(path: Path, tars: list[tuple[str, int]]) -> list[Piece] | None:
    """The index that this file keeps; None if there is none, or it is of other tars."""
    try:
        found = msgspec.msgpack.decode(path.read_bytes(), type=_Index)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return found.pieces if found.tars == tars else None


def _keep(path: Path, tars: list[tuple[str, int]], pieces: list[Piece]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(msgspec.msgpack.encode(_Index(tars, pieces)))
    os.replace(partial, path)  # other workers of this machine may write it too: each one whole
