"""A store that counts what is asked of it, and fails some requests: fsspec's files in memory behind another name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from rallypoint.data import files


class FailingStore(MemoryFileSystem):
    """`failing://` has the files of `memory://`. Of the requests for bytes every `every`-th fails; 0: none.

    Of the listings of each folder, and of the questions about each path, the first `refused` fail.
    """

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    every = 0
    requests = sent = failed = refused = 0
    asked: ClassVar[Counter[tuple[str, str]]] = Counter()
    find = AbstractFileSystem.find  # as most stores have it: by `ls`

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("failing:/")))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._refuse("ls", path)
        return super().ls(path, detail=detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._refuse("info", path)
        return super().info(path, **kwargs)

    def _refuse(self, question: str, path: str) -> None:
        self.asked[question, path] += 1
        if self.asked[question, path] <= type(self).refused:
            raise OSError(f"the store is too busy to tell of {path}")

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        cls = type(self)
        cls.requests += 1
        if cls.every and cls.requests % cls.every == 0:
            cls.failed += 1
            if cls.failed % 2:
                raise OSError(f"the store is busy ({cls.requests})")
            return bytes(super().cat_file(path, start, end, **kwargs))[:-1]  # the connection was cut
        data = bytes(super().cat_file(path, start, end, **kwargs))
        cls.sent += len(data)
        return data


@contextmanager
def failing_store(monkeypatch: Any, every: int = 0) -> Iterator[type[FailingStore]]:
    """An empty store, and no pauses between tries."""
    fsspec.register_implementation("failing", FailingStore, clobber=True)
    monkeypatch.setattr(files, "PAUSES_S", (0.0,) * 4)
    FailingStore.every, FailingStore.requests, FailingStore.sent, FailingStore.failed = every, 0, 0, 0
    FailingStore.refused = 0
    FailingStore.asked.clear()
    try:
        yield FailingStore
    finally:
        FailingStore.store.clear()
        FailingStore.pseudo_dirs[:] = [""]
        FailingStore.clear_instance_cache()
