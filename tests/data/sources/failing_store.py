"""A store that counts what is asked of it, and fails some requests: fsspec's files in memory behind another name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from rallypoint.data.sources import remote


class FailingStore(MemoryFileSystem):
    """`failing://` has the files of `memory://`. Of the requests for bytes every `every`-th fails; 0: none."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    every = 0
    requests = sent = failed = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("failing:/")))

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
    monkeypatch.setattr(remote, "PAUSES_S", (0.0,) * 4)
    FailingStore.every, FailingStore.requests, FailingStore.sent, FailingStore.failed = every, 0, 0, 0
    try:
        yield FailingStore
    finally:
        FailingStore.store.clear()
        FailingStore.pseudo_dirs[:] = [""]
        FailingStore.clear_instance_cache()
